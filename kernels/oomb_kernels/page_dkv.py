"""Gradients of K and V of selected pages, and dS for dQ on the way.

Suffixes as in `page_lists`. Page-major: the inverted index gives each page one owner, which goes through the query
blocks that attend to it and all query heads of its group, adds up in fp32 registers and does one read-modify-write.
Blocks of a page that many attend to are cut into units, whose partial sums are added in order. No two programs add to
one number: the same bits each time.

A visit of a page by (KV head, query block, position in its list) and a query head own a place in the workspace of dS,
where the owner leaves it, transposed and in the dtype of q, for `page_dq`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2
from oomb_kernels.page_accumulate import round_to_bfloat16, rounding_noise
from oomb_kernels.page_call import (
    check_kernel_inputs,
    ds_tiles_of,
    load_tile,
    records_of,
    rows_of,
    score_factors,
    tanh,
    tile_mode,
    upcast,
)
from oomb_kernels.page_index import PageIndex
from oomb_kernels.page_lists import PageLists
from oomb_kernels.page_tiles import Tiles, choose_tiles, shared_memory_of

_PROGRAMS_PER_PROCESSOR = 2


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


@triton.jit
def _load_rows(  # type: ignore[no-untyped-def]
    rows, head, first, num_tokens, stride_h, stride_t,
    BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows of a head from one on; those behind the last token are zeros."""
    if TMA:
        tile = rows.load([head, first, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        row, col = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        at = head.to(tl.int64) * stride_h + row.to(tl.int64)[:, None] * stride_t + col[None, :]
        tile = tl.load(rows + at, mask=(row < num_tokens)[:, None] & (col < D)[None, :], other=0.0)
    return tile


@triton.jit
def _store_ds(ds_tiles, row, first, ds, Q_BLOCK: tl.constexpr, TMA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile of dS."""
    if TMA:
        ds_tiles.store([row, first], ds)
    else:
        at = (row + tl.arange(0, ds.shape[0])).to(tl.int64)[:, None] * Q_BLOCK + first
        tl.store(ds_tiles + at + tl.arange(0, ds.shape[1])[None, :], ds)


@triton.jit(
    do_not_specialize=[
        "num_blocks", "list_room", "num_keys", "num_pages", "first_key", "end_key", "max_blocks", "num_heads", "room",
        "num_tokens", "seed",
    ]
)  # fmt: skip
def _page_owner_kernel(  # type: ignore[no-untyped-def]
    dout_rows, q_rows, stats, records, ds_tiles, slots, scales, grad_pool, grad_slots,
    visits, block_counts, units, ends, next_piece, partials,
    num_blocks, list_room, num_keys, num_pages, first_key, end_key, max_blocks,
    num_heads, room, num_tokens, scale, factor, cap, seed,
    q_stride_h, q_stride_t, dout_stride_h, dout_stride_t,
    GROUP: tl.constexpr, Q_BLOCK: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, STOCHASTIC: tl.constexpr,
    KEEP: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # grid: as many programs as the device holds. A piece of work is a unit and a part of its page's rows; each program
    # takes the next piece of some KV heads until there is none. Who takes which makes no difference to the result.
    SUBS: tl.constexpr = P // BLOCK_N
    TILES: tl.constexpr = Q_BLOCK // BLOCK_M
    STEPS: tl.constexpr = GROUP * TILES
    LIKE: tl.constexpr = q_rows.dtype if TMA else q_rows.dtype.element_ty
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
        k = load_tile(records, record_row, scales + 2 * key, SCALED, UP, LIKE, TMA, BLOCK_N, D, BLOCK_D)
        v = load_tile(records, record_row + P, scales + 2 * key + 1, SCALED, UP, LIKE, TMA, BLOCK_N, D, BLOCK_D)
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
            q = _load_rows(q_rows, head, first, num_tokens, q_stride_h, q_stride_t, BLOCK_M, D, BLOCK_D, TMA)
            dout = _load_rows(
                dout_rows, head, first, num_tokens, dout_stride_h, dout_stride_t, BLOCK_M, D, BLOCK_D, TMA
            )
            q, dout = upcast(q, UP), upcast(dout, UP)
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
                _store_ds(ds_tiles, ds_at, (step % TILES) * BLOCK_M, ds, Q_BLOCK, TMA)
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


@triton.jit(do_not_specialize=["num_keys", "first_key", "end_key", "max_blocks", "seed"])
def _page_reduce_kernel(  # type: ignore[no-untyped-def]
    partials, grad_pool, grad_slots, block_counts, ends, cut_pages, num_keys, first_key, end_key, max_blocks, seed,
    STOCHASTIC: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (programs, row tiles of a page). Adds up the units of the cut pages of some KV heads, in order.
    col = tl.arange(0, BLOCK_D)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = row[:, None] * D + col[None, :]
    inside = (row < P)[:, None] & (col < D)[None, :]
    cut_ends = ends + 2 * num_keys - 1
    first_cut = tl.load(cut_ends + first_key, mask=first_key > 0, other=0)
    for cut in range(first_cut + tl.program_id(0), tl.load(cut_ends + end_key), tl.num_programs(0)):
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


def launch_page_dkv(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    stats_HT: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    grad_pool: Tensor,
    grad_slots_GN: Tensor,
    lists: PageLists,
    index: PageIndex,
    groups: range,
    ds: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    seed: int,
    scales_GN2: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Add dK and dV of some KV heads to the page gradients: the owners of pages, then the sums of cut pages.

    Args:
        stats_HT: what `launch_row_stats` knows of each row.
        groups: these KV heads.
        ds: where dS goes, in q's dtype: ``[len(groups) * B * K * query heads of a group * P, block_tokens]``, or more
            rows. None drops it.
        scales_GN2: of K and V in e4m3.
    """
    num_heads, num_tokens, head_dim = q_HTD.shape
    num_groups, num_blocks, room = lists.pages_GBK.shape
    page_tokens, num_pages = pool.shape[2], lists.num_pages
    num_keys, first_key, end_key = (n * num_pages for n in (num_groups, groups.start, groups.stop))
    check_kernel_inputs(pool, lists, q_HTD, dout_HTD)
    assert grad_pool.is_contiguous()
    assert grad_pool.shape[1:] == pool.shape[1:], f"{tuple(grad_pool.shape)} for {tuple(pool.shape)}"
    tiles = tiles or choose_tiles(
        "backward_kv", head_dim, page_tokens, lists.block_tokens, q_HTD.element_size(), shared_memory_of(q_HTD.device),
        float8=scales_GN2 is not None,
    )  # fmt: skip
    records = records_of(pool, tiles.block_n)
    (q_rows, *q_strides), (dout_rows, *dout_strides) = (rows_of(x, tiles.block_m) for x in (q_HTD, dout_HTD))
    partials = q_HTD.new_empty(max(index.max_partials, 1), 2, page_tokens, head_dim, dtype=torch.float32)
    next_piece = torch.zeros(1, dtype=torch.int32, device=q_HTD.device)
    stochastic, block_d = grad_pool.dtype == torch.bfloat16, next_power_of_2(head_dim)
    grad_slots_GN = grad_slots_GN.contiguous()
    programs = _num_programs(q_HTD.device)
    with torch.cuda.device_of(q_HTD):
        _page_owner_kernel[(programs,)](
            dout_rows, q_rows, stats_HT,
            records, records if ds is None else ds_tiles_of(ds, tiles), slots_GN.contiguous(),
            stats_HT if scales_GN2 is None else scales_GN2.contiguous(), grad_pool, grad_slots_GN,
            index.visits_KB, index.counts_K, index.units_U2, index.ends_3K, next_piece, partials,
            num_blocks, room, num_keys, num_pages, first_key, end_key, index.max_blocks,
            num_heads, stats_HT.shape[1], num_tokens, scale, *score_factors(scale, softcap), seed,
            *q_strides, *dout_strides,
            GROUP=num_heads // num_groups, Q_BLOCK=lists.block_tokens,
            SCALED=scales_GN2 is not None, SOFTCAP=softcap is not None, STOCHASTIC=stochastic, KEEP=ds is not None,
            P=page_tokens, D=head_dim, BLOCK_D=block_d, **tile_mode(q_HTD),
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        block_n = min(next_power_of_2(page_tokens), max(1, 2048 // block_d))
        _page_reduce_kernel[(programs, cdiv(page_tokens, block_n))](
            partials, grad_pool, grad_slots_GN, index.counts_K, index.ends_3K, index.cut_pages_U,
            num_keys, first_key, end_key, index.max_blocks, seed,
            STOCHASTIC=stochastic, P=page_tokens, D=head_dim, BLOCK_N=block_n, BLOCK_D=block_d,
        )  # fmt: skip


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
