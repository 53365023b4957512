"""Device memory for pages: slots, without any policy."""

from __future__ import annotations

import torch


class PagePool:
    """Slots for pages of one kind (K and V, or their gradients).

    Attributes:
        storage: ``[num_slots, 2, page_tokens, head_dim]``, uninitialised; K then V of one (layer, page, KV head).
    """

    def __init__(
        self, num_slots: int, page_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.storage = torch.empty(num_slots, 2, page_tokens, head_dim, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self.storage.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.storage.numel() * self.storage.element_size()
