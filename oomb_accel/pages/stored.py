"""Records of one kind, values or gradients of pages, by layer, page and KV head; all of them on the device.

What a cache asks of them is `Records`; `tiered.py` has those that are more than the device holds.

Legend: G KV heads, n pages of a range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oomb_accel.pages.pool import PagePool
from oomb_accel.pages.shape import PageShape
from oomb_accel.pages.table import NO_SLOT, PageTable
from oomb_accel.schedule import PageRange

Wanted: TypeAlias = npt.NDArray[np.int64]
"""Which records of a range of pages: their places in ``[n, G]`` laid out in a row, ascending and distinct. Wide enough
to be an index without a cast."""
WantedLater: TypeAlias = Callable[[], Wanted]
"""The same where the host may have to wait for it: asked for only where it matters."""


class Records(Protocol):
    """What a cache asks of its records. A record exists from `add` to `free`."""

    pool: PagePool

    def exists(self, layer: int, pages: PageRange) -> npt.NDArray[np.bool_]:
        """Which records there are, ``[n, G]``."""

    def lacking(self, layer: int, pages: PageRange, wanted: WantedLater | None) -> Wanted:
        """Those of the wanted records that there are not; None is every record."""

    def add(self, layer: int, pages: PageRange, wanted: Wanted | None = None) -> None:
        """Give these records, or those of them that are wanted, slots. Their contents are whatever lay there."""

    def clear(self, layer: int, pages: PageRange, wanted: Wanted) -> None:
        """Fill these records, just added, with zeros."""

    def use(self, layer: int, *ranges: PageRange, wanted: WantedLater | None = None, write: bool = False) -> Tensor:
        """Slots of existing records, for kernels that are launched before the layer is settled.

        Args:
            ranges: one after another.
            wanted: of one range; None is every record.
            write: whether they are changed.

        Returns:
            int32 ``[G, n]``, any strides; -1 where a record was never added. Records that are not wanted may have any.
        """

    def settle(self, layer: int) -> None:
        """All kernels that use records of this layer have been launched: the records may move."""

    def free(self, pages: PageRange) -> None:
        """Forget these records of all layers."""


class StoredPages:
    """Records that all lie on the device.

    Args:
        num_pages: logical pages of the stream.
        num_slots: records for which there is room.
        dtype: of the pool.
    """

    def __init__(
        self, shape: PageShape, num_pages: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._table = PageTable(shape.num_layers, shape.num_kv_heads, num_pages, num_slots)
        self.pool = PagePool(num_slots, shape.page_tokens, shape.head_dim, dtype, device)
        size = (shape.num_layers, num_pages, shape.num_kv_heads)
        self._mirror = torch.full(size, NO_SLOT, dtype=torch.int32, device=device)
        self._slots_GN = self._mirror.transpose(1, 2).unbind()
        """By layer, views: each that is made in a pass takes the host as long as an operation does."""

    def exists(self, layer: int, pages: PageRange) -> npt.NDArray[np.bool_]:
        exists: npt.NDArray[np.bool_] = self._table.slots(layer, pages) != NO_SLOT
        return exists

    def lacking(self, layer: int, pages: PageRange, wanted: WantedLater | None) -> Wanted:
        missing = self._table.slots(layer, pages).reshape(-1) == NO_SLOT
        if wanted is None:
            return np.flatnonzero(missing)
        numbers = wanted()
        return numbers[missing[numbers]]

    def add(self, layer: int, pages: PageRange, wanted: Wanted | None = None) -> None:
        self._table.allocate(layer, pages, wanted)
        slots, mirror = self._table.slots(layer, pages), self._mirror[layer, pages.first : pages.end]
        if wanted is None:
            mirror.copy_(self._host_tensor(slots), non_blocking=True)
        else:
            where, new = self._to_device(np.stack([wanted, slots.reshape(-1)[wanted]]).astype(np.int32))
            mirror.view(-1).index_copy_(0, where.long(), new)

    def clear(self, layer: int, pages: PageRange, wanted: Wanted) -> None:
        slots = self._to_device(self._table.slots(layer, pages).reshape(-1)[wanted])
        self.pool.storage.index_fill_(0, slots.long(), 0)

    def use(self, layer: int, *ranges: PageRange, wanted: WantedLater | None = None, write: bool = False) -> Tensor:
        slots_GN = self._slots_GN[layer]
        parts = [slots_GN[:, pages.first : pages.end] for pages in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def settle(self, layer: int) -> None:
        return None

    def free(self, pages: PageRange) -> None:
        for layer in range(len(self._mirror)):
            self._table.free(layer, pages)

    def _to_device(self, numbers: npt.NDArray[np.int32]) -> Tensor:
        return self._host_tensor(numbers).to(self._mirror.device, non_blocking=True)

    def _host_tensor(self, slots: npt.NDArray[np.int32]) -> Tensor:
        host = torch.from_numpy(slots.copy())
        return host.pin_memory() if self._mirror.is_cuda else host  # a pageable copy would wait for the stream
