"""What the sparsity of attention costs on given documents: loss, gradient, and how much is attended to.

Both sides are a training step by the recurrence, with the same chunks; only ``attention`` differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oomb_accel.config import OombConfig
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.parity import padded_batch, parameter_gradients
from oomb_accel.integrations.selections import Selection, SelectionRecord
from oomb_accel.integrations.transformers import attach, disable
from oomb_accel.progress import ChunkEvent
from oomb_accel.selection import OnSelection

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class StepResult:
    """One training step; everything is on the CPU."""

    token_losses: tuple[Tensor, ...]
    """Per document, fp64 ``[T - 1]``: the loss of each token behind the first."""
    gradients: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LossCost:
    """Mean losses over some tokens."""

    first: int
    end: int
    """Positions in the document, ``[first, end)``."""
    num_tokens: int
    dense: float
    sparse: float
    standard_error: float
    """Of the difference, from how it scatters over tokens; nan for a single token."""

    @property
    def difference(self) -> float:
        return self.sparse - self.dense


@dataclass(frozen=True, slots=True)
class GradientCost:
    """How a gradient differs from the dense one."""

    cosine: float
    relative_error: float
    """L2 norm of the difference over that of the dense gradient."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How much of what full attention would see a layer attended to."""

    attended: float
    """Share of (query, key) pairs, over whole documents."""
    pages_per_list: float
    """Selected pages of a query block and KV head; nan in a layer that selects nothing."""
    distinct_pages: float
    """Share of its candidates that a chunk selects for at least one block, per KV head."""


def training_step(
    model: nn.Module,
    config: OombConfig,
    documents: list[Tensor],
    *,
    on_selection: OnSelection | None = None,
    on_progress: Callable[[ChunkEvent], None] | None = None,
) -> StepResult:
    """Loss and gradients of one step over documents. Gradients already on the model are dropped.

    Args:
        model: not switched on; dropout is switched off.
        documents: int64 token ids ``[T]``, at least 2 tokens each.
        on_selection: called whenever pages are selected.
        on_progress: called after every chunk.
    """
    model.eval()
    ids_BL, mask_BL, labels_BL = padded_batch(documents)
    attach(model, config, on_progress=on_progress)
    attachment_of(model).on_selection = on_selection
    try:
        model.zero_grad()
        output = model(input_ids=ids_BL, attention_mask=mask_BL.long(), labels=labels_BL)
        output.loss.backward()
    finally:
        disable(model)
    gradients = {name: grad.cpu() for name, grad in parameter_gradients(model).items()}
    model.zero_grad()
    losses_BL = -output.log_probs.detach().double().cpu()
    return StepResult(tuple(losses_BL[i, : len(ids) - 1] for i, ids in enumerate(documents)), gradients)


def loss_costs(dense: Sequence[Tensor], sparse: Sequence[Tensor], first_bucket: int) -> list[LossCost]:
    """Losses by position, in buckets that double in length; the last entry is over all tokens.

    Args:
        dense, sparse: losses of the tokens behind the first of each document.
        first_bucket: tokens of the first bucket.
    """
    longest = max(len(losses) for losses in dense) + 1
    found = []
    for first, end in [*position_buckets(first_bucket, longest), (0, longest)]:
        part = slice(max(first - 1, 0), end - 1)  # the loss at index i is that of the token at position i + 1
        d, s = (torch.cat([losses[part] for losses in side]) for side in (dense, sparse))
        if len(d):
            scatter = float((s - d).std()) / math.sqrt(len(d)) if len(d) > 1 else math.nan
            found.append(LossCost(first, end, len(d), float(d.mean()), float(s.mean()), scatter))
    return found


def position_buckets(first_bucket: int, longest: int) -> list[tuple[int, int]]:
    """Positions ``[first, end)`` that double in length, up to ``longest``."""
    edges = [0, first_bucket]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return list(zip(edges, [*edges[1:-1], longest], strict=False))


def gradient_costs(dense: Mapping[str, Tensor], sparse: Mapping[str, Tensor]) -> dict[int | None, GradientCost]:
    """Gradients by layer, all parameters of a layer as one vector.

    Args:
        dense, sparse: by parameter name.

    Returns: by layer, ascending; under None that of all parameters, those outside of layers among them.
    """
    sums: dict[int | None, Tensor] = {}
    for name, d in dense.items():
        d, s = d.double().flatten(), sparse[name].double().flatten()
        products = torch.stack([d @ d, s @ s, d @ s, (s - d) @ (s - d)])
        match = _LAYER.search(f".{name}")
        for key in {None, int(match[1]) if match else None}:
            sums[key] = sums.get(key, torch.zeros(4, dtype=torch.float64)) + products
    order = sorted((key for key in sums if key is not None), key=int)
    return {key: _gradient_cost(*sums[key].tolist()) for key in [*order, None]}


def _gradient_cost(dense: float, sparse: float, product: float, difference: float) -> GradientCost:
    size = math.sqrt(dense * sparse)
    return GradientCost(product / size if size else math.nan, math.sqrt(difference / dense) if dense else math.nan)


def layer_attention(
    record: SelectionRecord, windows: Sequence[int | None], document_tokens: Sequence[int], page_tokens: int
) -> list[LayerAttention]:
    """How much each layer attended to.

    Args:
        windows: of each layer.
        document_tokens: lengths of the documents.
    """
    found = []
    for layer, window in enumerate(windows):
        selections = record.of(layer)
        full = sum(_causal_pairs(tokens, None) for tokens in document_tokens)
        seen = sum(_causal_pairs(tokens, window) for tokens in document_tokens)
        seen_less = sum(_pairs_left_out(selection, page_tokens) for selection in selections)
        found.append(
            LayerAttention(
                attended=(seen - seen_less) / full,
                pages_per_list=_mean([float(s.lists.counts_GB.float().mean()) for s in selections]),
                distinct_pages=_mean([_distinct_share(s) for s in selections]),
            )
        )
    return found


def _causal_pairs(tokens: int, window: int | None) -> int:
    reach = min(window or tokens, tokens)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


def _pairs_left_out(selection: Selection, page_tokens: int) -> float:
    """Pairs that full attention would see in this chunk's past and this layer did not, a mean over KV heads."""
    rows_B = torch.full(selection.lists.counts_GB.shape[1:], selection.lists.block_tokens)
    rows_B[-1] = selection.segment.num_tokens - (len(rows_B) - 1) * selection.lists.block_tokens
    left_out_GB = (~selection.pages_GBN()).sum(-1).cpu()
    return float((left_out_GB * rows_B).sum()) / len(left_out_GB) * page_tokens


def _distinct_share(selection: Selection) -> float:
    always = len(selection.reach.sinks) + len(selection.reach.recents)
    distinct_G = selection.pages_GBN().any(1).sum(-1) - always
    return float(distinct_G.double().mean()) / selection.lists.num_pages


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
