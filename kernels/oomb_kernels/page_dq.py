"""dQ of attention to selected pages. Suffixes as in `page_lists`.

Query-major, as the forward: a program owns a tile of query rows and walks its list. It forms the scores itself, or sums
up dS that the owners of the pages left in a workspace (`page_dkv`): one product instead of three.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2
from oomb_kernels.page_call import (
    as_read,
    check_kernel_inputs,
    ds_tiles_of,
    load_tile,
    record_rows,
    records_of,
    score_factors,
    tanh,
    tile_mode,
    upcast,
)
from oomb_kernels.page_lists import PageLists
from oomb_kernels.page_tiles import Tiles, choose_tiles, shared_memory_of


@triton.jit
def _store_dq(  # type: ignore[no-untyped-def]
    acc, other_dq, dq, head, first, num_tokens, scale, other_stride_h, other_stride_t, dq_stride_h, dq_stride_t,
    OTHERS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write a tile of rows of one head, with what other keys contribute."""
    row = first + tl.arange(0, acc.shape[0])
    col = tl.arange(0, acc.shape[1])
    inside = (row < num_tokens)[:, None] & (col[None, :] < D)
    token = row.to(tl.int64)[:, None]
    acc *= scale
    if OTHERS:
        other_at = other_dq + head * other_stride_h + token * other_stride_t + col[None, :]
        acc += tl.load(other_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dq + head * dq_stride_h + token * dq_stride_t + col[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "list_room", "room"])
