"""Attention of query blocks over their selected pages, merged with attention over other keys: the forward.

Suffixes as in `page_lists`. Pages are whole and lie before every query, so there is no mask. One program owns a
tile of query rows of one head: it starts from what the other keys gave and walks the tile's list, so the softmax
over everything is one pass and nothing is merged afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2
from oomb_kernels.page_call import (
    check_kernel_inputs,
    each_list,
    list_values,
    load_tile,
    records_of,
    score_factors,
    scores_of,
    tanh,
    tile_mode,
    upcast,
)
from oomb_kernels.page_lists import PageLists
from oomb_kernels.page_tiles import Tiles, choose_tiles, shared_memory_of


@torch.no_grad()
def page_attention_forward_reference(
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
    """The definition of `page_attention_forward`, in plain torch."""
    wide = torch.promote_types(q_HTD.dtype, torch.float32)
    num_heads, num_tokens, head_dim = q_HTD.shape
    out_HTD = q_HTD.new_zeros(num_tokens, num_heads, head_dim, dtype=wide).transpose(0, 1)
    lse_HT = q_HTD.new_full((num_heads, num_tokens), -torch.inf, dtype=wide)
    if others is not None:
        out_HTD.copy_(others[0])
        lse_HT.copy_(others[1])
    for heads, rows, pages, slots in each_list(lists, slots_GN, q_HTD):
        if not slots.numel():
            continue
        group = heads.start * len(slots_GN) // num_heads
        k, v = list_values(pool, slots, scales_GN2, group, pages, wide)
        scores = scores_of(q_HTD[heads, rows].to(wide), k, scale, softcap)
        before, now = lse_HT[heads, rows], torch.logsumexp(scores, -1)
        total = torch.logaddexp(before, now)
        weights = torch.exp(scores - total.unsqueeze(-1))
        out_HTD[heads, rows] = out_HTD[heads, rows] * torch.exp(before - total).unsqueeze(-1) + weights @ v
        lse_HT[heads, rows] = total
    return out_HTD.to(q_HTD.dtype), lse_HT


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    q, records, list_at, slot, scales_at, num_steps, top, total, acc, factor, cap,
    ONLINE: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # The softmax over the pages of one list, the first of which lies in `slot`. ONLINE raises the reference `top` as
    # larger scores come; otherwise it stays what the other keys gave, which saves a row maximum and a rescaling of
    # the accumulator at every step.
    # A step ends with the scores of the next one, so that copies run beside the softmax. Behind the last step they
    # are those of a record that nobody asked for, and dropped.
    SUBS: tl.constexpr = P // BLOCK_N
    row = slot * (2 * P)
    scale_at = scales_at
    k = load_tile(records, row, scale_at, SCALED, UP, q.dtype, TMA, BLOCK_N, D, BLOCK_D)
    slot = tl.load(list_at + 1 // SUBS, mask=num_steps > 1, other=0)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    for step in tl.range(0, num_steps, disable_licm=True):  # else addresses of tiles fill registers, and spill
        s = s * factor
        if SOFTCAP:
            s = cap * tanh(s)
        if ONLINE:
            new_top = tl.maximum(top, tl.max(s, 1))
            rescale = tl.exp2(top - new_top)
            total *= rescale
            acc *= rescale[:, None]
            top = new_top
        p = tl.exp2(s - top[:, None])
        total += tl.sum(p, 1)
        # Here, where its copy is waited for.
        v = load_tile(records, row + P, scale_at + 1, SCALED, UP, q.dtype, TMA, BLOCK_N, D, BLOCK_D)
        row = slot * (2 * P) + ((step + 1) % SUBS) * BLOCK_N
        scale_at = scales_at + 2 * (tl.minimum(step + 1, num_steps - 1) // SUBS)
        k = load_tile(records, row, scale_at, SCALED, UP, q.dtype, TMA, BLOCK_N, D, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        slot = tl.load(list_at + (step + 2) // SUBS, mask=step + 2 < num_steps, other=0)
    return top, total, acc


@triton.jit
def _start(lse, out):  # type: ignore[no-untyped-def]
    # Where the other keys left off: the LSE in base 2, the sum of weights relative to it, and the output.
    top = lse.to(tl.float32) * 1.4426950408889634
    return top, tl.where(top == float("-inf"), 0.0, 1.0), out.to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "list_room"])
def _page_forward_kernel(  # type: ignore[no-untyped-def]
    q, records, slots, counts, scales, out, lse, other_out, other_lse,
    num_tokens, num_blocks, list_room, factor, cap,
    q_stride_h, q_stride_t, out_stride_h, out_stride_t, lse_stride_h,
    other_stride_h, other_stride_t, other_lse_stride_h, other_lse_stride_t,
    GROUP: tl.constexpr, Q_BLOCK: tl.constexpr, OTHERS: tl.constexpr, LIMIT: tl.constexpr,
    SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # grid: (heads of a group, row tiles, KV heads): neighbours in time share pages in the L2 cache
    group = tl.program_id(2)
    head = (group * GROUP + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * BLOCK_M
    block = first // Q_BLOCK
    row = first + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    valid = row < num_tokens
    inside = valid[:, None] & (col[None, :] < D)
    token = row.to(tl.int64)[:, None]

    # Everything is asked for before anything is waited for: the list of an empty block, too, and q last, which is
    # stored in shared memory as soon as it comes.
    list_number = group * num_blocks + block
    num_steps = tl.load(counts + list_number) * (P // BLOCK_N)
    list_at = slots + list_number.to(tl.int64) * list_room
    slot = tl.load(list_at)
    scales_at = scales + list_number.to(tl.int64) * list_room * 2
    if OTHERS:
        lse_at = other_lse + head * other_lse_stride_h + row.to(tl.int64) * other_lse_stride_t
        out_at = other_out + head * other_stride_h + token * other_stride_t + col[None, :]
        given_lse = tl.load(lse_at, mask=valid, other=0.0)
        given_out = tl.load(out_at, mask=inside, other=0.0)
    q_tile = upcast(tl.load(q + head * q_stride_h + token * q_stride_t + col[None, :], mask=inside, other=0.0), UP)
    if OTHERS:
        top, total, acc = _start(given_lse, given_out)
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total, acc = _walk(
        q_tile, records, list_at, slot, scales_at, num_steps, top, total, acc, factor, cap,
        not OTHERS, SCALED, SOFTCAP, P, D, BLOCK_N, BLOCK_D, UP, PRECISION, TMA,
    )  # fmt: skip
    if OTHERS:  # noqa: SIM102 - decided when compiled
        # Weights that the dtype of the product cannot hold, or a row without other keys: once more, online.
        if tl.max(tl.where(total < LIMIT, 0, 1), 0) == 1:
            given_lse = tl.load(lse_at, mask=valid, other=0.0)
            top, total, acc = _start(given_lse, tl.load(out_at, mask=inside, other=0.0))
            top, total, acc = _walk(
                q_tile, records, list_at, slot, scales_at, num_steps, top, total, acc, factor, cap,
                True, SCALED, SOFTCAP, P, D, BLOCK_N, BLOCK_D, UP, PRECISION, TMA,
            )  # fmt: skip
    safe = tl.where(total > 0, total, 1.0)
    tl.store(out + head * out_stride_h + token * out_stride_t + col[None, :], acc / safe[:, None], mask=inside)
    row_lse = tl.where(total > 0, (top + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + head * lse_stride_h + row, row_lse, mask=valid)


def launch_page_attention_forward(
    q_HTD: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    lists: PageLists,
    *,
    scale: float,
    softcap: float | None = None,
    others: tuple[Tensor, Tensor] | None = None,
    scales_GN2: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The Triton kernel of `page_attention_forward`, for 16 and 32 bits."""
    num_heads, num_tokens, head_dim = q_HTD.shape
    num_groups, num_blocks, room = lists.pages_GBK.shape
    page_tokens = pool.shape[2]
    out_HTD = q_HTD.new_empty(num_tokens, num_heads, head_dim).transpose(0, 1)
    lse_HT = q_HTD.new_empty(num_heads, num_tokens, dtype=torch.float32)
    other_out, other_lse = others if others is not None else (out_HTD, lse_HT)
    check_kernel_inputs(pool, lists, q_HTD, other_out)
    if num_tokens == 0:
        return out_HTD, lse_HT
    tiles = tiles or choose_tiles(
        "forward", head_dim, page_tokens, lists.block_tokens, q_HTD.element_size(), shared_memory_of(q_HTD.device),
        float8=scales_GN2 is not None,
    )  # fmt: skip
    with torch.cuda.device_of(q_HTD):
        _page_forward_kernel[(num_heads // num_groups, cdiv(num_tokens, tiles.block_m), num_groups)](
            q_HTD, records_of(pool, tiles.block_n), lists.slots_GBK(slots_GN), lists.counts_GB,
            lse_HT if scales_GN2 is None else lists.scales_GBK2(scales_GN2),
            out_HTD, lse_HT, other_out, other_lse,
            num_tokens, num_blocks, room, *score_factors(scale, softcap),
            *q_HTD.stride()[:2], *out_HTD.stride()[:2], lse_HT.stride(0), *other_out.stride()[:2], *other_lse.stride(),
            GROUP=num_heads // num_groups, Q_BLOCK=lists.block_tokens, OTHERS=others is not None,
            LIMIT=2.0**15 if q_HTD.dtype == torch.float16 else 2.0**100,
            SCALED=scales_GN2 is not None, SOFTCAP=softcap is not None,
            P=page_tokens, D=head_dim, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=next_power_of_2(head_dim), **tile_mode(q_HTD),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out_HTD, lse_HT
