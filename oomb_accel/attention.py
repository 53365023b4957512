"""Attention of one chunk: its own tokens and the pages of its past, under one softmax.

Dense attention is a few library calls (`dense_parts.py`). Where a layer is sparse, these cover the chunk itself and the
pages that everybody attends to, and the selected pages join their softmax (`selected_part.py`). In the backward both
are called with the output and LSE of the whole softmax, so that each gives its exact share of the gradients.

Legend: H query heads, G KV heads, T tokens of the chunk, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oomb_accel.chunk_pass import ChunkPass, LayerCall
from oomb_accel.dense_parts import attend_dense, attend_dense_backward, dense_parts
from oomb_accel.selected_part import SelectedPages, attend_selected, attend_selected_backward, selected_pages
from oomb_kernels import of_rows


def chunk_attention(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, layer: LayerCall, run: ChunkPass) -> Tensor:
    """Attention of a chunk over itself and its past; differentiable in q, k and v.

    Args:
        q_HTD: ``[H, T, D]`` after RoPE; k_GTD, v_GTD: ``[G, T, D]``; any strides but the last.

    Returns:
        ``[H, T, D]`` in q's dtype, stored token by token.
    """
    # A layer under checkpointing is called again in the backward of the same pass.
    first_run = run.sweep == "forward" and layer.layer not in run.layers_seen
    run.layers_seen.add(layer.layer)
    if first_run:
        run.memory.cache.store(layer.layer, run.chunk, k_GTD.detach(), v_GTD.detach())
    selected = selected_pages(q_HTD.detach(), layer, run, first_run=first_run)
    if not torch.is_grad_enabled():  # a node of the graph takes the host longer than most operations
        return _attend_and_keep(q_HTD, k_GTD, v_GTD, layer, run, selected)[0]
    out_HTD: Tensor = _ChunkAttention.apply(q_HTD, k_GTD, v_GTD, layer, run, selected)
    return out_HTD


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        layer: LayerCall,
        run: ChunkPass,
        selected: SelectedPages | None,
    ) -> Tensor:
        out_HTD, lse_HT = _attend_and_keep(q_HTD, k_GTD, v_GTD, layer, run, selected)
        ctx.save_for_backward(q_HTD, k_GTD, v_GTD, out_HTD, lse_HT)
        ctx.layer, ctx.run, ctx.selected = layer, run, selected
        return out_HTD.view_as(out_HTD)  # a kept tensor must not become part of the graph

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (dout_HTD,) = grads
        need_q, need_k, need_v = ctx.needs_input_grad[:3]
        q_HTD, k_GTD, v_GTD, out_HTD, lse_HT = ctx.saved_tensors
        dq, dk, dv = _attend_backward(
            dout_HTD,
            q_HTD,
            k_GTD,
            v_GTD,
            out_HTD,
            lse_HT,
            ctx.layer,
            ctx.run,
            ctx.selected,
            need_kv=need_k or need_v,
        )
        ctx.run.memory.cache.settle(ctx.layer.layer)
        return dq if need_q else None, dk if need_k else None, dv if need_v else None, None, None, None


def _attend_and_keep(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, layer: LayerCall, run: ChunkPass, selected: SelectedPages | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE, as they were kept, or kept from now on, where the chunk's are."""
    results = run.results
    known = results.take(layer.layer)
    out_HTD, lse_HT = known or _attend(q_HTD, k_GTD, v_GTD, layer, run, selected)
    run.memory.cache.settle(layer.layer)
    results.put(layer.layer, out_HTD, lse_HT)
    return out_HTD, lse_HT


def _attend(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, layer: LayerCall, run: ChunkPass, selected: SelectedPages | None
) -> tuple[Tensor, Tensor]:
    parts = dense_parts(layer, run, selected.reach if selected else None)
    out_HTD, lse_HT = attend_dense(q_HTD, k_GTD, v_GTD, parts, layer, run)
    if selected is None:
        return out_HTD.to(q_HTD.dtype), lse_HT
    rows = run.first_rows
    joined_out, joined_lse = attend_selected(
        of_rows(q_HTD, rows), of_rows(out_HTD, rows), of_rows(lse_HT, rows), selected, layer, run
    )
    return _with_rows(out_HTD, joined_out, q_HTD.dtype), _with_rows(lse_HT, joined_lse, lse_HT.dtype)


def _attend_backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    layer: LayerCall,
    run: ChunkPass,
    selected: SelectedPages | None,
    *,
    need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of the chunk. Contributions to earlier pages go to the cache; what later chunks left in the
    chunk's own pages comes back with dK, dV: that is the whole recurrence."""
    parts = dense_parts(layer, run, selected.reach if selected else None)
    dq, dk, dv = attend_dense_backward(
        dout_HTD, q_HTD, k_GTD, v_GTD, out_HTD, lse_HT, parts, layer, run, need_kv=need_kv
    )
    if selected is not None:
        rows = run.first_rows
        joined_dq = attend_selected_backward(
            of_rows(dout_HTD, rows),
            of_rows(q_HTD, rows),
            of_rows(out_HTD, rows),
            of_rows(lse_HT, rows),
            of_rows(dq, rows),
            selected,
            layer,
            run,
            need_kv=need_kv,
        )
        dq = _with_rows(dq, joined_dq, q_HTD.dtype)
    if need_kv:
        run.memory.cache.collect_gradients(layer.layer, run.chunk, dk, dv)
    return dq.to(q_HTD.dtype), dk, dv


def _with_rows(x: Tensor, first: Tensor, dtype: torch.dtype) -> Tensor:
    """``[H, T, ...]`` in a dtype, with other first rows."""
    num_rows = first.shape[1]
    if num_rows == x.shape[1]:
        return first
    x = x.to(dtype)
    x[:, :num_rows] = first
    return x
