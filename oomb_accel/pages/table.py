"""Which slot holds which page. Ids only: no tensors, testable without torch."""

from __future__ import annotations

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

    def allocate(self, layer: int, pages: PageRange, wanted: npt.NDArray[np.int64] | None = None) -> None:
        """Give every head of these pages a slot, or those at these places in ``[n, G]`` laid out in a row, which are
        distinct. None of them may have one."""
        target = self._slots[layer, pages.first : pages.end].reshape(-1)
        chosen = slice(None) if wanted is None else wanted
        count = target[chosen].size
        assert count <= self._num_free, "the pool is sized for the whole stream before it starts"
        assert (target[chosen] == NO_SLOT).all(), "a record is allocated once"
        target[chosen] = self._free[self._num_free - count : self._num_free][::-1]
        self._num_free -= count

    def free(self, layer: int, pages: PageRange) -> None:
        """Give back the slots of these pages; records without one are passed over."""
        target = self._slots[layer, pages.first : pages.end]
        given = target[target != NO_SLOT][::-1]
        self._free[self._num_free : self._num_free + given.size] = given
        self._num_free += given.size
        target[...] = NO_SLOT

    def slots(self, layer: int, pages: PageRange) -> npt.NDArray[np.int32]:
        """Slots of these pages, ``[num_pages, num_heads]``; ``NO_SLOT`` where there is none."""
        return self._slots[layer, pages.first : pages.end]
