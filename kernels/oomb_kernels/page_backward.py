"""Attention of query blocks over their selected pages: the backward, and how much memory it works in.

Suffixes as in `page_lists`. Output and LSE are those of the whole softmax, so that what is computed here is exact
beside other keys.

Page-major, the owners of pages form the scores S and dP, add up dK and dV, and leave dS in a workspace (`page_dkv`);
query-major, dQ = dS K is summed up from there (`page_dq`): five products. As many KV heads go in one turn as the
workspace has room for. Where it has none for a single one, as where nobody asks for dK and dV, dQ comes from a kernel
that forms the scores itself: seven products, three without dK and dV.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2
from oomb_kernels.page_accumulate import accumulate_pages
from oomb_kernels.page_call import check_kernel_inputs, each_list, list_values, scores_of
from oomb_kernels.page_dkv import launch_page_dkv
from oomb_kernels.page_dq import launch_page_dq, launch_page_dq_sum
from oomb_kernels.page_index import PageIndex, max_partials
from oomb_kernels.page_lists import PageLists

_DS_BYTES = 2**30
_PARTIAL_BYTES = 256 * 2**20


@torch.no_grad()
def page_attention_backward_reference(
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
    """The definition of `page_attention_backward`, in plain torch."""
    wide = torch.promote_types(q_HTD.dtype, torch.float32)
    num_heads, num_tokens, head_dim = q_HTD.shape
    dq = q_HTD.new_zeros(num_tokens, num_heads, head_dim, dtype=wide).transpose(0, 1)
    if dq_HTD is not None:
        dq.copy_(dq_HTD)
    delta_HT = (dout_HTD.to(wide) * out_HTD.to(wide)).sum(-1)
    grads_GN2PD = q_HTD.new_zeros(*slots_GN.shape, *pool.shape[1:], dtype=wide)
    touched_GN = torch.zeros_like(slots_GN, dtype=torch.bool)
    for heads, rows, pages, slots in each_list(lists, slots_GN, q_HTD):
        group = heads.start * len(slots_GN) // num_heads
        k, v = list_values(pool, slots, scales_GN2, group, pages, wide)
        q, dout = q_HTD[heads, rows].to(wide), dout_HTD[heads, rows].to(wide)
        scores = scores_of(q, k, scale, softcap)
        p = torch.exp(scores - lse_HT[heads, rows].to(wide).unsqueeze(-1))
        ds = p * (dout @ v.T - delta_HT[heads, rows].unsqueeze(-1))
        if softcap is not None:
            ds = ds * (1 - (scores / softcap).square())
        dq[heads, rows] += ds @ k * scale
        page_shape = (len(pages), *pool.shape[2:])
        grads_GN2PD[group, pages, 0] += (ds.transpose(1, 2) @ q * scale).sum(0).view(page_shape)
        grads_GN2PD[group, pages, 1] += (p.transpose(1, 2) @ dout).sum(0).view(page_shape)
        touched_GN[group, pages] = True
    if grad_pool is not None and grad_slots_GN is not None and touched_GN.any():
        dk, dv = grads_GN2PD[touched_GN].unbind(1)
        slots_1N = grad_slots_GN[touched_GN].unsqueeze(0)
        accumulate_pages(grad_pool, slots_1N, dk.flatten(0, 1)[None], dv.flatten(0, 1)[None], first=False, seed=seed)
    return dq.to(q_HTD.dtype)


@triton.jit(do_not_specialize=["num_tokens", "room"])
def _row_stats_kernel(  # type: ignore[no-untyped-def]
    dout, out, lse, stats, num_tokens, room,
    dout_stride_h, dout_stride_t, out_stride_h, out_stride_t, lse_stride_h, lse_stride_t,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (row tiles, heads)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK_D)
    valid = row < num_tokens
    inside = valid[:, None] & (col[None, :] < D)
    token = row.to(tl.int64)
    dout_at = dout + head * dout_stride_h + token[:, None] * dout_stride_t + col[None, :]
    out_at = out + head * out_stride_h + token[:, None] * out_stride_t + col[None, :]
    product = tl.load(dout_at, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + head * lse_stride_h + token * lse_stride_t, mask=valid, other=float("inf")).to(tl.float32)
    stats_at = stats + head * room + row
    tl.store(stats_at, row_lse * 1.4426950408889634, mask=row < room)
    tl.store(stats_at + tl.num_programs(1).to(tl.int64) * room, tl.sum(product, 1), mask=row < room)


def launch_row_stats(dout_HTD: Tensor, out_HTD: Tensor, lse_HT: Tensor, block_tokens: int) -> Tensor:
    """What the backward needs to know of each row: fp32 ``[2 H, T']``, the LSE in base 2 of all heads, then delta (the
    row sums of dout * out) of all heads. Rows behind the last token, up to a whole block, get infinity and 0.
    """
    num_heads, num_tokens, head_dim = dout_HTD.shape
    room = cdiv(num_tokens, block_tokens) * block_tokens
    stats_HT = dout_HTD.new_empty(2 * num_heads, room, dtype=torch.float32)
    block_d = next_power_of_2(head_dim)
    block_m = max(1, 4096 // block_d)
    with torch.cuda.device_of(dout_HTD):
        _row_stats_kernel[(cdiv(room, block_m), num_heads)](
            dout_HTD, out_HTD, lse_HT, stats_HT, num_tokens, room,
            *dout_HTD.stride()[:2], *out_HTD.stride()[:2], *lse_HT.stride(),
            D=head_dim, BLOCK_M=block_m, BLOCK_D=block_d,
        )  # fmt: skip
    return stats_HT


def launch_page_attention_backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    grad_pool: Tensor | None,
    grad_slots_GN: Tensor | None,
    lists: PageLists,
    index: PageIndex | None,
    *,
    scale: float,
    softcap: float | None = None,
    seed: int,
    dq_HTD: Tensor | None = None,
    scales_GN2: Tensor | None = None,
    turn: int | None = None,
) -> Tensor:
    """The Triton kernels of `page_attention_backward`, for 16 and 32 bits.

    Args:
        index: of the lists; None without a gradient pool.
        turn: KV heads whose dS is kept at a time, 0 to form the scores twice; by default what the workspace has room
            for.
    """
    num_heads, num_tokens, head_dim = q_HTD.shape
    result_HTD = q_HTD.new_empty(num_tokens, num_heads, head_dim).transpose(0, 1)
    check_kernel_inputs(pool, lists, q_HTD, dout_HTD, out_HTD)
    if num_tokens == 0:
        return result_HTD
    rows = (dout_HTD, q_HTD, launch_row_stats(dout_HTD, out_HTD, lse_HT, lists.block_tokens))
    pages = (pool, slots_GN)
    ds = None
    if grad_pool is not None and grad_slots_GN is not None and index is not None:
        turns, ds = allocate_ds(q_HTD, lists, pool.shape[2], turn)
        grads = (grad_pool, grad_slots_GN)
        for groups in turns:
            launch_page_dkv(
                *rows, *pages, *grads, lists, index, groups, ds,
                scale=scale, softcap=softcap, seed=seed, scales_GN2=scales_GN2,
            )  # fmt: skip
            if ds is not None:
                launch_page_dq_sum(
                    ds, *pages, lists, groups, result_HTD, scale=scale, dq_HTD=dq_HTD, scales_GN2=scales_GN2
                )
    if ds is None:
        launch_page_dq(
            *rows, *pages, lists, result_HTD, scale=scale, softcap=softcap, dq_HTD=dq_HTD, scales_GN2=scales_GN2
        )
    return result_HTD


def allocate_ds(
    q_HTD: Tensor, lists: PageLists, page_tokens: int, turn: int | None = None
) -> tuple[list[range], Tensor | None]:
    """The KV heads of each turn, and room for the dS of a turn, ``[rows, block_tokens]`` in q's dtype; one turn without
    dS where there is no room for a KV head's.

    Args:
        turn: KV heads of a turn, 0 for no dS; by default as many as there is room for.
    """
    num_groups = len(lists.pages_GBK)
    head_bytes = _ds_bytes(lists.pages_GBK.shape, len(q_HTD), page_tokens, lists.block_tokens, q_HTD.element_size())
    turn = _turn(num_groups, head_bytes) if turn is None else turn
    if turn == 0:
        return [range(num_groups)], None
    turns = [range(first, min(first + turn, num_groups)) for first in range(0, num_groups, turn)]
    return turns, q_HTD.new_empty(turn * head_bytes // q_HTD.element_size()).view(-1, lists.block_tokens)


def unit_blocks(lists: PageLists, record_elements: int) -> int:
    """Query blocks of one unit of dK and dV: the longest unit then takes a small share of the whole kernel, and the
    partial sums of cut pages stay small.

    Args:
        record_elements: of a page's K and V.
    """
    return _unit_blocks(lists.pages_GBK.numel(), lists.pages_GBK.shape[2], record_elements)


def backward_workspace_bytes(
    *,
    num_heads: int,
    num_groups: int,
    num_tokens: int,
    block_tokens: int,
    room: int,
    page_tokens: int,
    head_dim: int,
    itemsize: int,
) -> int:
    """Device memory that a backward with dK and dV works in beside its inputs, its result and the index of the lists:
    dS, at most 1 GiB; partial sums of pages that many blocks attend to, about 256 MiB at most; two numbers per row and
    head.

    Args:
        num_heads: query heads; ``num_groups`` KV heads.
        num_tokens: of the chunk.
        room: pages of a list.
        itemsize: bytes of an element of q.
    """
    num_blocks = -(-num_tokens // block_tokens)
    shape = (num_groups, num_blocks, room)
    head_bytes = _ds_bytes(shape, num_heads, page_tokens, block_tokens, itemsize)
    num_entries, record_elements = num_groups * num_blocks * room, 2 * page_tokens * head_dim
    num_partials = max_partials(num_entries, _unit_blocks(num_entries, room, record_elements))
    stats_bytes = 4 * 2 * num_heads * num_blocks * block_tokens
    return _turn(num_groups, head_bytes) * head_bytes + 4 * num_partials * record_elements + stats_bytes


def _ds_bytes(shape_GBK: tuple[int, ...], num_heads: int, page_tokens: int, block_tokens: int, itemsize: int) -> int:
    """dS of one KV head."""
    num_groups, num_blocks, room = shape_GBK
    return num_blocks * room * (num_heads // num_groups) * page_tokens * block_tokens * itemsize


def _turn(num_groups: int, head_bytes: int) -> int:
    """KV heads whose dS there is room for at a time."""
    return min(num_groups, _DS_BYTES // max(head_bytes, 1))


def _unit_blocks(num_entries: int, room: int, record_elements: int) -> int:
    most_partials = _PARTIAL_BYTES // (4 * record_elements)
    return max(8, room // 4, 2 * num_entries // most_partials)
