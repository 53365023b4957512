"""Pages of one kind with everything that belongs to them: the table, its pool, and the table's copy on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from oomb_accel.pages.pool import PagePool
from oomb_accel.pages.shape import PageShape
from oomb_accel.pages.table import PageTable
from oomb_accel.schedule import PageRange


class StoredPages:
    """K and V pages, or gradient pages, of one stream.

    Args:
        num_pages: logical pages of the stream.
        num_slots: pages of one KV head for which there is room.
        dtype: of the pool.
    """

    def __init__(
        self, shape: PageShape, num_pages: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.table = PageTable(shape.num_layers, shape.num_kv_heads, num_pages, num_slots)
        self.pool = PagePool(num_slots, shape.page_tokens, shape.head_dim, dtype, device)
        self._mirror = torch.empty(shape.num_layers, num_pages, shape.num_kv_heads, dtype=torch.int32, device=device)

    def allocate(self, layer: int, pages: PageRange) -> None:
        """Give these pages slots, whose contents are whatever lay there."""
        self.table.allocate(layer, pages)
        host = torch.from_numpy(self.table.slots(layer, pages).copy())
        if self._mirror.is_cuda:
            host = host.pin_memory()  # a pageable copy would wait for the stream
        self._mirror[layer, pages.first : pages.end].copy_(host, non_blocking=True)

    def device_slots(self, layer: int, *ranges: PageRange) -> Tensor:
        """Slots of the pages of these ranges, one range after another: int32 ``[G, n]``, contiguous."""
        parts = [self._mirror[layer, pages.first : pages.end] for pages in ranges]
        slots_NG = parts[0] if len(parts) == 1 else torch.cat(parts)
        return slots_NG.t().contiguous()
