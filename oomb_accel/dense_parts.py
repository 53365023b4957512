"""The dense part of a chunk's attention: its own tokens, and pages that every query attends to.

It is cut into parts that a library kernel can do in one call. Parts that share query rows are merged by their LSE in
fp32. In the backward every part is called with the *global* output and LSE, so each part's gradients are exact (the
rule of ring attention).

Legend: H query heads, G KV heads, T tokens of the chunk, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oomb_accel.chunk_pass import ChunkPass, LayerCall
from oomb_accel.past import past_ranges
from oomb_accel.schedule import PageRange
from oomb_accel.selection import Reach
from oomb_kernels import AttentionCall, dense_attention_backward, dense_attention_forward, merge_attention_, of_rows


@dataclass(frozen=True, slots=True)
class DensePart:
    """One kernel call: these query rows against these earlier pages and own tokens, in this order."""

    rows: slice
    pages: tuple[PageRange, ...]
    own: slice | None
    call: AttentionCall


def dense_parts(layer: LayerCall, run: ChunkPass, reach: Reach | None) -> list[DensePart]:
    """Every (query, key) pair that is not left to selection, exactly once. The same list for layers that are alike.

    Args:
        reach: how the past is divided where pages are selected; None where all of it, or the window, is dense.
    """
    window = run.windows[layer.layer]
    alike = (window, layer.scale, layer.softcap, reach)
    if alike not in run.in_common:
        run.in_common[alike] = _make_parts(layer, run, window, reach)
    parts: list[DensePart] = run.in_common[alike]
    return parts


def _make_parts(layer: LayerCall, run: ChunkPass, window: int | None, reach: Reach | None) -> list[DensePart]:
    chunk, settings = run.chunk, run.settings
    lengths = tuple(segment.num_tokens for segment in chunk.segments)

    def part(
        rows: slice, pages: tuple[PageRange, ...], own: slice | None, *segments: int, causal: bool = True
    ) -> DensePart:
        call = AttentionCall(
            scale=layer.scale,
            causal=causal,
            window=window if causal else None,
            softcap=layer.softcap,
            segments=segments if len(segments) > 1 else None,
            deterministic=settings.deterministic,
        )
        return DensePart(rows, tuple(filter(len, pages)), own, call)

    everything, first, rest = slice(0, chunk.num_tokens), run.first_rows, slice(lengths[0], chunk.num_tokens)
    calls = past_ranges(
        chunk.past_pages, window, reach, span_pages=settings.span_pages, page_tokens=settings.page_tokens
    )
    if window is None or not calls:
        return [part(everything, (), everything, *lengths)] + [
            part(first, pages, None, causal=False) for pages in calls
        ]
    # A window needs the past and the own tokens in one call, since where it ends differs by row.
    parts = [part(first, calls[0], first)]
    if len(lengths) > 1:
        parts.append(part(rest, (), rest, *lengths[1:]))
    return parts


def attend_dense(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, parts: list[DensePart], layer: LayerCall, run: ChunkPass
) -> tuple[Tensor, Tensor]:
    """One softmax over all parts.

    Returns:
        Output ``[H, T, D]``, stored token by token, in q's dtype, or at least fp32 where parts were merged; and LSE
        ``[H, T]``.
    """

    def attend(part: DensePart) -> tuple[Tensor, Tensor]:
        keys, values = _keys_of(part, k_GTD, v_GTD, layer, run)
        return dense_attention_forward(of_rows(q_HTD, part.rows), keys, values, part.call, run.settings.backend)

    first, others = _divided(parts)
    outs, lses = zip(*map(attend, first), strict=True)
    out_HTD, lse_HT = _side_by_side(outs), _side_by_side(lses)
    if others:
        out_HTD = out_HTD.to(torch.promote_types(q_HTD.dtype, torch.float32))
    for part in others:
        merge_attention_(of_rows(out_HTD, part.rows), of_rows(lse_HT, part.rows), *attend(part))
    return out_HTD, lse_HT


def attend_dense_backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    parts: list[DensePart],
    layer: LayerCall,
    run: ChunkPass,
    *,
    need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the parts contribute to dQ (in the dtype of `attend_dense`'s output), and dK, dV of the chunk's own tokens.
    Contributions to earlier pages go to the cache.

    Args:
        out_HTD, lse_HT: of the whole softmax.
        need_kv: whether page gradients are wanted.
    """

    def attend_backward(part: DensePart) -> tuple[Tensor, Tensor, Tensor]:
        """Of its rows, and of its own tokens where it has some."""
        rows = part.rows
        keys, values = _keys_of(part, k_GTD, v_GTD, layer, run)
        part_dq, part_dk, part_dv = dense_attention_backward(
            of_rows(dout_HTD, rows),
            of_rows(q_HTD, rows),
            keys,
            values,
            of_rows(out_HTD, rows),
            of_rows(lse_HT, rows),
            part.call,
            run.settings.backend,
        )
        past = 0
        for pages in part.pages:
            tokens = slice(past, past + len(pages) * run.settings.page_tokens)
            past = tokens.stop
            if need_kv:
                seed = run.rounding_seed(layer.layer)
                dk, dv = of_rows(part_dk, tokens), of_rows(part_dv, tokens)
                run.memory.cache.add_gradients(layer.layer, pages, dk, dv, seed=seed)
        if part.pages and part.own is not None:
            part_dk, part_dv = part_dk[:, past:], part_dv[:, past:]
        return part_dq, part_dk, part_dv

    first, others = _divided(parts)
    dqs, dks, dvs = zip(*map(attend_backward, first), strict=True)
    dq = _side_by_side(dqs)
    if others:
        dq = dq.to(torch.promote_types(q_HTD.dtype, torch.float32))
    for part in others:
        of_rows(dq, part.rows).add_(attend_backward(part)[0])
    return dq, _side_by_side(dks), _side_by_side(dvs)


def _divided(parts: list[DensePart]) -> tuple[list[DensePart], list[DensePart]]:
    """Those that start the softmax of their rows, in the order of their rows and own keys; those that join it."""
    return [part for part in parts if part.own is not None], [part for part in parts if part.own is None]


def _side_by_side(parts: tuple[Tensor, ...]) -> Tensor:
    """``[H, T, ...]`` of rows one after another, stored token by token."""
    return parts[0] if len(parts) == 1 else torch.cat([part.transpose(0, 1) for part in parts]).transpose(0, 1)


def _keys_of(part: DensePart, k_GTD: Tensor, v_GTD: Tensor, layer: LayerCall, run: ChunkPass) -> tuple[Tensor, Tensor]:
    if not part.pages:
        assert part.own is not None
        return of_rows(k_GTD, part.own), of_rows(v_GTD, part.own)
    past_k, past_v = run.memory.cache.load(layer.layer, *part.pages)
    if part.own is None:
        return past_k, past_v
    return torch.cat([past_k, of_rows(k_GTD, part.own)], 1), torch.cat([past_v, of_rows(v_GTD, part.own)], 1)
