"""An arena without threads and mappings, for tests of what lies in host memory."""

from __future__ import annotations

import heapq

import torch

from oomb_accel.host import HostArena, HostMemoryError, HostStore, Slab


class PlainArena:
    """Slabs of ordinary memory.

    Args:
        most: slabs that may be taken at one time.
    """

    def __init__(self, slab_bytes: int, most: int = 1 << 30) -> None:
        self.slab_bytes = slab_bytes
        self.most = most
        self.num_taken = 0
        self._slabs: list[Slab] = []
        """All of them live on: somebody may still copy from or to them, as with slabs of a real arena."""
        self._free: list[int] = []

    def take(self) -> Slab:
        if self.num_taken >= self.most:
            raise HostMemoryError("Pages need more host memory than they may have.")
        self.num_taken += 1
        if self._free:  # as in a real arena, where somebody may still copy from or to it
            return self._slabs[heapq.heappop(self._free)]
        memory = torch.full((self.slab_bytes,), 255, dtype=torch.uint8)
        self._slabs.append(Slab(len(self._slabs), memory.data_ptr(), memory))
        return self._slabs[-1]

    def give(self, slab: Slab) -> None:
        assert self._slabs[slab.number] is slab and self.num_taken > 0
        self.num_taken -= 1
        heapq.heappush(self._free, slab.number)


def plain_store(record_bytes: int, *, records_per_slab: int = 4, most_slabs: int = 1 << 30) -> HostStore:
    """Host memory for records, in plain slabs."""
    arena = PlainArena(record_bytes * records_per_slab, most_slabs)
    return HostStore(as_arena(arena), record_bytes)


def as_arena(arena: object) -> HostArena:
    """What a store asks of an arena is all there."""
    return arena  # type: ignore[return-value]
