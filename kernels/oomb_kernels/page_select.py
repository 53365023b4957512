"""Choosing pages: the softmax weight that a block of queries would give each page's mean keys, and the heaviest pages.

A page is known by the mean keys of its parts, runs of a few tokens: the mean of a whole page hides a short passage.
Suffixes as in `page_store`; H query heads, G KV heads, R pooled query rows, B query blocks (runs of `block_rows`
pooled rows, the last one may be shorter), N candidate pages, C their parts (the same number for each page), K pages per
list.

No function here has a gradient, and none uses atomics or an order that may vary: the same inputs give the same lists.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2
from oomb_kernels.layout import of_rows
from oomb_kernels.page_call import numeric_mode, score_factors, scores_of, tanh, upcast

_MAX_ROWS = 128
"""Pooled rows that one program scores: those of several small blocks, as mean keys are read once per program, or a
share of the rows of a large one."""
_PROGRAMS_WANTED = 1024
"""Below this many programs the pages are split over more of them. Fixed: no sum may depend on the device."""
_MAX_SPLITS = 16
_PLAIN = 1e-6
"""Share of the plain weight in a page's mass: it ranks pages whose squares are too small for fp32."""


def pool_queries(q_HTD: Tensor, sub_tokens: int = 16) -> Tensor:
    """The mean of every run of `sub_tokens` query rows; a shorter last run gives the mean of what is there.

    Args:
        q_HTD: [H, T, D], after RoPE, any strides.

    Returns:
        [H, ceil(T / sub_tokens), D] in q's dtype. Sums are formed in fp32 at least.
    """
    whole, rest = divmod(q_HTD.shape[1], sub_tokens)
    tokens = whole * sub_tokens
    pooled_HRD = of_rows(q_HTD, slice(0, tokens)).unflatten(1, (whole, sub_tokens)).mean(2)
    return torch.cat([pooled_HRD, q_HTD[:, tokens:].mean(1, keepdim=True)], 1) if rest else pooled_HRD


