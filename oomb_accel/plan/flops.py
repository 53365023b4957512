"""The arithmetic that a training step needs, however it is run: what FLOP/s utilisation is counted in. No torch.

A matrix of N numbers costs a token 2N floating-point operations forwards, 2N for the gradient of its input, and 2N for
its own gradient where it is trained: 6N, or 4N for a frozen one. A pair of query and key costs 4 x heads x head_dim
forwards and twice that backwards. What is computed again in the backward sweep is not counted, nor are norms,
activations, softmax and the choice of pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from oomb_accel.plan.shape import ModelShape
from oomb_accel.schedule import ChunkSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseReach:
    """To how much of the past a sparse layer attends. Names as in `OombConfig`."""

    layers: frozenset[int]
    chunk_tokens: int
    page_tokens: int
    always_pages: int
    """Sinks and recent pages."""
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Counts the operations of one model."""

    shape: ModelShape
    adapters: int
    """Numbers in adapters; all are trained."""
    layers_trained: bool
    """Whether the linear maps of the layers are trained themselves."""
    head_trained: bool
    sparse: SparseReach | None = None

    def of_stream(self, document_tokens: Sequence[int], num_targets: int) -> float:
        """Forward and backward of one stream.

        Args:
            document_tokens: length of each document; they do not see each other.
            num_targets: tokens for which the head is computed.
        """
        shape = self.shape
        layers = shape.num_layers * shape.active_layer_weights * (6 if self.layers_trained else 4)
        head = shape.head_weights * (6 if self.head_trained else 4)
        attention = 12 * shape.num_heads * shape.head_dim * self._pairs(document_tokens)
        return float(sum(document_tokens) * (layers + 6 * self.adapters) + num_targets * head + attention)

    def _pairs(self, document_tokens: Sequence[int]) -> int:
        """(Query, key) pairs over all layers."""
        sparse = frozenset() if self.sparse is None else self.sparse.layers
        dense = Counter(window for layer, window in enumerate(self.shape.windows) if layer not in sparse)
        pairs = sum(count * _causal(tokens, window) for window, count in dense.items() for tokens in document_tokens)
        if self.sparse is not None and sparse:
            pairs += len(sparse) * _selected(document_tokens, self.sparse)
        return pairs


def _causal(tokens: int, window: int | None) -> int:
    reach = tokens if window is None else min(window, tokens)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


def _selected(document_tokens: Sequence[int], sparse: SparseReach) -> int:
    """Pairs of one sparse layer: within chunks, and with all of a short past or the selected pages of a long one."""
    schedule = ChunkSchedule.build(
        document_tokens, (), chunk_tokens=sparse.chunk_tokens, page_tokens=sparse.page_tokens
    )
    pairs, most = 0, sparse.always_pages + sparse.top_k
    for chunk in schedule.chunks:
        for segment in chunk.segments:
            past = min(segment.past_tokens // sparse.page_tokens, most) * sparse.page_tokens
            pairs += _causal(segment.num_tokens, None) + segment.num_tokens * past
    return pairs