def _page_dq_kernel(  # type: ignore[no-untyped-def]
    dout, q, stats, records, slots, counts, scales, other_dq, dq,
    num_tokens, num_blocks, list_room, num_heads, room, scale, factor, cap,
    dout_stride_h, dout_stride_t, q_stride_h, q_stride_t, other_stride_h, other_stride_t, dq_stride_h, dq_stride_t,
    GROUP: tl.constexpr, Q_BLOCK: tl.constexpr, OTHERS: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # grid: (heads of a group, row tiles, KV heads), as in the forward
    SUBS: tl.constexpr = P // BLOCK_N
    LIKE: tl.constexpr = dout.dtype.element_ty
    group = tl.program_id(2)
    head = (group * GROUP + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    inside = (row < num_tokens)[:, None] & (col[None, :] < D)
    token = row.to(tl.int64)[:, None]

    dout_at = dout + head * dout_stride_h + token * dout_stride_t + col[None, :]
    dout_tile = upcast(tl.load(dout_at, mask=inside, other=0.0), UP)
    q_tile = upcast(tl.load(q + head * q_stride_h + token * q_stride_t + col[None, :], mask=inside, other=0.0), UP)
    row_lse = tl.load(stats + head * room + row)
    row_delta = tl.load(stats + (num_heads + head) * room + row)
    list_number = group * num_blocks + first // Q_BLOCK
    list_at = slots + list_number.to(tl.int64) * list_room
    scales_at = scales + list_number.to(tl.int64) * list_room * 2
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for step in tl.range(0, tl.load(counts + list_number) * SUBS, disable_licm=True):
        record_row = tl.load(list_at + step // SUBS) * (2 * P) + (step % SUBS) * BLOCK_N
        scale_at = scales_at + 2 * (step // SUBS)
        k = load_tile(records, record_row, scale_at, SCALED, UP, LIKE, TMA, BLOCK_N, D, BLOCK_D)
        v = load_tile(records, record_row + P, scale_at + 1, SCALED, UP, LIKE, TMA, BLOCK_N, D, BLOCK_D)
        s = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * factor
        dp = tl.dot(dout_tile, tl.trans(v), input_precision=PRECISION)
        if SOFTCAP:
            t = tanh(s)
            s = cap * t
        p = tl.exp2(s - row_lse[:, None])
        ds = p * (dp - row_delta[:, None])
        if SOFTCAP:
            ds *= 1.0 - t * t
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    _store_dq(acc, other_dq, dq, head, first, num_tokens, scale, other_stride_h, other_stride_t, dq_stride_h,
              dq_stride_t, OTHERS, D)  # fmt: skip


@triton.jit
def _load_ds(  # type: ignore[no-untyped-def]
    ds_tiles, row, first, there, Q_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """A tile of dS, which may lie behind the workspace's end where ``there`` is not true."""
    if TMA:
        tile = ds_tiles.load([row, first])
    else:
        at = (row + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * Q_BLOCK + first + tl.arange(0, BLOCK_M)[None, :]
        tile = tl.load(ds_tiles + at, mask=there, other=0.0)
    return tile


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "list_room", "first_group"])
def _page_dq_sum_kernel(  # type: ignore[no-untyped-def]
    records, ds_tiles, slots, counts, scales, other_dq, dq, num_tokens, num_blocks, list_room, first_group, scale,
    other_stride_h, other_stride_t, dq_stride_h, dq_stride_t,
    GROUP: tl.constexpr, HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, OTHERS: tl.constexpr, SCALED: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # grid: (HEADS at a time of a group, row tiles, KV heads of this turn). Two heads share what they load of K.
    SUBS: tl.constexpr = P // BLOCK_N
    LIKE: tl.constexpr = ds_tiles.dtype if TMA else ds_tiles.dtype.element_ty
    group = first_group + tl.program_id(2)
    first_head = tl.program_id(0) * HEADS
    first = tl.program_id(1) * BLOCK_M
    block = first // Q_BLOCK
    list_number = group * num_blocks + block
    num_steps = tl.load(counts + list_number) * SUBS
    list_at = slots + list_number.to(tl.int64) * list_room
    ds_row = ((tl.program_id(2) * num_blocks + block) * list_room * GROUP + first_head) * P
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_1 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slot = tl.load(list_at, mask=num_steps > 0, other=0)
    scales_at = scales + list_number.to(tl.int64) * list_room * 2
    page_scale = 1.0
    if SCALED:
        page_scale = tl.load(scales_at, mask=num_steps > 0, other=0.0)
    for step in tl.range(0, num_steps, disable_licm=True):
        sub = (step % SUBS) * BLOCK_N
        ds_at = ds_row + (step // SUBS) * (GROUP * P) + sub
        k = record_rows(records, slot * (2 * P) + sub, TMA, BLOCK_N, D, BLOCK_D)
        k = as_read(k, page_scale, SCALED, UP, LIKE)
        ds = upcast(_load_ds(ds_tiles, ds_at, first % Q_BLOCK, True, Q_BLOCK, BLOCK_N, BLOCK_M, TMA), UP)
        acc = tl.dot(tl.trans(ds), k, acc, input_precision=PRECISION)
        if HEADS == 2:  # behind the last head of an odd group stands another's dS, or nothing: never written
            there = first_head + 1 < GROUP
            ds_1 = upcast(_load_ds(ds_tiles, ds_at + P, first % Q_BLOCK, there, Q_BLOCK, BLOCK_N, BLOCK_M, TMA), UP)
            acc_1 = tl.dot(tl.trans(ds_1), k, acc_1, input_precision=PRECISION)
        # One step ahead, so that the copies of the next step do not wait for it.
        slot = tl.load(list_at + (step + 1) // SUBS, mask=step + 1 < num_steps, other=0)
        if SCALED:
            page_scale = tl.load(scales_at + 2 * ((step + 1) // SUBS), mask=step + 1 < num_steps, other=0.0)
    head = (group * GROUP + first_head).to(tl.int64)
    _store_dq(acc, other_dq, dq, head, first, num_tokens, scale, other_stride_h, other_stride_t, dq_stride_h,
              dq_stride_t, OTHERS, D)  # fmt: skip
    if HEADS == 2:
        end = tl.where(first_head + 1 < GROUP, num_tokens, 0)
        _store_dq(acc_1, other_dq, dq, head + 1, first, end, scale, other_stride_h, other_stride_t,
                  dq_stride_h, dq_stride_t, OTHERS, D)  # fmt: skip


def launch_page_dq(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    stats_HT: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    lists: PageLists,
    result_HTD: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    dq_HTD: Tensor | None = None,
    scales_GN2: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Write dQ into ``result_HTD``, by the kernel that forms the scores itself.

    Args:
        stats_HT: what `launch_row_stats` knows of each row.
        dq_HTD: what other keys contribute.
        scales_GN2: of K and V in e4m3.
    """
    num_heads, num_tokens, head_dim = q_HTD.shape
    num_groups, num_blocks, room = lists.pages_GBK.shape
    page_tokens = pool.shape[2]
    others = dq_HTD if dq_HTD is not None else result_HTD
    check_kernel_inputs(pool, lists, q_HTD, dout_HTD, others, result_HTD)
    tiles = tiles or choose_tiles(
        "backward_q", head_dim, page_tokens, lists.block_tokens, q_HTD.element_size(), shared_memory_of(q_HTD.device),
        float8=scales_GN2 is not None,
    )  # fmt: skip
    with torch.cuda.device_of(q_HTD):
        _page_dq_kernel[(num_heads // num_groups, cdiv(num_tokens, tiles.block_m), num_groups)](
            dout_HTD, q_HTD, stats_HT, records_of(pool, tiles.block_n), lists.slots_GBK(slots_GN), lists.counts_GB,
            stats_HT if scales_GN2 is None else lists.scales_GBK2(scales_GN2), others, result_HTD,
            num_tokens, num_blocks, room, num_heads, stats_HT.shape[1], scale, *score_factors(scale, softcap),
            *dout_HTD.stride()[:2], *q_HTD.stride()[:2], *others.stride()[:2], *result_HTD.stride()[:2],
            GROUP=num_heads // num_groups, Q_BLOCK=lists.block_tokens, OTHERS=dq_HTD is not None,
            SCALED=scales_GN2 is not None, SOFTCAP=softcap is not None, P=page_tokens, D=head_dim,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=next_power_of_2(head_dim),
            **tile_mode(q_HTD), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip


def launch_page_dq_sum(
    ds: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    lists: PageLists,
    groups: range,
    result_HTD: Tensor,
    *,
    scale: float,
    dq_HTD: Tensor | None = None,
    scales_GN2: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Write dQ of some KV heads into ``result_HTD``, from dS.

    Args:
        ds: dS of the same KV heads, as `page_dkv.launch_page_dkv` left it.
        groups: these KV heads.
        dq_HTD: what other keys contribute.
        scales_GN2: of K and V in e4m3.
    """
    num_heads, num_tokens, head_dim = result_HTD.shape
    num_groups, num_blocks, room = lists.pages_GBK.shape
    page_tokens, group = pool.shape[2], num_heads // num_groups
    others = dq_HTD if dq_HTD is not None else result_HTD
    check_kernel_inputs(pool, lists, others, result_HTD)
    tiles = tiles or choose_tiles(
        "backward_sum", head_dim, page_tokens, lists.block_tokens, ds.element_size(), shared_memory_of(ds.device),
        float8=scales_GN2 is not None,
    )  # fmt: skip
    heads = min(tiles.num_heads, group)
    grid = (cdiv(group, heads), cdiv(num_tokens, tiles.block_m), len(groups))
    with torch.cuda.device_of(ds):
        _page_dq_sum_kernel[grid](
            records_of(pool, tiles.block_n), ds_tiles_of(ds, tiles), lists.slots_GBK(slots_GN), lists.counts_GB,
            lists.counts_GB if scales_GN2 is None else lists.scales_GBK2(scales_GN2), others, result_HTD,
            num_tokens, num_blocks, room, groups.start, scale, *others.stride()[:2], *result_HTD.stride()[:2],
            GROUP=group, HEADS=heads, Q_BLOCK=lists.block_tokens, OTHERS=dq_HTD is not None,
            SCALED=scales_GN2 is not None, P=page_tokens, D=head_dim, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=next_power_of_2(head_dim), **tile_mode(ds),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
