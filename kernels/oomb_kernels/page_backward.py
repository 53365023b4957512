"""Attention of query blocks over their selected pages: the backward.

Suffixes as in `page_lists`. Output and LSE are those of the whole softmax, so that what is computed here
is exact beside other keys. dQ is query-major, as the forward. dK and dV are page-major: the inverted index gives each
page one owner, which goes through the query blocks that attend to it and all query heads of its group, adds up in fp32
registers and does one read-modify-write. No two programs add to one number: the same bits each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.page_accumulate import accumulate_pages, round_to_bfloat16, rounding_noise
from oomb_kernels.page_call import (
    check_kernel_inputs,
    each_list,
    numeric_mode,
    records_of,
    rows_of,
    score_factors,
    scores_of,
    tanh,
    upcast,
)
from oomb_kernels.page_index import PageIndex
from oomb_kernels.page_lists import PageLists
from oomb_kernels.page_tiles import Tiles, choose_tiles, shared_memory_of

_PROGRAMS_PER_PROCESSOR = 2
_PARTIAL_BYTES = 256 * 2**20


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
) -> Tensor:
    """The definition of `page_attention_backward`, in plain torch."""
    wide = torch.promote_types(q_HTD.dtype, torch.float32)
    num_heads, num_tokens, head_dim = q_HTD.shape
    dq = q_HTD.new_zeros(num_tokens, num_heads, head_dim, dtype=wide).transpose(0, 1)
    if dq_HTD is not None:
        dq.copy_(dq_HTD)
    delta_HT = (dout_HTD.to(wide) * out_HTD.to(wide)).sum(-1)
    grads_GN2PD = pool.new_zeros(*slots_GN.shape, *pool.shape[1:], dtype=wide)
    touched_GN = torch.zeros_like(slots_GN, dtype=torch.bool)
    for heads, rows, pages, slots in each_list(lists, slots_GN, q_HTD):
        group = heads.start * len(slots_GN) // num_heads
        k, v = pool[slots, 0].flatten(0, 1).to(wide), pool[slots, 1].flatten(0, 1).to(wide)
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


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "list_room"])
def _page_dq_kernel(  # type: ignore[no-untyped-def]
    dout, q, out, lse, records, slots, counts, other_dq, dq, delta,
    num_tokens, num_blocks, list_room, scale, factor, cap,
    dout_stride_h, dout_stride_t, q_stride_h, q_stride_t, out_stride_h, out_stride_t, lse_stride_h, lse_stride_t,
    other_stride_h, other_stride_t, dq_stride_h, dq_stride_t,
    GROUP: tl.constexpr, Q_BLOCK: tl.constexpr, OTHERS: tl.constexpr, SOFTCAP: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # grid: (heads of a group, row tiles, KV heads), as in the forward. Writes delta = rowsum(dout * out) on the way.
    SUBS: tl.constexpr = P // BLOCK_N
    group = tl.program_id(2)
    head = (group * GROUP + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    valid = row < num_tokens
    inside = valid[:, None] & (col[None, :] < D)
    token = row.to(tl.int64)[:, None]

    dout_tile = tl.load(dout + head * dout_stride_h + token * dout_stride_t + col[None, :], mask=inside, other=0.0)
    out_tile = tl.load(out + head * out_stride_h + token * out_stride_t + col[None, :], mask=inside, other=0.0)
    row_delta = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + head * num_tokens + row, row_delta, mask=valid)

    dout_tile = upcast(dout_tile, UP)
    q_tile = upcast(tl.load(q + head * q_stride_h + token * q_stride_t + col[None, :], mask=inside, other=0.0), UP)
    lse_at = lse + head * lse_stride_h + row.to(tl.int64) * lse_stride_t
    row_lse = tl.load(lse_at, mask=valid, other=float("inf")).to(tl.float32) * 1.4426950408889634
    list_number = group * num_blocks + first // Q_BLOCK
    list_at = slots + list_number.to(tl.int64) * list_room
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for step in range(tl.load(counts + list_number) * SUBS):
        record_row = tl.load(list_at + step // SUBS) * (2 * P) + (step % SUBS) * BLOCK_N
        k = upcast(records.load([record_row, 0]), UP)
        v = upcast(records.load([record_row + P, 0]), UP)
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
    acc *= scale
    if OTHERS:
        other_at = other_dq + head * other_stride_h + token * other_stride_t + col[None, :]
        acc += tl.load(other_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dq + head * dq_stride_h + token * dq_stride_t + col[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _add_to_record(record, tile, inside, dk, dv, seed, key, STOCHASTIC: tl.constexpr, P: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The one read-modify-write of a page's gradient (or of a part of its rows)."""
    dk += tl.load(record + tile, mask=inside, other=0.0).to(tl.float32)
    dv += tl.load(record + P * D + tile, mask=inside, other=0.0).to(tl.float32)
    if STOCHASTIC:
        # One 32-bit draw serves both: its low half rounds K, its high half V.
        draw = rounding_noise(seed, key * (P * D) + tile)
        tl.store(record + tile, round_to_bfloat16(dk, draw & 0xFFFF), mask=inside)
        tl.store(record + P * D + tile, round_to_bfloat16(dv, (draw >> 16) & 0xFFFF), mask=inside)
    else:
        tl.store(record + tile, dk, mask=inside)
        tl.store(record + P * D + tile, dv, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_keys", "num_pages", "max_blocks", "seed"])
def _page_dkv_kernel(  # type: ignore[no-untyped-def]
    dout_rows, q_rows, lse, delta, records, slots, grad_pool, grad_slots,
    visits, block_counts, units, ends, next_piece, partials,
    num_tokens, num_blocks, num_keys, num_pages, max_blocks, scale, factor, cap, seed, lse_stride_h, lse_stride_t,
    GROUP: tl.constexpr, Q_BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, STOCHASTIC: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # grid: as many programs as the device holds. A piece of work is a unit and a part of its page's rows; each program
    # takes the next piece until there is none. Who takes which makes no difference to the result.
    SUBS: tl.constexpr = P // BLOCK_N
    TILES: tl.constexpr = Q_BLOCK // BLOCK_M
    col = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_M)
    num_pieces = tl.load(ends + num_keys - 1) * SUBS
    piece = tl.atomic_add(next_piece, 1)
    key = tl.load(units + 2 * (piece // SUBS), mask=piece < num_pieces, other=0)
    number = tl.load(units + 2 * (piece // SUBS) + 1, mask=piece < num_pieces, other=0)
    while piece < num_pieces:
        group = key // num_pages
        first_row = (piece % SUBS) * BLOCK_N
        record_row = tl.load(slots + key) * (2 * P) + first_row
        k = upcast(records.load([record_row, 0]), UP)
        v = upcast(records.load([record_row + P, 0]), UP)
        # The next piece is looked up now, so that nobody waits for it later.
        piece = tl.atomic_add(next_piece, 1)
        next_key = tl.load(units + 2 * (piece // SUBS), mask=piece < num_pieces, other=0)
        next_number = tl.load(units + 2 * (piece // SUBS) + 1, mask=piece < num_pieces, other=0)

        count = tl.load(block_counts + key)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for entry in range(number * max_blocks, tl.minimum(count, (number + 1) * max_blocks)):
            block = tl.load(visits + key.to(tl.int64) * num_blocks + entry) >> 16
            for step in range(GROUP * TILES):
                head = group * GROUP + step // TILES
                first = block * Q_BLOCK + (step % TILES) * BLOCK_M
                valid = first + lane < num_tokens
                q = upcast(q_rows.load([head, first, 0]).reshape(BLOCK_M, BLOCK_D), UP)
                dout = upcast(dout_rows.load([head, first, 0]).reshape(BLOCK_M, BLOCK_D), UP)
                lse_at = lse + head.to(tl.int64) * lse_stride_h + (first + lane).to(tl.int64) * lse_stride_t
                row_lse = tl.load(lse_at, mask=valid, other=float("inf")).to(tl.float32) * 1.4426950408889634
                delta_at = delta + head.to(tl.int64) * num_tokens + first + lane
                row_delta = tl.load(delta_at, mask=valid, other=0.0)
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
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
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


@triton.jit(do_not_specialize=["num_keys", "max_blocks", "seed"])
def _page_reduce_kernel(  # type: ignore[no-untyped-def]
    partials, grad_pool, grad_slots, block_counts, ends, cut_pages, num_keys, max_blocks, seed,
    STOCHASTIC: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (programs, row tiles of a page). Adds up the units of cut pages, in order.
    col = tl.arange(0, BLOCK_D)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = row[:, None] * D + col[None, :]
    inside = (row < P)[:, None] & (col < D)[None, :]
    num_cut = tl.load(ends + 3 * num_keys - 1)
    for cut in range(tl.program_id(0), num_cut, tl.num_programs(0)):
        key = tl.load(cut_pages + cut)
        num_units = (tl.load(block_counts + key) + max_blocks - 1) // max_blocks
        at = partials + (tl.load(ends + num_keys + key) - num_units).to(tl.int64) * (2 * P * D)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for _ in range(num_units):
            dk += tl.load(at + tile, mask=inside, other=0.0)
            dv += tl.load(at + P * D + tile, mask=inside, other=0.0)
            at += 2 * P * D
        record = grad_pool + tl.load(grad_slots + key).to(tl.int64) * (2 * P * D)
        _add_to_record(record, tile, inside, dk, dv, seed, key, STOCHASTIC, P, D)


def launch_page_attention_dq(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    lists: PageLists,
    *,
    scale: float,
    softcap: float | None = None,
    dq_HTD: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The Triton kernel of dQ. Returns dq in q's dtype and delta, the row sums of dout * out, fp32 ``[H, T]``."""
    num_heads, num_tokens, head_dim = q_HTD.shape
    num_groups, num_blocks, room = lists.pages_GBK.shape
    page_tokens = pool.shape[2]
    result_HTD = q_HTD.new_empty(num_tokens, num_heads, head_dim).transpose(0, 1)
    delta_HT = q_HTD.new_empty(num_heads, num_tokens, dtype=torch.float32)
    others = dq_HTD if dq_HTD is not None else result_HTD
    check_kernel_inputs(pool, lists, q_HTD, dout_HTD, out_HTD, others)
    if num_tokens == 0:
        return result_HTD, delta_HT
    tiles = tiles or choose_tiles(
        "backward_q", head_dim, page_tokens, lists.block_tokens, q_HTD.element_size(), shared_memory_of(q_HTD.device)
    )
    with torch.cuda.device_of(q_HTD):
        _page_dq_kernel[(num_heads // num_groups, triton.cdiv(num_tokens, tiles.block_m), num_groups)](
            dout_HTD, q_HTD, out_HTD, lse_HT, records_of(pool, tiles.block_n),
            lists.slots_GBK(slots_GN), lists.counts_GB, others, result_HTD, delta_HT,
            num_tokens, num_blocks, room, scale, *score_factors(scale, softcap),
            *dout_HTD.stride()[:2], *q_HTD.stride()[:2], *out_HTD.stride()[:2], *lse_HT.stride(),
            *others.stride()[:2], *result_HTD.stride()[:2],
            GROUP=num_heads // num_groups, Q_BLOCK=lists.block_tokens, OTHERS=dq_HTD is not None,
            SOFTCAP=softcap is not None, P=page_tokens, D=head_dim, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=triton.next_power_of_2(head_dim), **numeric_mode(q_HTD),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return result_HTD, delta_HT


def launch_page_attention_dkv(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    lse_HT: Tensor,
    delta_HT: Tensor,
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
    tiles: Tiles | None = None,
) -> None:
    """The Triton kernels of dK and dV: the owners of pages, then the sums of cut pages."""
    num_heads, num_tokens, head_dim = q_HTD.shape
    num_groups, num_blocks, _ = lists.pages_GBK.shape
    page_tokens, num_keys = pool.shape[2], num_groups * lists.num_pages
    check_kernel_inputs(pool, lists, q_HTD, dout_HTD)
    assert grad_pool.is_contiguous() and delta_HT.is_contiguous()
    assert grad_pool.shape[1:] == pool.shape[1:], f"{tuple(grad_pool.shape)} for {tuple(pool.shape)}"
    tiles = tiles or choose_tiles(
        "backward_kv", head_dim, page_tokens, lists.block_tokens, q_HTD.element_size(), shared_memory_of(q_HTD.device)
    )
    partials = q_HTD.new_empty(max(index.max_partials, 1), 2, page_tokens, head_dim, dtype=torch.float32)
    next_piece = torch.zeros(1, dtype=torch.int32, device=q_HTD.device)
    stochastic, block_d = grad_pool.dtype == torch.bfloat16, triton.next_power_of_2(head_dim)
    grad_slots_GN = grad_slots_GN.contiguous()
    programs = _num_programs(q_HTD.device)
    with torch.cuda.device_of(q_HTD):
        _page_dkv_kernel[(programs,)](
            rows_of(dout_HTD, tiles.block_m), rows_of(q_HTD, tiles.block_m), lse_HT, delta_HT,
            records_of(pool, tiles.block_n), slots_GN.contiguous(), grad_pool, grad_slots_GN,
            index.visits_KB, index.counts_K, index.units_U2, index.ends_3K, next_piece, partials,
            num_tokens, num_blocks, num_keys, lists.num_pages, index.max_blocks,
            scale, *score_factors(scale, softcap), seed,
            *lse_HT.stride(),
            GROUP=num_heads // num_groups, Q_BLOCK=lists.block_tokens, SOFTCAP=softcap is not None,
            STOCHASTIC=stochastic, P=page_tokens, D=head_dim, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=block_d, **numeric_mode(q_HTD), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        block_n = min(triton.next_power_of_2(page_tokens), max(1, 2048 // block_d))
        _page_reduce_kernel[(programs, triton.cdiv(page_tokens, block_n))](
            partials, grad_pool, grad_slots_GN, index.counts_K, index.ends_3K, index.cut_pages_U,
            num_keys, index.max_blocks, seed,
            STOCHASTIC=stochastic, P=page_tokens, D=head_dim, BLOCK_N=block_n, BLOCK_D=block_d,
        )  # fmt: skip


def unit_blocks(lists: PageLists, record_elements: int) -> int:
    """Query blocks of one unit of dK and dV: the longest unit then takes a small share of the whole kernel, and the
    partial sums of cut pages stay small.

    Args:
        record_elements: of a page's K and V.
    """
    most_partials = _PARTIAL_BYTES // (4 * record_elements)
    return max(8, lists.pages_GBK.shape[2] // 4, 2 * lists.pages_GBK.numel() // most_partials)


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
