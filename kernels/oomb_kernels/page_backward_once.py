"""Attention of query blocks over their selected pages: the backward that forms the scores once.

Suffixes as in `page_lists`. The owners of pages form S and dP for dK and dV, and leave dS in a workspace, in the dtype
of q, where the query-major sum dQ = dS K finds it: five products instead of the seven of two kernels that know nothing
of each other. A visit (KV head, query block, position in its list) and a head own their place in the workspace, pages
own their gradient, rows their dQ: no two programs write one number, and the same bits come out each time. As many KV
heads go in one turn as the workspace has room for.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from oomb_kernels.page_backward import _add_to_record, _num_programs, _page_reduce_kernel
from oomb_kernels.page_call import (
    check_kernel_inputs,
    numeric_mode,
    records_of,
    rows_of,
    score_factors,
    tanh,
    upcast,
)
from oomb_kernels.page_index import PageIndex
from oomb_kernels.page_lists import PageLists
from oomb_kernels.page_tiles import Tiles, choose_tiles, shared_memory_of

_WORKSPACE_BYTES = 2**30


@triton.jit(do_not_specialize=["num_tokens", "room"])
def _page_stats_kernel(  # type: ignore[no-untyped-def]
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


@triton.jit(
    do_not_specialize=[
        "num_blocks", "list_room", "num_keys", "num_pages", "first_key", "end_key", "max_blocks", "num_heads", "room",
        "seed",
    ]
)  # fmt: skip
def _page_owner_kernel(  # type: ignore[no-untyped-def]
    dout_rows, q_rows, stats, records, ds_tiles, slots, grad_pool, grad_slots,
    visits, block_counts, units, ends, next_piece, partials,
    num_blocks, list_room, num_keys, num_pages, first_key, end_key, max_blocks,
    num_heads, room, scale, factor, cap, seed,
    GROUP: tl.constexpr, Q_BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, STOCHASTIC: tl.constexpr, KEEP: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # grid: as many programs as the device holds. A piece of work is a unit and a part of its page's rows; each program
    # takes the next piece of the KV heads of this turn until there is none. Who takes which makes no difference to the
    # result.
    SUBS: tl.constexpr = P // BLOCK_N
    TILES: tl.constexpr = Q_BLOCK // BLOCK_M
    STEPS: tl.constexpr = GROUP * TILES
    col = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_M)
    first_group = first_key // num_pages
    num_pieces = tl.load(ends + end_key - 1) * SUBS
    first_piece = tl.load(ends + first_key - 1, mask=first_key > 0, other=0) * SUBS
    piece = first_piece + tl.atomic_add(next_piece, 1)
    key = tl.load(units + 2 * (piece // SUBS), mask=piece < num_pieces, other=0)
    number = tl.load(units + 2 * (piece // SUBS) + 1, mask=piece < num_pieces, other=0)
    while piece < num_pieces:
        group = key // num_pages
        first_row = (piece % SUBS) * BLOCK_N
        record_row = tl.load(slots + key) * (2 * P) + first_row
        k = upcast(records.load([record_row, 0]), UP)
        v = upcast(records.load([record_row + P, 0]), UP)
        # The next piece is looked up now, so that nobody waits for it later.
        piece = first_piece + tl.atomic_add(next_piece, 1)
        next_key = tl.load(units + 2 * (piece // SUBS), mask=piece < num_pieces, other=0)
        next_number = tl.load(units + 2 * (piece // SUBS) + 1, mask=piece < num_pieces, other=0)

        count = tl.load(block_counts + key)
        visits_at = visits + key.to(tl.int64) * num_blocks + number * max_blocks
        num_steps = tl.minimum(count - number * max_blocks, max_blocks) * STEPS
        ds_row = (group - first_group) * num_blocks * list_room
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        visit = tl.load(visits_at)
        for step in tl.range(0, num_steps, disable_licm=True):  # else addresses of tiles fill registers, and spill
            first = (visit >> 16) * Q_BLOCK + (step % TILES) * BLOCK_M
            lane_head = (step % STEPS) // TILES
            head = group * GROUP + lane_head
            q = upcast(q_rows.load([head, first, 0]).reshape(BLOCK_M, BLOCK_D), UP)
            dout = upcast(dout_rows.load([head, first, 0]).reshape(BLOCK_M, BLOCK_D), UP)
            stats_at = stats + tl.multiple_of(head * room + first, 16) + lane
            row_lse = tl.load(stats_at)
            row_delta = tl.load(stats_at + tl.multiple_of(num_heads * room, 16))
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            if SOFTCAP:
                t = tanh(s)
                s = cap * t
            p = tl.exp2(s - row_lse[None, :])
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = p * (dp - row_delta[None, :])
            if SOFTCAP:
                ds *= 1.0 - t * t
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            if KEEP:
                ds_at = ((ds_row + (visit >> 16) * list_room + (visit & 0xFFFF)) * GROUP + lane_head) * P + first_row
                ds_tiles.store([ds_at, (step % TILES) * BLOCK_M], ds)
            # One step ahead, so that the copies of the next step do not wait for it.
            visit = tl.load(visits_at + (step + 1) // STEPS, mask=step + 1 < num_steps, other=0)
        dk *= scale
        tile = (first_row + tl.arange(0, BLOCK_N))[:, None] * D + col[None, :]
        inside = tl.broadcast_to(col[None, :] < D, [BLOCK_N, BLOCK_D])
        if count > max_blocks:
            partial = tl.load(ends + num_keys + key) - (count + max_blocks - 1) // max_blocks + number
            at = partials + partial.to(tl.int64) * (2 * P * D)
            tl.store(at + tile, dk, mask=inside)
            tl.store(at + P * D + tile, dv, mask=inside)
        else:
            record = grad_pool + tl.load(grad_slots + key).to(tl.int64) * (2 * P * D)
            _add_to_record(record, tile, inside, dk, dv, seed, key, STOCHASTIC, P, D)
        key = next_key
        number = next_number


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "list_room", "first_group"])
def _page_dq_sum_kernel(  # type: ignore[no-untyped-def]
    records, ds_tiles, slots, counts, other_dq, dq, num_tokens, num_blocks, list_room, first_group, scale,
    other_stride_h, other_stride_t, dq_stride_h, dq_stride_t,
    GROUP: tl.constexpr, HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, OTHERS: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # grid: (HEADS at a time of a group, row tiles, KV heads of this turn). Two heads share what they load of K.
    SUBS: tl.constexpr = P // BLOCK_N
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
    for step in tl.range(0, num_steps, disable_licm=True):
        sub = (step % SUBS) * BLOCK_N
        ds_at = ds_row + (step // SUBS) * (GROUP * P) + sub
        k = upcast(records.load([slot * (2 * P) + sub, 0]), UP)
        ds = upcast(ds_tiles.load([ds_at, first % Q_BLOCK]), UP)
        acc = tl.dot(tl.trans(ds), k, acc, input_precision=PRECISION)
        if HEADS == 2:  # behind the last head of an odd group stands another's dS, or nothing: never written
            ds_1 = upcast(ds_tiles.load([ds_at + P, first % Q_BLOCK]), UP)
            acc_1 = tl.dot(tl.trans(ds_1), k, acc_1, input_precision=PRECISION)
        # One step ahead, so that the copies of the next step do not wait for it.
        slot = tl.load(list_at + (step + 1) // SUBS, mask=step + 1 < num_steps, other=0)
    head = (group * GROUP + first_head).to(tl.int64)
    _add_others(acc, other_dq, dq, head, first, num_tokens, scale, other_stride_h, other_stride_t, dq_stride_h,
                dq_stride_t, OTHERS, D)  # fmt: skip
    if HEADS == 2:
        end = tl.where(first_head + 1 < GROUP, num_tokens, 0)
        _add_others(acc_1, other_dq, dq, head + 1, first, end, scale, other_stride_h, other_stride_t,
                    dq_stride_h, dq_stride_t, OTHERS, D)  # fmt: skip


@triton.jit
def _add_others(  # type: ignore[no-untyped-def]
    acc, other_dq, dq, head, first, num_tokens, scale, other_stride_h, other_stride_t, dq_stride_h, dq_stride_t,
    OTHERS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write dQ of a tile of rows of one head."""
    row = first + tl.arange(0, acc.shape[0])
    col = tl.arange(0, acc.shape[1])
    inside = (row < num_tokens)[:, None] & (col[None, :] < D)
    token = row.to(tl.int64)[:, None]
    acc *= scale
    if OTHERS:
        other_at = other_dq + head * other_stride_h + token * other_stride_t + col[None, :]
        acc += tl.load(other_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dq + head * dq_stride_h + token * dq_stride_t + col[None, :], acc, mask=inside)