def page_centroids(k_GTD: Tensor, part_tokens: int) -> Tensor:
    """The mean key of each part of whole pages.

    Args:
        k_GTD: [G, n * part_tokens, D], after RoPE, any strides.

    Returns:
        [G, n, D] in k's dtype. Sums are formed in fp32 at least.
    """
    assert k_GTD.shape[1] % part_tokens == 0, f"{k_GTD.shape[1]} tokens are no whole parts of {part_tokens}"
    return k_GTD.unflatten(1, (k_GTD.shape[1] // part_tokens, part_tokens)).mean(2)


@torch.no_grad()
def page_mass_reference(
    pooled_HRD: Tensor,
    centroids_GCD: Tensor,
    *,
    parts: int,
    scale: float,
    block_rows: int,
    softcap: float | None = None,
) -> Tensor:
    """The definition of `page_mass`, in plain torch."""
    wide = torch.promote_types(pooled_HRD.dtype, torch.float32)
    num_groups = centroids_GCD.shape[0]
    centroids_G1CD = centroids_GCD.to(wide).unsqueeze(1)
    masses = []
    for rows_HRD in pooled_HRD.to(wide).split(block_rows, dim=1):
        scores = scores_of(rows_HRD.unflatten(0, (num_groups, -1)), centroids_G1CD, scale, softcap)
        weights = scores.softmax(-1).unflatten(-1, (-1, parts)).sum(-1)
        masses.append((weights * (weights + _PLAIN)).sum((1, 2)))
    return torch.stack(masses, 1)


@torch.no_grad()
def top_pages_reference(mass_GBN: Tensor, k: int) -> Tensor:
    """The definition of `top_pages`, in plain torch."""
    weight_GBN = torch.where(mass_GBN >= 0, mass_GBN, 0.0)  # NaN counts as nothing
    heaviest = weight_GBN.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return heaviest.sort(dim=-1).values.to(torch.int32)


@triton.jit
def _load_rows(  # type: ignore[no-untyped-def]
    pooled, head, row, exists, stride_h, stride_r, D: tl.constexpr, BLOCK_D: tl.constexpr, UP: tl.constexpr
):  # fmt: skip
    col = tl.arange(0, BLOCK_D)
    at = pooled + head.to(tl.int64)[:, None] * stride_h + row.to(tl.int64)[:, None] * stride_r + col[None, :]
    return upcast(tl.load(at, mask=exists[:, None] & (col[None, :] < D), other=0.0), UP)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    rows, centroids, part, num_parts, stride_c, factor, cap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Scores of rows and parts; MASKED where some parts may not exist, and have -inf. In units of log 2 where CAPPED,
    # otherwise the caller multiplies by the factor, in one instruction with what it subtracts.
    col = tl.arange(0, BLOCK_D)
    at = centroids + part.to(tl.int64)[None, :] * stride_c + col[:, None]
    if MASKED:
        means = tl.load(at, mask=(part[None, :] < num_parts) & (col[:, None] < D), other=0.0)
    elif BLOCK_D != D:
        means = tl.load(at, mask=col[:, None] < D, other=0.0)
    else:
        means = tl.load(at)
    scores = tl.dot(rows, upcast(means, UP), input_precision=PRECISION)
    if CAPPED:
        scores = cap * tanh(scores * factor)
    return tl.where(part[None, :] < num_parts, scores, float("-inf")) if MASKED else scores


@triton.jit(do_not_specialize=["num_rows", "num_parts", "split_parts", "all_rows"])
def _lse_kernel(  # type: ignore[no-untyped-def]
    pooled, centroids, lse, num_rows, num_parts, split_parts, all_rows, factor, cap,
    pooled_stride_h, pooled_stride_r, centroids_stride_g, centroids_stride_c,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr, UP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # grid: (tiles of the rows of a group, head by head; splits of the parts; KV heads)
    group = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    number = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = number < all_rows
    rows = _load_rows(
        pooled, group * GROUP + number // num_rows, number % num_rows, exists, pooled_stride_h, pooled_stride_r,
        D, BLOCK_D, UP,
    )  # fmt: skip
    unit = 1.0 if CAPPED else factor
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    first = split * split_parts
    end = tl.minimum(first + split_parts, num_parts)
    whole = first + (end - first) // BLOCK_N * BLOCK_N
    for LAST in tl.static_range(2):  # whole tiles, then what is left: masks take time
        for start in tl.range(whole if LAST else first, end if LAST else whole, BLOCK_N):
            scores = _scores(
                rows, centroids + group * centroids_stride_g, start + tl.arange(0, BLOCK_N), num_parts,
                centroids_stride_c, factor, cap, LAST == 1, CAPPED, D, BLOCK_D, UP, PRECISION,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(scores, 1) * unit)  # finite: every tile holds a part that exists
            total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scores * unit - new_top[:, None]), 1)
            top = new_top
    tl.store(lse + (group * tl.num_programs(1) + split) * all_rows + number, top + tl.log2(total), mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_parts", "split_parts", "all_rows"])
def _mass_kernel(  # type: ignore[no-untyped-def]
    pooled, centroids, lse, mass, num_rows, num_blocks, num_parts, split_parts, all_rows, factor, cap,
    pooled_stride_h, pooled_stride_r, centroids_stride_g, centroids_stride_c,
    PARTS: tl.constexpr, PLAIN: tl.constexpr, BLOCKS: tl.constexpr, SHARES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr, UP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # grid: (places: BLOCKS query blocks, or one of the SHARES of the rows of one; splits of the parts; KV heads).
    # Each element of the mass has one owner.
    ROWS: tl.constexpr = BLOCK_M // BLOCKS
    PAGES: tl.constexpr = BLOCK_N // PARTS
    SPREAD: tl.constexpr = (PARTS > 1) & (4 * PARTS <= BLOCK_N)
    place = tl.program_id(0)
    group = tl.program_id(2).to(tl.int64)
    number = tl.arange(0, BLOCK_M)
    block = place // SHARES * BLOCKS + number // ROWS
    number = place % SHARES * ROWS + number % ROWS  # in the block, head by head
    head = number // BLOCK_ROWS
    row = block * BLOCK_ROWS + number % BLOCK_ROWS
    exists = (head < GROUP) & (row < num_rows)
    rows = _load_rows(
        pooled, group * GROUP + head, row, exists, pooled_stride_h, pooled_stride_r, D, BLOCK_D, UP
    )  # fmt: skip
    partial = lse + group * tl.num_programs(1) * all_rows + head * num_rows + row
    top = tl.load(partial, mask=exists, other=0.0)
    total = tl.full([BLOCK_M], 1.0, tl.float32)
    for split in range(1, tl.num_programs(1)):
        value = tl.load(partial + split * all_rows, mask=exists, other=0.0)
        new_top = tl.maximum(top, value)
        total = total * tl.exp2(top - new_top) + tl.exp2(value - new_top)
        top = new_top
    row_lse = tl.where(exists, top + tl.log2(total), float("inf"))  # rows that do not exist have no weights
    unit = 1.0 if CAPPED else factor
    num_pages = num_parts // PARTS
    block = place // SHARES * BLOCKS + tl.arange(0, BLOCKS)
    mass_at = mass + ((group * num_blocks + block) * SHARES + place % SHARES) * num_pages
    column = tl.arange(0, BLOCK_N)
    if SPREAD:
        # A thread holds columns of a product 8 apart and in pairs: with a page's parts there, it sums them alone.
        owner = column // (4 * PARTS) * 4 + column // 2 % 4
        column = owner * PARTS + column // 8 % (PARTS // 2) * 2 + column % 2
    first = tl.program_id(1) * split_parts
    end = tl.minimum(first + split_parts, num_parts)
    whole = first + (end - first) // BLOCK_N * BLOCK_N
    for LAST in tl.static_range(2):
        for start in tl.range(whole if LAST else first, end if LAST else whole, BLOCK_N):
            scores = _scores(
                rows, centroids + group * centroids_stride_g, start + column, num_parts, centroids_stride_c,
                factor, cap, LAST == 1, CAPPED, D, BLOCK_D, UP, PRECISION,
            )  # fmt: skip
            weights = tl.exp2(scores * unit - row_lse[:, None])
            if SPREAD:
                weights = tl.reshape(weights, (BLOCK_M, PAGES // 4, PARTS // 2, 4, 2))
                weights = tl.reshape(tl.sum(tl.sum(weights, 4), 2), (BLOCKS, ROWS, PAGES))
            else:
                weights = tl.sum(tl.reshape(weights, (BLOCKS, ROWS, PAGES, PARTS)), 3)
            page = start // PARTS + tl.arange(0, PAGES)
            inside = (block[:, None] < num_blocks) & (page[None, :] < num_pages)
            tl.store(mass_at[:, None] + page[None, :], tl.sum(weights * (weights + PLAIN), 1), mask=inside)


@triton.jit
def _weight_bits(mass_row, page, num_pages):  # type: ignore[no-untyped-def]
    # The bits of non-negative floats are ordered as the floats are. NaN counts as 0; -1 where there is no page.
    weight = tl.load(mass_row + page, mask=page < num_pages, other=0.0)
    bits = tl.where(weight > 0, weight, 0.0).to(tl.int32, bitcast=True)
    return tl.where(page < num_pages, bits, -1)


@triton.jit(do_not_specialize=["num_pages", "k"])
def _top_pages_kernel(  # type: ignore[no-untyped-def]
    mass, pages, num_pages, k, SEARCH: tl.constexpr, EMIT: tl.constexpr
):  # fmt: skip
    # grid: rows of the mass
    row = tl.program_id(0).to(tl.int64)
    mass_row = mass + row * num_pages
    # The k-th largest value, bit by bit from the highest: a bit stays where still k values reach it.
    threshold = 0
    for step in range(31):
        tried = threshold | (1 << (30 - step))
        reached = tl.zeros([SEARCH], tl.int32)
        for start in range(0, num_pages, SEARCH):
            bits = _weight_bits(mass_row, start + tl.arange(0, SEARCH), num_pages)
            reached += (bits >= tried).to(tl.int32)
        threshold = tl.where(tl.sum(reached, 0) >= k, tried, threshold)
    above = tl.zeros([SEARCH], tl.int32)
    for start in range(0, num_pages, SEARCH):
        bits = _weight_bits(mass_row, start + tl.arange(0, SEARCH), num_pages)
        above += (bits > threshold).to(tl.int32)
    ties_wanted = k - tl.sum(above, 0)
    ties_seen = 0
    emitted = 0
    for start in range(0, num_pages, EMIT):
        page = start + tl.arange(0, EMIT)
        bits = _weight_bits(mass_row, page, num_pages)
        tied = (bits == threshold).to(tl.int32)
        tie_number = ties_seen + tl.cumsum(tied, 0)  # from 1
        taken = ((bits > threshold) | ((tied > 0) & (tie_number <= ties_wanted))).to(tl.int32)
        at = emitted + tl.cumsum(taken, 0) - 1
        tl.store(pages + row * k + at, page, mask=taken > 0)
        ties_seen += tl.sum(tied, 0)
        emitted += tl.sum(taken, 0)


def launch_page_mass(
    pooled_HRD: Tensor,
    centroids_GCD: Tensor,
    *,
    parts: int,
    scale: float,
    block_rows: int,
    softcap: float | None = None,
) -> Tensor:
    """The Triton kernels of `page_mass`, for fp32, fp16 and bf16."""
    num_heads, num_rows, head_dim = pooled_HRD.shape
    num_groups, num_parts, _ = centroids_GCD.shape
    assert pooled_HRD.stride(-1) == centroids_GCD.stride(-1) == 1
    group = num_heads // num_groups
    all_rows = group * num_rows
    num_blocks = cdiv(num_rows, block_rows)
    wide = pooled_HRD.dtype.itemsize > 2  # tiles of fp32 take twice the shared memory
    block_d = max(16, next_power_of_2(head_dim))
    block_n = max(parts, 32 if wide else (64 if block_d > 128 else 128))
    max_rows = _MAX_ROWS // 2 if wide else _MAX_ROWS
    lse_m = min(max_rows, max(16, next_power_of_2(all_rows)))  # 16: what the matrix unit takes at least
    rows = min(max_rows, next_power_of_2(group * block_rows))
    blocks = min(max_rows // rows, next_power_of_2(num_blocks))
    mass_m = max(16, blocks * rows)
    shares = cdiv(group * block_rows, rows)
    places = cdiv(num_blocks, blocks) * shares
    num_tiles = cdiv(num_parts, block_n)
    splits = min(num_tiles, _MAX_SPLITS, cdiv(_PROGRAMS_WANTED, places * num_groups))
    split_parts = cdiv(num_tiles, splits) * block_n
    splits = cdiv(num_parts, split_parts)
    lse = pooled_HRD.new_empty(num_groups, splits, all_rows, dtype=torch.float32)
    mass = pooled_HRD.new_empty(num_groups, num_blocks * shares, num_parts // parts, dtype=torch.float32)
    sizes = (num_parts, split_parts, all_rows, *score_factors(scale, softcap))
    strides = (*pooled_HRD.stride()[:2], *centroids_GCD.stride()[:2])
    constants = {
        "GROUP": group, "D": head_dim, "BLOCK_N": block_n, "BLOCK_D": block_d, "CAPPED": softcap is not None,
        **numeric_mode(pooled_HRD), "num_stages": 2,
    }  # fmt: skip
    with torch.cuda.device_of(pooled_HRD):
        _lse_kernel[(cdiv(all_rows, lse_m), splits, num_groups)](
            pooled_HRD, centroids_GCD, lse, num_rows, *sizes, *strides,
            BLOCK_M=lse_m, **constants, num_warps=4 if lse_m <= 64 else 8,
        )  # fmt: skip
        _mass_kernel[(places, splits, num_groups)](
            pooled_HRD, centroids_GCD, lse, mass, num_rows, num_blocks, *sizes, *strides,
            PARTS=parts, PLAIN=_PLAIN, BLOCKS=blocks, SHARES=shares, BLOCK_ROWS=block_rows,
            BLOCK_M=mass_m, **constants, num_warps=4 if mass_m <= 64 else 8,
        )  # fmt: skip
    return mass.unflatten(1, (-1, shares)).sum(2) if shares > 1 else mass


def launch_top_pages(mass_GBN: Tensor, k: int) -> Tensor:
    """The Triton kernel of `top_pages`, for fp32 and k up to N."""
    num_groups, num_blocks, num_pages = mass_GBN.shape
    assert mass_GBN.dtype == torch.float32 and 1 <= k <= num_pages
    pages = torch.empty(num_groups, num_blocks, k, dtype=torch.int32, device=mass_GBN.device)
    search = 1024 if num_pages <= 1024 else 8192
    with torch.cuda.device_of(mass_GBN):
        _top_pages_kernel[(num_groups * num_blocks,)](
            mass_GBN.contiguous(), pages, num_pages, k, SEARCH=search, EMIT=1024, num_warps=4 if search == 1024 else 8
        )
    return pages


def page_mass(
    pooled_HRD: Tensor,
    centroids_GCD: Tensor,
    *,
    parts: int,
    scale: float,
    block_rows: int,
    softcap: float | None = None,
) -> Tensor:
    """How much each block of queries wants each page.

    Every pooled row of every head spreads a weight of 1 over all parts of all pages, by the softmax of `scale * q . c`.
    A page has the weight of its parts. Its *squares* are summed over the rows of the block and the query heads of
    the KV head: a page that few rows want badly counts more than one that all want a little. A millionth of the
    weights themselves is added, so that pages far below the others are ranked too.

    Args:
        pooled_HRD: [H, R, D] as `pool_queries` gives them; H a multiple of G. fp32, fp16, bf16 or fp64.
        centroids_GCD: [G, N * parts, D] in the same dtype, N at least 1; any strides but the last.
        parts: mean keys per page, a power of two.
        scale: of the scores, as in attention; positive.
        block_rows: pooled rows per query block.
        softcap: scores become `softcap * tanh(score / softcap)`.

    Returns:
        [G, ceil(R / block_rows), N], contiguous, fp32 (fp64 for fp64).
    """
    num_heads, _, head_dim = pooled_HRD.shape
    num_groups = centroids_GCD.shape[0]
    assert num_heads % num_groups == 0 and centroids_GCD.shape[2] == head_dim and centroids_GCD.shape[1] % parts == 0
    assert scale > 0, scale
    assert pooled_HRD.dtype == centroids_GCD.dtype, f"{pooled_HRD.dtype} queries, {centroids_GCD.dtype} centroids"
    if pooled_HRD.is_cuda and pooled_HRD.dtype != torch.float64:
        return launch_page_mass(
            pooled_HRD, centroids_GCD, parts=parts, scale=scale, block_rows=block_rows, softcap=softcap
        )
    with torch.autocast(pooled_HRD.device.type, enabled=False):  # it would round the scores
        return page_mass_reference(
            pooled_HRD, centroids_GCD, parts=parts, scale=scale, block_rows=block_rows, softcap=softcap
        )


def top_pages(mass_GBN: Tensor, k: int) -> Tensor:
    """The `k` pages with the largest mass of each row, in ascending page order. Among equals the lower page goes first.

    Args:
        mass_GBN: [G, B, N], not negative; NaN counts as 0. fp32 or fp64.
        k: at least 1; all pages when there are fewer.

    Returns:
        int32 [G, B, min(k, N)], contiguous.
    """
    assert k >= 1, k
    num_pages = mass_GBN.shape[2]
    if k >= num_pages:
        every = torch.arange(num_pages, dtype=torch.int32, device=mass_GBN.device)
        return every.expand(mass_GBN.shape).contiguous()
    if mass_GBN.is_cuda and mass_GBN.dtype == torch.float32:
        return launch_top_pages(mass_GBN, k)
    return top_pages_reference(mass_GBN, k)
