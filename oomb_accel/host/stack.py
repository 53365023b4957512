"""Pieces of any size in slabs of an arena, which go in the reverse order of their coming. Numbers only."""

from __future__ import annotations

from typing import NamedTuple

from oomb_accel.host.arena import HostArena, HostMemoryError, Slab
from oomb_accel.plan.places import ALIGNED_BYTES


class Piece(NamedTuple):
    """Memory in a row."""

    address: int
    num_bytes: int


class HostStack:
    """Host memory that grows at its end and is cut there. Slabs that are not needed go back to the arena at once.

    Not for several threads.

    Args:
        arena: where slabs come from.
    """

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._slabs: list[Slab] = []
        self.end = 0
        """Bytes that are taken."""

    @property
    def num_bytes(self) -> int:
        """Of the slabs that this stack holds."""
        return len(self._slabs) * self._arena.slab_bytes

    def take(self, num_bytes: int) -> list[Piece]:
        """Memory for so many bytes, in as many pieces as there are slabs that it lies in.

        Raises:
            HostMemoryError: the arena has no slab for it. Nothing is taken then.
        """
        place, slab_bytes, pieces = self.end, self._arena.slab_bytes, list[Piece]()
        try:
            while self.num_bytes < place + num_bytes:
                self._slabs.append(self._arena.take())
        except HostMemoryError:
            self.cut(place)
            raise
        self.end += -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        while num_bytes:
            number, offset = divmod(place, slab_bytes)
            size = min(num_bytes, slab_bytes - offset)
            pieces.append(Piece(self._slabs[number].address + offset, size))
            place, num_bytes = place + size, num_bytes - size
        return pieces

    def cut(self, end: int) -> None:
        """Forget what was taken beyond so many bytes."""
        assert end <= self.end
        self.end = end
        while self.num_bytes - self._arena.slab_bytes >= end and self._slabs:
            self._arena.give(self._slabs.pop())

    def close(self) -> None:
        """Give all slabs back."""
        self.cut(0)
