"""The mean keys of the parts of every stored page, by which pages are selected.

Legend: G KV heads, T tokens, D head_dim, N pages, C their parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oomb_accel.pages.shape import PageShape
from oomb_accel.schedule import PageRange
from oomb_kernels import page_centroids


class CentroidBank:
    """Mean keys of the pages of one stream, for the layers that select pages.

    Entries of released pages stay where they are: nobody asks for them again.
    """

    def __init__(self, shape: PageShape, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self._parts = shape.parts
        self._part_tokens = shape.page_tokens // self._parts
        layers = sorted(shape.sparse_layers)
        size = (len(layers), num_pages * self._parts, shape.num_kv_heads, shape.head_dim)
        self._bank = torch.empty(size, dtype=dtype, device=device)
        self._of_layer = dict(zip(layers, self._bank.transpose(1, 2).unbind(), strict=True))
        """``[G, N * C, D]``, views."""

    @property
    def num_bytes(self) -> int:
        return self._bank.numel() * self._bank.element_size()

    def store(self, layer: int, pages: PageRange, k_GTD: Tensor) -> None:
        """Keep the mean keys of these pages; ``k_GTD`` holds their tokens."""
        self.of(layer, pages).copy_(page_centroids(k_GTD, self._part_tokens))

    def of(self, layer: int, pages: PageRange) -> Tensor:
        """``[G, C, D]``, a view; the parts of a page stand together."""
        return self._of_layer[layer][:, pages.first * self._parts : pages.end * self._parts]
