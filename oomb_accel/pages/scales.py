"""The scales of pages whose K and V are stored in 8 bits.

Legend: G KV heads, N pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oomb_accel.pages.shape import PageShape
from oomb_accel.schedule import PageRange


class ScaleBank:
    """A scale for K and one for V of each page of one stream, by layer and KV head. Small: it never leaves the device.

    Entries of released pages stay where they are: nobody asks for them again.
    """

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device) -> None:
        size = (shape.num_layers, num_pages, shape.num_kv_heads, 2)
        self._bank = torch.empty(size, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        return self._bank.numel() * self._bank.element_size()

    def of(self, layer: int, *ranges: PageRange) -> Tensor:
        """``[G, N, 2]`` of one range after another; of a single range a view."""
        parts = [self._bank[layer, pages.first : pages.end] for pages in ranges]
        scales_NG2 = parts[0] if len(parts) == 1 else torch.cat(parts)
        return scales_NG2.transpose(0, 1)
