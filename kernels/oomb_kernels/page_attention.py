"""Attention over selected pages: picks the kernels or their definition. Suffixes as in `page_lists`."""

import math

import torch
from torch import Tensor

from oomb_kernels.page_backward import (
    launch_page_attention_backward,
    page_attention_backward_reference,
    unit_blocks,
)
from oomb_kernels.page_float8 import FLOAT8
from oomb_kernels.page_forward import launch_page_attention_forward, page_attention_forward_reference
from oomb_kernels.page_index import build_page_index
from oomb_kernels.page_lists import PageLists


def page_attention_forward(
    q_HTD: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    lists: PageLists,
    *,
    scale: float,
    softcap: float | None = None,
    others: tuple[Tensor, Tensor] | None = None,
    scales_GN2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query block over the pages of its list, and over other keys, under one softmax.

    Args:
        q_HTD: queries; strides are free but for the last.
        pool: ``[S, 2, P, D]`` records of K and V, contiguous, in q's dtype or e4m3. P and ``lists.block_tokens`` are
            multiples of 16 on CUDA.
        slots_GN: int32, the record of each candidate page.
        lists: pages of each (KV head, query block); pages lie before all queries, so every row sees them whole.
        scale: factor on q·k, positive.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        others: output ``[H, T, D]`` (any floating dtype) and natural-log LSE ``[H, T]`` (fp32) of the same queries over
            other keys.
        scales_GN2: fp32, of each candidate page's K and V, where the pool is in e4m3.

    Returns:
        out_HTD in q's dtype with memory ordered [T, H, D], and lse_HT, natural log, fp32 (fp64 for fp64 inputs). Rows
        without any key have zeros and -inf.

    Raises:
        ValueError: pages or blocks that the kernels cannot cut.
    """
    _check(q_HTD, pool, slots_GN, lists, scale, scales_GN2)
    if q_HTD.is_cuda and q_HTD.dtype != torch.float64:
        return launch_page_attention_forward(
            q_HTD, pool, slots_GN, lists, scale=scale, softcap=softcap, others=others, scales_GN2=scales_GN2
        )
    with torch.autocast(q_HTD.device.type, enabled=False):  # it would round the products of the reference
        return page_attention_forward_reference(
            q_HTD, pool, slots_GN, lists, scale=scale, softcap=softcap, others=others, scales_GN2=scales_GN2
        )


def page_attention_backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    grad_pool: Tensor | None,
    grad_slots_GN: Tensor | None,
    lists: PageLists,
    *,
    scale: float,
    softcap: float | None = None,
    seed: int,
    dq_HTD: Tensor | None = None,
    scales_GN2: Tensor | None = None,
) -> Tensor:
    """Gradients of attention over selected pages, given output and LSE of the whole softmax.

    On CUDA each score is formed once, for all three: dS waits for dQ in a workspace of at most 1 GiB, some KV heads at
    a time; `backward_workspace_bytes` says how much memory that takes in all. Each page's gradient is read and written
    once. Lists so long that one KV head's dS would need more than that have their scores formed twice.

    Args:
        dout_HTD, q_HTD, out_HTD: strides are free but for the last.
        lse_HT: of the whole softmax, as `page_attention_forward` returned it.
        pool, slots_GN, lists, scale, softcap, scales_GN2: as in the forward.
        grad_pool: ``[S', 2, P, D]`` page gradients, contiguous: fp32, bf16 (rounded stochastically) or fp64. dK and dV
            are added to what lies there, once per page. None leaves them out.
        grad_slots_GN: int32, the record of each candidate page in `grad_pool`; all selected ones hold a value already.
        seed: of the stochastic rounding.
        dq_HTD: what the other keys contribute to dQ, any floating dtype.

    Returns:
        dq_HTD in q's dtype, memory ordered [T, H, D], with what `dq_HTD` brought.

    Raises:
        ValueError: as the forward.
    """
    _check(q_HTD, pool, slots_GN, lists, scale, scales_GN2)
    if not q_HTD.is_cuda or q_HTD.dtype == torch.float64:
        with torch.autocast(q_HTD.device.type, enabled=False):
            return page_attention_backward_reference(
                dout_HTD, q_HTD, out_HTD, lse_HT, pool, slots_GN, grad_pool, grad_slots_GN, lists,
                scale=scale, softcap=softcap, seed=seed, dq_HTD=dq_HTD, scales_GN2=scales_GN2,
            )  # fmt: skip
    index = None if grad_pool is None else build_page_index(lists, unit_blocks(lists, math.prod(pool.shape[1:])))
    return launch_page_attention_backward(
        dout_HTD, q_HTD, out_HTD, lse_HT, pool, slots_GN, grad_pool, grad_slots_GN, lists, index,
        scale=scale, softcap=softcap, seed=seed, dq_HTD=dq_HTD, scales_GN2=scales_GN2,
    )  # fmt: skip


def _check(
    q_HTD: Tensor, pool: Tensor, slots_GN: Tensor, lists: PageLists, scale: float, scales_GN2: Tensor | None
) -> None:
    num_groups, num_blocks, _ = lists.pages_GBK.shape
    assert scale > 0 and q_HTD.shape[0] % num_groups == 0 and q_HTD.shape[2] == pool.shape[3]
    assert slots_GN.shape == (num_groups, lists.num_pages) and lists.counts_GB.shape == (num_groups, num_blocks)
    assert num_blocks == -(-q_HTD.shape[1] // lists.block_tokens), f"{num_blocks} blocks for {q_HTD.shape[1]} rows"
    assert pool.dtype == (q_HTD.dtype if scales_GN2 is None else FLOAT8), f"{pool.dtype} pages, {q_HTD.dtype} queries"
    assert scales_GN2 is None or scales_GN2.shape == (*slots_GN.shape, 2), "scales of K and V of each page"
