"""HostStack: pieces that come and go in order."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from oomb_accel.host import HostMemoryError, HostStack, Piece
from tests.harness.slabs import PlainArena, as_arena

SLAB = 4 * 512


def stack_of(most: int = 1 << 30) -> tuple[HostStack, PlainArena]:
    arena = PlainArena(SLAB, most)
    return HostStack(as_arena(arena)), arena


def offsets(pieces: list[Piece], arena: PlainArena) -> list[tuple[int, int, int]]:
    """Slab, place in it and bytes of each piece."""
    starts = [slab.address for slab in arena._slabs]
    found = []
    for piece in pieces:
        number = next(n for n, start in enumerate(starts) if start <= piece.address < start + SLAB)
        found.append((number, piece.address - starts[number], piece.num_bytes))
    return found


def test_places() -> None:
    stack, arena = stack_of()
    assert stack.take(0) == [] and arena.num_taken == 0
    assert offsets(stack.take(500), arena) == [(0, 0, 500)]
    assert offsets(stack.take(513), arena) == [(0, 512, 513)]
    before = stack.end
    assert offsets(stack.take(2 * SLAB), arena) == [(0, 1536, 512), (1, 0, SLAB), (2, 0, 1536)]
    assert offsets(stack.take(512), arena) == [(2, 1536, 512)]
    assert (arena.num_taken, stack.num_bytes, stack.end) == (3, 3 * SLAB, 3 * SLAB)
    stack.cut(before)
    assert arena.num_taken == 1
    assert offsets(stack.take(1), arena) == [(0, 1536, 1)]
    stack.close()
    assert (arena.num_taken, stack.num_bytes, stack.end) == (0, 0, 0)


def test_what_is_refused_takes_nothing() -> None:
    stack, arena = stack_of(most=2)
    stack.take(SLAB - 512)
    with pytest.raises(HostMemoryError):
        stack.take(2 * SLAB)
    assert arena.num_taken == 1 and stack.end == SLAB - 512
    stack.take(SLAB + 512)
    assert arena.num_taken == 2


def test_no_byte_has_two_owners() -> None:
    stack, arena = stack_of()
    chance, held = random.Random(0), list[tuple[int, list[Piece]]]()
    for _ in range(500):
        if held and chance.random() < 0.4:
            end, _ = held.pop(chance.randrange(len(held)))
            held = [(start, pieces) for start, pieces in held if start < end]
            stack.cut(end)
        else:
            size = chance.choice([0, 1, 511, 512, 513, SLAB, 3 * SLAB + 7])
            held.append((stack.end, stack.take(size)))
            assert sum(piece.num_bytes for piece in held[-1][1]) == size
        spans = sorted((piece.address, piece.address + piece.num_bytes) for _, pieces in held for piece in pieces)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert arena.num_taken * SLAB - stack.end in range(SLAB)
