"""Documents that are too long or have nothing to learn: what happens to them, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oomb_accel.data.settings import DataSettings
from oomb_accel.data.store import Range, TokenStore, TrainingSequence

SHOWN = 3


@dataclass(slots=True)
class Fitted:
    """Sequences within the limit, and notes on what was done to the others."""

    sequences: list[TrainingSequence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def fit(sequences: Sequence[TrainingSequence], settings: DataSettings) -> Fitted:
    """Apply ``truncation`` to documents longer than ``max_length``.

    Raises:
        ValueError: there are some, and none of the others was chosen.
    """
    limit = settings.max_length
    long = [one for one in sequences if limit is not None and one.num_tokens > limit]
    if limit is None or not long:
        return Fitted(list(sequences))
    longest = max(long, key=lambda one: one.num_tokens)
    tokens = sum(one.num_tokens for one in long)
    if settings.truncation == "error":
        others = f"; {len(long):,} of {len(sequences):,} documents are longer" if len(long) > 1 else ""
        raise ValueError(
            f"{longest.name} is longer than max_length.\n"
            f"  It has {longest.num_tokens:,} tokens; max_length is {limit:,}{others}.\n"
            f"  Set max_length={longest.num_tokens}, or truncation to drop, start, end or split."
        )
    fitted = Fitted()
    num_parts = 0
    for one in sequences:
        parts = [one] if one.num_tokens <= limit else _cut(one, limit, settings.truncation)
        num_parts += len(parts) if one.num_tokens > limit else 0
        fitted.sequences += parts
    names = shortened([one.name for one in long])
    what = {
        "drop": f"dropped, {tokens:,} tokens, longer than max_length={limit:,}",
        "split": f"{tokens:,} tokens split into {num_parts} documents",
    }.get(settings.truncation, f"kept the {settings.truncation}, {limit * len(long):,} of {tokens:,} tokens")
    count = "" if len(long) == 1 else f"{len(long):,} of {len(sequences):,} documents "
    fitted.notes.append(f"{names}: {what}" if len(long) == 1 else f"{count}({names}): {what}")
    return fitted


def _cut(one: TrainingSequence, limit: int, truncation: str) -> list[TrainingSequence]:
    ((start, end),) = one.ranges
    if truncation == "drop":
        return []
    if truncation == "split":
        cuts: list[Range] = [(at, min(at + limit, end)) for at in range(start, end, limit)]
        return [TrainingSequence(f"{one.name} part {index}", (part,)) for index, part in enumerate(cuts, start=1)]
    kept = (start, start + limit) if truncation == "start" else (end - limit, end)
    return [TrainingSequence(one.name, (kept,))]


def leave_out_untrained(sequences: Sequence[TrainingSequence], store: TokenStore) -> Fitted:
    """Without documents that have no target: they cost time and teach nothing."""
    trained = [sum(store.num_targets(*part) for part in one.ranges) > 0 for one in sequences]
    fitted = Fitted([one for one, kept in zip(sequences, trained, strict=True) if kept])
    untrained = [one.name for one, kept in zip(sequences, trained, strict=True) if not kept]
    if untrained:
        fitted.notes.append(f"left out {len(untrained)} documents without a target: {shortened(untrained)}")
    return fitted


def shortened(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f", ... and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
