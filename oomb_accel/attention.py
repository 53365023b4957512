"""Attention of one chunk: its own tokens and the pages of its past, under one softmax.

The chunk's attention is cut into parts that a library kernel can do in one call. Parts that share query rows
are merged by their LSE in fp32. In the backward every part is called with the *global* output and LSE, so each
part's gradients are exact (the rule of ring attention).

Legend: H query heads, G KV heads, T tokens of the chunk, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from oomb_accel.pages import PagedKVCache
from oomb_accel.schedule import Chunk, PageRange
from oomb_kernels import (
    AttentionCall,
    dense_attention_backward,
    dense_attention_forward,
    merge_attention_,
)

Sweep = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """How attention is computed, for the whole run."""

    backend: str
    span_pages: int
    page_tokens: int
    deterministic: bool


@dataclass(slots=True)
class ChunkPass:
    """What one run of the model over one chunk needs to know; travels to the attention layers as a keyword.

    In the forward sweep a layer stores its K and V; in the backward sweep it only reads. ``kept`` holds
    outputs and LSE of the forward sweep per layer where they are kept, else it is None.
    """

    chunk: Chunk
    sweep: Sweep
    cache: PagedKVCache
    settings: AttentionSettings
    windows: tuple[int | None, ...]
    kept: dict[int, tuple[Tensor, Tensor]] | None = None
    layers_seen: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asks of attention, apart from the tensors."""

    layer: int
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Part:
    """One kernel call: these query rows against these earlier pages and own tokens, in this order."""

    rows: slice
    pages: PageRange | None
    own: slice | None
    call: AttentionCall


def chunk_attention(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, layer: LayerCall, run: ChunkPass) -> Tensor:
    """Attention of a chunk over itself and its past; differentiable in q, k and v.

    Args:
        q_HTD: ``[H, T, D]`` after RoPE; k_GTD, v_GTD: ``[G, T, D]``; any strides but the last.

    Returns:
        ``[H, T, D]`` in q's dtype, stored token by token.
    """
    run.layers_seen.add(layer.layer)
    if run.sweep == "forward":
        run.cache.store(layer.layer, run.chunk, k_GTD.detach(), v_GTD.detach())
    out_HTD: Tensor = _ChunkAttention.apply(q_HTD, k_GTD, v_GTD, layer, run)
    return out_HTD


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, layer: LayerCall, run: ChunkPass) -> Tensor:
        kept = run.kept.get(layer.layer) if run.kept is not None else None
        out_HTD, lse_HT = kept or _attend(q_HTD, k_GTD, v_GTD, layer, run)
        if run.kept is not None:
            run.kept[layer.layer] = (out_HTD, lse_HT)
        ctx.save_for_backward(q_HTD, k_GTD, v_GTD, out_HTD, lse_HT)
        ctx.layer, ctx.run = layer, run
        return out_HTD.view_as(out_HTD)  # a kept tensor must not become part of the graph

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (dout_HTD,) = grads
        need_q, need_k, need_v = ctx.needs_input_grad[:3]
        q_HTD, k_GTD, v_GTD, out_HTD, lse_HT = ctx.saved_tensors
        dq, dk, dv = _attend_backward(
            dout_HTD, q_HTD, k_GTD, v_GTD, out_HTD, lse_HT, ctx.layer, ctx.run, need_k or need_v
        )
        return dq if need_q else None, dk if need_k else None, dv if need_v else None, None, None


def _attend(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, layer: LayerCall, run: ChunkPass) -> tuple[Tensor, Tensor]:
    parts = _parts(layer, run)
    if len(parts) == 1:
        keys, values = _keys_of(parts[0], k_GTD, v_GTD, layer, run)
        return dense_attention_forward(q_HTD, keys, values, parts[0].call, run.settings.backend)
    wide = torch.promote_types(q_HTD.dtype, torch.float32)
    num_heads, num_tokens, head_dim = q_HTD.shape
    out_HTD = q_HTD.new_zeros(num_tokens, num_heads, head_dim, dtype=wide).transpose(0, 1)
    lse_HT = q_HTD.new_full((num_heads, num_tokens), -torch.inf, dtype=wide)
    for part in parts:
        keys, values = _keys_of(part, k_GTD, v_GTD, layer, run)
        part_out, part_lse = dense_attention_forward(q_HTD[:, part.rows], keys, values, part.call, run.settings.backend)
        merge_attention_(out_HTD[:, part.rows], lse_HT[:, part.rows], part_out, part_lse)
    return out_HTD.to(q_HTD.dtype), lse_HT


