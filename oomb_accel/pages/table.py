"""Which slot holds which page. Ids only: no tensors, testable without torch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from oomb_accel.schedule import PageRange

NO_SLOT = -1


class PageTable:
    """Page to slot, per layer and KV head, over one pool of slots.

    Args:
        num_layers: layers of the model.
        num_heads: KV heads per layer; the heads of a page are allocated and freed together.
        num_pages: logical pages of the stream.
        num_slots: slots in the pool.
    """

    def __init__(self, num_layers: int, num_heads: int, num_pages: int, num_slots: int) -> None:
        self._slots = np.full((num_layers, num_pages, num_heads), NO_SLOT, dtype=np.int32)
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # a stack: its end is taken first
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self._num_free

    def can_allocate(self, pages: PageRange) -> bool:
        """Whether the pool has a slot for every head of these pages."""
        return len(pages) * self._slots.shape[2] <= self._num_free

    def allocate(self, layer: int, pages: PageRange) -> None:
        """Give every head of these pages a slot. None of them may have one."""
        assert self.can_allocate(pages), "the pool is sized for the whole stream before it starts"
        target = self._slots[layer, pages.first : pages.end]
        assert (target == NO_SLOT).all(), "a page is allocated once"
        taken = self._free[self._num_free - target.size : self._num_free][::-1]
        target[...] = taken.reshape(target.shape)
        self._num_free -= target.size

    def free(self, layer: int, pages: PageRange) -> None:
        """Give back the slots of these pages; pages without one are passed over."""
        target = self._slots[layer, pages.first : pages.end]
        given = target[target != NO_SLOT][::-1]
        self._free[self._num_free : self._num_free + given.size] = given
        self._num_free += given.size
        target[...] = NO_SLOT

    def slots(self, layer: int, pages: PageRange) -> npt.NDArray[np.int32]:
        """Slots of these pages, ``[num_pages, num_heads]``; ``NO_SLOT`` where there is none."""
        return self._slots[layer, pages.first : pages.end]

    def runs(self, layer: int, pages: PageRange) -> list[tuple[PageRange, bool]]:
        """These pages as maximal runs that all have a slot (True) or all have none (False)."""
        held = self._slots[layer, pages.first : pages.end, 0] != NO_SLOT
        cuts = [0, *(np.flatnonzero(held[1:] != held[:-1]) + 1).tolist(), len(pages)]
        return [(PageRange(pages.first + a, pages.first + b), bool(held[a])) for a, b in pairwise(cuts) if b > a]
