"""Attention by its definition inside a plain model: what sparse attention is checked against, and measured with.

Legend: H query heads, G KV heads, R query rows, T tokens of a document, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from oomb_accel.integrations.selections import SelectionRecord, attended_keys, causal_keys
from oomb_accel.integrations.support import base_model_of
from oomb_kernels import AttentionCall, dense_attention_forward

_NAME = "oomb_by_definition"
_WEIGHTS_AT_ONCE = 2**21
"""Of a head."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a layer does to q times k."""

    scale: float
    softcap: float | None
    window: int | None

    def weights(self, q_HRD: Tensor, k_GTD: Tensor, seen: Tensor) -> Tensor:
        """Softmax over the keys that are seen, ``[H, R, T]``, at least in fp32.

        Args:
            seen: bool ``[R, T]``, or ``[G, R, T]``; every query sees a key.
        """
        group = q_HRD.shape[0] // k_GTD.shape[0]
        scores_HRT = q_HRD @ k_GTD.repeat_interleave(group, 0).transpose(1, 2) * self.scale
        scores_HRT = scores_HRT.to(torch.promote_types(scores_HRT.dtype, torch.float32))
        if self.softcap is not None:
            scores_HRT = self.softcap * torch.tanh(scores_HRT / self.softcap)
        seen_HRT = seen if seen.dim() == 2 else seen.repeat_interleave(group, 0)
        return scores_HRT.masked_fill(~seen_HRT, -torch.inf).softmax(-1)


class Attend(Protocol):
    """Attention of one layer over one document."""

    def __call__(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scores: Scores) -> Tensor:
        """Output ``[H, T, D]``."""


@contextmanager
def attention_replaced(base: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Inside, the model's layers call ``attend``; it takes one document at a time, without padding or cache."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        del attention_mask  # who attends to what is decided here
        scale = kwargs.get("scaling")
        scores = Scores(
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=kwargs.get("softcap"),
            window=kwargs.get("sliding_window"),
        )
        out_HTD = attend(module.layer_idx, query[0], key[0], value[0], scores)
        return out_HTD.transpose(0, 1)[None], None

    original = base.config._attn_implementation
    AttentionInterface.register(_NAME, attention)
    base.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(original)


class AttendedOnly:
    """Attention to the recorded keys only, with gradients: what sparse attention must be equal to."""

    def __init__(self, record: SelectionRecord, page_tokens: int) -> None:
        self._record, self._page_tokens = record, page_tokens
        self.document = 0
        """Number of the document that runs next."""

    def __call__(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scores: Scores) -> Tensor:
        num_tokens = q_HTD.shape[1]
        seen_GTT = attended_keys(
            self._record.of(layer, self.document),
            range(num_tokens),
            num_tokens,
            num_groups=k_GTD.shape[0],
            page_tokens=self._page_tokens,
            window=scores.window,
            device=q_HTD.device,
        )
        weights_HTT = scores.weights(q_HTD, k_GTD, seen_GTT)
        return weights_HTT.to(v_GTD.dtype) @ v_GTD.repeat_interleave(q_HTD.shape[0] // v_GTD.shape[0], 0)


class _MassMeter:
    """Full attention; adds up how much of its weight lies on recorded keys, over queries that selected pages."""

    def __init__(self, record: SelectionRecord, page_tokens: int, every: int) -> None:
        self._record, self._page_tokens, self._every = record, page_tokens, every
        self.document = 0
        self.mass: dict[int, float] = {}
        self.rows: dict[int, int] = {}
        """By layer: weight, and rows times heads that it is summed over."""

    def __call__(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scores: Scores) -> Tensor:
        num_tokens, num_groups = q_HTD.shape[1], k_GTD.shape[0]
        selections = self._record.of(layer, self.document)
        first = min((selection.segment.past_tokens for selection in selections), default=num_tokens)
        measured, at_once = range(first, num_tokens, self._every), max(1, _WEIGHTS_AT_ONCE // num_tokens)
        for start in range(0, len(measured), at_once):
            rows = measured[start : start + at_once]
            seen_RT = causal_keys(rows, num_tokens, scores.window, q_HTD.device)
            weights_HRT = scores.weights(q_HTD[:, rows.start : rows.stop : rows.step], k_GTD, seen_RT)
            attended_GRT = attended_keys(
                selections,
                rows,
                num_tokens,
                num_groups=num_groups,
                page_tokens=self._page_tokens,
                window=scores.window,
                device=q_HTD.device,
            )
            attended_HRT = attended_GRT.repeat_interleave(q_HTD.shape[0] // num_groups, 0)
            mass_HR = (weights_HRT * attended_HRT).sum(-1, dtype=torch.float64)
            self.mass[layer] = self.mass.get(layer, 0.0) + float(mass_HR.sum())
            self.rows[layer] = self.rows.get(layer, 0) + mass_HR.numel()
        call = AttentionCall(scores.scale, causal=True, window=scores.window, softcap=scores.softcap)
        return dense_attention_forward(q_HTD, k_GTD, v_GTD, call, "auto")[0]


@torch.no_grad()
def attention_mass(
    model: nn.Module, documents: list[Tensor], record: SelectionRecord, page_tokens: int, *, every: int = 1
) -> dict[int, float]:
    """The share of full attention's weight that lies on keys which sparse attention attended to, by layer.

    It is the mean over heads and over queries from the first chunk on that selected pages.

    Args:
        model: plain.
        documents: int64 token ids ``[T]``, in the order of the recorded stream.
        every: one query in so many is measured; each takes time with the length of its document.
    """
    base = base_model_of(model)
    meter = _MassMeter(record, page_tokens, every)
    with attention_replaced(base, meter):
        for meter.document, ids in enumerate(documents):
            base.base_model(input_ids=ids[None], use_cache=False)
    return {layer: mass / meter.rows[layer] for layer, mass in meter.mass.items()}