def launch_page_stats(dout_HTD: Tensor, out_HTD: Tensor, lse_HT: Tensor, block_tokens: int) -> Tensor:
    """What the owners of pages need to know of each row: fp32 ``[2 H, T']``, the LSE in base 2 of all heads, then delta
    (the row sums of dout * out) of all heads. Rows behind the last token, up to a whole block, get infinity and 0.
    """
    num_heads, num_tokens, head_dim = dout_HTD.shape
    room = triton.cdiv(num_tokens, block_tokens) * block_tokens
    stats_HT = dout_HTD.new_empty(2 * num_heads, room, dtype=torch.float32)
    block_d = triton.next_power_of_2(head_dim)
    block_m = max(1, 4096 // block_d)
    with torch.cuda.device_of(dout_HTD):
        _page_stats_kernel[(triton.cdiv(room, block_m), num_heads)](
            dout_HTD, out_HTD, lse_HT, stats_HT, num_tokens, room,
            *dout_HTD.stride()[:2], *out_HTD.stride()[:2], *lse_HT.stride(),
            D=head_dim, BLOCK_M=block_m, BLOCK_D=block_d,
        )  # fmt: skip
    return stats_HT


def groups_of_a_turn(lists: PageLists, num_heads: int, page_tokens: int, itemsize: int) -> int:
    """KV heads whose dS the workspace can hold at a time; 0 when there is no room for one."""
    num_groups, num_blocks, room = lists.pages_GBK.shape
    group_bytes = num_blocks * room * (num_heads // num_groups) * page_tokens * lists.block_tokens * itemsize
    return min(num_groups, _WORKSPACE_BYTES // max(group_bytes, 1))


def launch_page_attention_backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    grad_pool: Tensor,
    grad_slots_GN: Tensor,
    lists: PageLists,
    index: PageIndex,
    *,
    scale: float,
    softcap: float | None = None,
    seed: int,
    dq_HTD: Tensor | None = None,
    turn: int | None = None,
    owner_tiles: Tiles | None = None,
    sum_tiles: Tiles | None = None,
    sum_heads: int = 1,
) -> Tensor:
    """The Triton kernels of the backward. Returns dq in q's dtype and adds dK and dV to the page gradients.

    Args:
        turn: KV heads whose dS is kept at a time, at least 1; by default what `groups_of_a_turn` says.
    """
    num_heads, num_tokens, head_dim = q_HTD.shape
    num_groups, num_blocks, room = lists.pages_GBK.shape
    page_tokens, num_keys, group = pool.shape[2], num_groups * lists.num_pages, num_heads // num_groups
    result_HTD = q_HTD.new_empty(num_tokens, num_heads, head_dim).transpose(0, 1)
    others = dq_HTD if dq_HTD is not None else result_HTD
    check_kernel_inputs(pool, lists, q_HTD, dout_HTD, out_HTD, others)
    assert grad_pool.is_contiguous()
    assert grad_pool.shape[1:] == pool.shape[1:], f"{tuple(grad_pool.shape)} for {tuple(pool.shape)}"
    if num_tokens == 0:
        return result_HTD
    turn = turn or groups_of_a_turn(lists, num_heads, page_tokens, q_HTD.element_size())
    assert turn > 0, "the workspace has no room for the visits of one KV head"
    sizes = (head_dim, page_tokens, lists.block_tokens, q_HTD.element_size(), shared_memory_of(q_HTD.device))
    own = owner_tiles or choose_tiles("backward_kv", *sizes)
    tiles = sum_tiles or choose_tiles("backward_sum", *sizes)
    stats = launch_page_stats(dout_HTD, out_HTD, lse_HT, lists.block_tokens)
    ds = q_HTD.new_empty(turn * num_blocks * room * group * page_tokens, lists.block_tokens)
    partials = q_HTD.new_empty(max(index.max_partials, 1), 2, page_tokens, head_dim, dtype=torch.float32)
    # One counter per turn, each on a 16-byte border: a compiled kernel knows whether an address is on one.
    next_pieces = torch.zeros(num_groups, 4, dtype=torch.int32, device=q_HTD.device)
    stochastic, block_d = grad_pool.dtype == torch.bfloat16, triton.next_power_of_2(head_dim)
    slots_GN, grad_slots_GN, slots_GBK = slots_GN.contiguous(), grad_slots_GN.contiguous(), lists.slots_GBK(slots_GN)
    dout_rows, q_rows = rows_of(dout_HTD, own.block_m), rows_of(q_HTD, own.block_m)
    programs = _num_programs(q_HTD.device)
    constants = {
        "GROUP": group, "Q_BLOCK": lists.block_tokens, "P": page_tokens, "D": head_dim, "BLOCK_D": block_d,
        **numeric_mode(q_HTD),
    }  # fmt: skip
    with torch.cuda.device_of(q_HTD):
        for first in range(0, num_groups, turn):
            end = min(first + turn, num_groups)
            _page_owner_kernel[(programs,)](
                dout_rows, q_rows, stats, records_of(pool, own.block_n), _tiles_of(ds, own),
                slots_GN, grad_pool, grad_slots_GN,
                index.visits_KB, index.counts_K, index.units_U2, index.ends_3K, next_pieces[first], partials,
                num_blocks, room, num_keys, lists.num_pages, first * lists.num_pages, end * lists.num_pages,
                index.max_blocks, num_heads, stats.shape[1], scale, *score_factors(scale, softcap), seed,
                SOFTCAP=softcap is not None, STOCHASTIC=stochastic, KEEP=True,
                BLOCK_M=own.block_m, BLOCK_N=own.block_n, **constants,
                num_warps=own.num_warps, num_stages=own.num_stages,
            )  # fmt: skip
            _page_dq_sum_kernel[(triton.cdiv(group, sum_heads), triton.cdiv(num_tokens, tiles.block_m), end - first)](
                records_of(pool, tiles.block_n), _tiles_of(ds, tiles), slots_GBK, lists.counts_GB, others, result_HTD,
                num_tokens, num_blocks, room, first, scale, *others.stride()[:2], *result_HTD.stride()[:2],
                HEADS=sum_heads, OTHERS=dq_HTD is not None, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
                **constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
        block_n = min(triton.next_power_of_2(page_tokens), max(1, 2048 // block_d))
        _page_reduce_kernel[(programs, triton.cdiv(page_tokens, block_n))](
            partials, grad_pool, grad_slots_GN, index.counts_K, index.ends_3K, index.cut_pages_U,
            num_keys, index.max_blocks, seed,
            STOCHASTIC=stochastic, P=page_tokens, D=head_dim, BLOCK_N=block_n, BLOCK_D=block_d,
        )  # fmt: skip
    return result_HTD


def _tiles_of(ds: Tensor, tiles: Tiles) -> TensorDescriptor:
    """The workspace, for tiles of keys x query rows."""
    return TensorDescriptor(ds, list(ds.shape), list(ds.stride()), [tiles.block_n, tiles.block_m])
