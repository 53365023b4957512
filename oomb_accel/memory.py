"""What a stream remembers between passes over its chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from oomb_accel.foresight import Foresight, Phase
from oomb_accel.pages import PagedKVCache, PageRooms
from oomb_accel.schedule import Chunk
from oomb_accel.selection import PageSelector

Outputs = dict[int, tuple[Tensor, Tensor]]
"""Attention output and LSE by layer: ``[H, T, D]`` and ``[H, T]``."""


class Product(NamedTuple):
    """What a linear layer with LoRA has computed."""

    out: Tensor
    """``[..., O]``"""
    xa: Tensor
    """``x A^T``, ``[T, R]``."""
    version: int
    """Of ``out`` when it was made: somebody may change it in place."""


Products: TypeAlias = dict[Any, list[Product]]
"""By linear layer, what it has computed for one chunk, call by call; others are not kept."""


class HeadGradient(NamedTuple):
    """Log-probabilities of targets, and their gradients with respect to what the head reads."""

    log_probs_N: Tensor
    """fp32, fp64 for fp64 logits."""
    gradient_ND: Tensor
    """In the dtype of logits."""


@dataclass(slots=True)
class StreamMemory:
    """Pages, selections and kept outputs of one stream. Each chunk is released as soon as its backward has run."""

    cache: PagedKVCache
    selector: PageSelector | None = None
    """None where every layer attends to everything, or to its window."""
    kept: dict[int, Outputs] = field(default_factory=dict)
    """By index of the chunk, for those whose attention outputs are kept for the backward sweep."""
    products: dict[int, Products] = field(default_factory=dict)
    """By index of the chunk, for those of which outputs of linear layers are kept."""
    heads: dict[int, HeadGradient | None] = field(default_factory=dict)
    """By index of the chunk, for those whose head is kept from running again; None before its first pass."""
    foresight: Foresight | None = None
    """None where all pages stay on the device."""
    rooms: PageRooms | None = None
    """How pages are divided between device and host, where not all stay on the device."""

    def device_bytes(self) -> dict[str, int]:
        """Device bytes of what is kept from chunk to chunk, by tier."""
        # Layers are alike, and all of them have run whenever somebody asks.
        kept = [len(outputs) * _num_bytes(*next(iter(outputs.values()))) for outputs in self.kept.values() if outputs]
        made = (product for products in self.products.values() for product in chain(*products.values()))
        kept += [_num_bytes(product.out, product.xa) for product in made]
        kept += [_num_bytes(*head) for head in self.heads.values() if head is not None]
        return {**self.cache.device_bytes(), "kept_outputs": sum(kept)}

    def begin(self, chunk: Chunk, phase: Phase) -> None:
        """A run of the model over a chunk begins, or its backward. After the forward sweep nothing is selected."""
        if phase != "forward":
            self.cache.drop_centroids()
        if self.foresight is not None:
            self.cache.begin(self.foresight.begin(chunk, phase))

    def release(self, chunk: Chunk) -> None:
        """Forget a chunk: nothing will ask for it again."""
        self.kept.pop(chunk.index, None)
        self.products.pop(chunk.index, None)
        self.heads.pop(chunk.index, None)
        self.cache.release(chunk)
        if self.selector is not None:
            self.selector.release(chunk)


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
