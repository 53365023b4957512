"""Several short documents in one sequence, without seeing each other."""

from __future__ import annotations

from collections.abc import Sequence

from oomb_accel.data.lengths import shortened
from oomb_accel.data.store import TrainingSequence


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Deal items to bins: the longest first, each into the first bin that has room for it.

    Takes time n log n: room is kept in a tree of maxima, in which the first bin with enough of it is found by going
    down once.

    Args:
        lengths: of the items, none above the capacity.
        capacity: of a bin.

    Returns: the items of each bin, in ascending order; bins in the order of their first item.
    """
    size = 1
    while size < len(lengths):
        size *= 2
    room = [capacity] * (2 * size)  # a heap: node n has the children 2n and 2n + 1; bins are the leaves
    bins: dict[int, list[int]] = {}
    for item in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= lengths[item] else 2 * node + 1
        bins.setdefault(node, []).append(item)
        room[node] -= lengths[item]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return sorted(sorted(items) for items in bins.values())


def pack(sequences: Sequence[TrainingSequence], max_length: int) -> tuple[list[TrainingSequence], str]:
    """Put documents together up to ``max_length`` tokens.

    Returns: the sequences, and a note with the share of their room that is filled.
    """
    lengths = [one.num_tokens for one in sequences]
    packed = []
    for items in first_fit_decreasing(lengths, max_length):
        parts = [sequences[item] for item in items]
        name = parts[0].name if len(parts) == 1 else f"{len(parts)} packed: {shortened([one.name for one in parts])}"
        packed.append(TrainingSequence(name, tuple(part for one in parts for part in one.ranges)))
    filled = sum(lengths) / (len(packed) * max_length) if packed else 0.0
    note = (
        f"packed {len(sequences):,} documents into {len(packed):,} sequences of up to {max_length:,} tokens, "
        f"{filled:.1%} full; they do not see each other"
    )
    return packed, note