def _attend_backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    layer: LayerCall,
    run: ChunkPass,
    need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of the chunk. Contributions to earlier pages go to the cache; what later chunks left in the
    chunk's own pages comes back with dK, dV: that is the whole recurrence."""
    parts = _parts(layer, run)
    wide = torch.promote_types(q_HTD.dtype, torch.float32) if len(parts) > 1 else q_HTD.dtype
    dq, dk, dv = torch.empty_like(q_HTD, dtype=wide), torch.empty_like(k_GTD), torch.empty_like(v_GTD)
    seed = run.chunk.index * len(run.windows) + layer.layer
    for part in parts:
        rows = part.rows
        keys, values = _keys_of(part, k_GTD, v_GTD, layer, run)
        part_dq, part_dk, part_dv = dense_attention_backward(
            dout_HTD[:, rows],
            q_HTD[:, rows],
            keys,
            values,
            out_HTD[:, rows],
            lse_HT[:, rows],
            part.call,
            run.settings.backend,
        )
        past = len(part.pages) * run.settings.page_tokens if part.pages else 0
        if part.pages and need_kv:
            run.cache.add_gradients(layer.layer, part.pages, part_dk[:, :past], part_dv[:, :past], seed=seed)
        if part.own is None:
            dq[:, rows] += part_dq
        else:  # the first part of these rows and the only one of these keys
            dq[:, rows] = part_dq
            dk[:, part.own] = part_dk[:, past:]
            dv[:, part.own] = part_dv[:, past:]
    if need_kv:
        run.cache.collect_gradients(layer.layer, run.chunk, dk, dv)
    return dq.to(q_HTD.dtype), dk, dv


def _parts(layer: LayerCall, run: ChunkPass) -> list[_Part]:
    """Every (query, key) pair that may attend, exactly once."""
    chunk, settings, window = run.chunk, run.settings, run.windows[layer.layer]
    lengths = tuple(segment.num_tokens for segment in chunk.segments)

    def part(rows: slice, pages: PageRange | None, own: slice | None, *segments: int, causal: bool = True) -> _Part:
        call = AttentionCall(
            scale=layer.scale,
            causal=causal,
            window=window if causal else None,
            softcap=layer.softcap,
            segments=segments if len(segments) > 1 else None,
            deterministic=settings.deterministic,
        )
        return _Part(rows, pages, own, call)

    everything, first, rest = (
        slice(0, chunk.num_tokens),
        slice(0, lengths[0]),
        slice(lengths[0], chunk.num_tokens),
    )
    if not chunk.past_pages:
        return [part(everything, None, everything, *lengths)]
    if window is None:
        spans = _spans(chunk.past_pages, settings.span_pages)
        return [part(everything, None, everything, *lengths)] + [
            part(first, span, None, causal=False) for span in spans
        ]
    # A window needs the past and the own tokens in one call, since where it ends differs by row.
    reach = chunk.past_pages.newest(-(-(window - 1) // settings.page_tokens))
    parts = [part(first, reach or None, first)]
    if len(lengths) > 1:
        parts.append(part(rest, None, rest, *lengths[1:]))
    return parts


def _spans(pages: PageRange, span_pages: int) -> list[PageRange]:
    """The past in spans of a few fixed sizes: whole spans, then falling powers of two of pages.

    cuDNN plans once per shape, so an arbitrary remainder would cost a plan for each chunk.
    """
    spans = []
    first = pages.first
    while first < pages.end:
        left = pages.end - first
        size = span_pages if left >= span_pages else 1 << (left.bit_length() - 1)
        spans.append(PageRange(first, first + size))
        first += size
    return spans


def _keys_of(part: _Part, k_GTD: Tensor, v_GTD: Tensor, layer: LayerCall, run: ChunkPass) -> tuple[Tensor, Tensor]:
    if part.pages is None:
        assert part.own is not None
        return k_GTD[:, part.own], v_GTD[:, part.own]
    past_k, past_v = run.cache.load(layer.layer, part.pages)
    if part.own is None:
        return past_k, past_v
    return torch.cat([past_k, k_GTD[:, part.own]], 1), torch.cat([past_v, v_GTD[:, part.own]], 1)
