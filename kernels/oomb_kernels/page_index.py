"""The inverted index of page lists: for every page, the query blocks that attend to it and where their lists name it.

Suffixes as in `page_lists`; U units of work. With it each page's gradient has one owner, which adds everything up
in registers and writes once: no atomics, and the same bits each time. A page that many blocks attend to would keep
its owner busy long after all others; so its blocks are cut into units of `max_blocks`, whose sums are added in order.
Units with much work come before those with little, so that all owners finish at about the same time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2
from oomb_kernels.page_lists import PageLists

_TILE_ELEMENTS = 4096
_BINS = 32


@dataclass(frozen=True, slots=True)
class PageIndex:
    """Blocks of every page, and the units of work they are cut into. Sizes are bounds: no host ever waits for them.

    A page's key is ``kv_head * num_pages + page``.
    """

    visits_KB: Tensor
    """int32 ``[G * N, B]``: blocks of each page in ascending order, each as ``block << 16 | position in its list``;
    what stands at or beyond the page's count is undefined."""
    counts_K: Tensor
    """int32 ``[G * N]``: blocks of each page."""
    units_U2: Tensor
    """int32 ``[U, 2]``: key and number, among the units of its page, of each unit; by KV head, then the page's count in
    descending bins, then key, then number."""
    ends_3K: Tensor
    """int32 ``[3, G * N]``, running sums over pages, each including its own page: units, units of cut pages (which get
    a partial sum each), cut pages."""
    cut_pages_U: Tensor
    """int32: the keys of cut pages, ascending."""
    max_blocks: int
    """Blocks of a unit; only a page's last unit has fewer."""
    max_partials: int
    """No more partial sums than this are needed."""

    @property
    def totals_3(self) -> Tensor:
        """int32: units, partial sums, cut pages."""
        return self.ends_3K[:, -1]


def build_page_index_reference(lists: PageLists, max_blocks: int) -> PageIndex:
    """The definition of `build_page_index`, in plain torch."""
    num_groups, num_blocks, _ = lists.pages_GBK.shape
    num_keys, nowhere = num_groups * lists.num_pages, torch.iinfo(torch.int32).max
    visits = torch.full((num_groups, lists.num_pages, num_blocks), nowhere, dtype=torch.int32)
    for g in range(num_groups):
        for b in range(num_blocks):
            count = int(lists.counts_GB[g, b])
            visits[g, lists.pages_GBK[g, b, :count].long(), b] = torch.arange(count, dtype=torch.int32) + (b << 16)
    visits_KB = visits.view(num_keys, num_blocks).sort(dim=1).values
    counts_K = (visits_KB < nowhere).sum(1, dtype=torch.int32)
    units_K = (counts_K + max_blocks - 1) // max_blocks
    cut_K = units_K > 1
    ends_3K = torch.stack([units_K, units_K * cut_K, cut_K.int()]).cumsum(1, dtype=torch.int32)
    keys = torch.arange(num_keys)
    bins_K = keys // lists.num_pages * _BINS + (max_blocks - counts_K).clamp(min=0) * (_BINS - 1) // max_blocks
    unit_key = torch.repeat_interleave(order := bins_K.argsort(stable=True), units_K[order])
    unit_number = torch.cat([torch.arange(int(number)) for number in units_K[order]])
    return PageIndex(
        visits_KB,
        counts_K,
        torch.stack([unit_key, unit_number], 1).int(),
        ends_3K,
        keys[cut_K].int(),
        max_blocks,
        max_partials(lists.pages_GBK.numel(), max_blocks),
    )


def max_partials(num_entries: int, max_blocks: int) -> int:
    """Units of cut pages, of all lists' entries: a page of c > m blocks has at most (c + m - 1) / m, that is below
    2c / (m + 1)."""
    return 2 * num_entries // (max_blocks + 1)


@triton.jit(do_not_specialize=["num_pages", "room", "num_blocks"])
def _index_mark_kernel(pages, counts, places, num_pages, room, num_blocks, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    # grid: (query blocks, KV heads); every number is written by at most one program
    block = tl.program_id(0)
    group = tl.program_id(1)
    number = group * num_blocks + block
    count = tl.load(counts + number)
    for start in range(0, count, BLOCK_K):
        entry = start + tl.arange(0, BLOCK_K)
        page = tl.load(pages + number.to(tl.int64) * room + entry, mask=entry < count, other=0)
        key = (group * num_pages + page).to(tl.int64)
        tl.store(places + key * num_blocks + block, entry + 1, mask=entry < count)


@triton.jit
def _bin_of(count, max_blocks, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin of a page by its number of blocks: 0 holds those with a whole unit and more."""
    return tl.maximum(max_blocks - count, 0) * (BINS - 1) // max_blocks


@triton.jit(do_not_specialize=["num_pages", "num_blocks", "max_blocks"])
def _index_gather_kernel(  # type: ignore[no-untyped-def]
    places, visits, counts, units, bin_units, num_pages, num_blocks, max_blocks,
    BINS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    # grid: (blocks of pages, KV heads)
    group = tl.program_id(1)
    num_keys = tl.num_programs(1) * num_pages
    page = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    key = group * num_pages + page
    valid = page < num_pages
    block = tl.arange(0, BLOCK_B)
    inside = valid[:, None] & (block[None, :] < num_blocks)
    at = key.to(tl.int64)[:, None] * num_blocks
    place = tl.load(places + at + block[None, :], mask=inside, other=0)  # in the block's list, from 1; 0 is nowhere
    member = (place > 0).to(tl.int32)
    rank = tl.cumsum(member, 1) - 1
    tl.store(visits + at + rank, (block[None, :] << 16) + place - 1, mask=inside & (place > 0))
    count = tl.sum(member, 1)
    num_units = (count + max_blocks - 1) // max_blocks
    cut = (num_units > 1).to(tl.int32)
    tl.store(counts + key, count, mask=valid)
    tl.store(units + key, num_units, mask=valid)
    tl.store(units + num_keys + key, num_units * cut, mask=valid)
    tl.store(units + 2 * num_keys + key, cut, mask=valid)
    bins = tl.arange(0, BINS)
    here = _bin_of(count, max_blocks, BINS)[:, None] == bins[None, :]
    bins_at = (group * BINS + bins) * tl.num_programs(0) + tl.program_id(0)
    tl.store(bin_units + bins_at, tl.sum(tl.where(here, num_units[:, None], 0), 0))


@triton.jit(do_not_specialize=["num_pages", "max_blocks"])
def _index_unit_kernel(  # type: ignore[no-untyped-def]
    counts, ends, bin_ends, units, cut_pages, num_pages, max_blocks, BINS: tl.constexpr, BLOCK_KEYS: tl.constexpr
):
    # grid: as that of `_index_gather_kernel`
    group = tl.program_id(1)
    num_keys = tl.num_programs(1) * num_pages
    page = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    key = group * num_pages + page
    valid = page < num_pages
    cut_end = tl.load(ends + 2 * num_keys + key, mask=valid, other=0)
    cut_first = tl.load(ends + 2 * num_keys + key - 1, mask=valid & (key > 0), other=0)
    tl.store(cut_pages + cut_first, key, mask=valid & (cut_end > cut_first))
    count = tl.load(counts + key, mask=valid, other=0)
    num_units = (count + max_blocks - 1) // max_blocks
    page_bin = _bin_of(count, max_blocks, BINS)
    here = page_bin[:, None] == tl.arange(0, BINS)[None, :]
    # Units of this page and of those behind it in its bin, of this program.
    rest = tl.sum(tl.where(here, tl.cumsum(tl.where(here, num_units[:, None], 0), 0, reverse=True), 0), 1)
    first = tl.load(bin_ends + (group * BINS + page_bin) * tl.num_programs(0) + tl.program_id(0)) - rest
    for number in range(tl.max(num_units, 0)):
        at = 2 * (first + number).to(tl.int64)
        tl.store(units + at, key, mask=number < num_units)
        tl.store(units + at + 1, number + tl.zeros_like(key), mask=number < num_units)


def launch_build_page_index(lists: PageLists, max_blocks: int) -> PageIndex:
    """The Triton kernels of `build_page_index`."""
    num_groups, num_blocks, room = lists.pages_GBK.shape
    num_keys, device = num_groups * lists.num_pages, lists.pages_GBK.device
    places_KB = torch.zeros(num_keys, num_blocks, dtype=torch.int32, device=device)
    visits_KB = torch.empty_like(places_KB)
    units_3K = torch.empty(3, num_keys, dtype=torch.int32, device=device)
    counts_K = torch.empty(num_keys, dtype=torch.int32, device=device)
    # A page has at most as many units as blocks, so there are no more units than list entries.
    units_U2 = torch.empty(max(lists.pages_GBK.numel(), 1), 2, dtype=torch.int32, device=device)
    most_partials = max_partials(lists.pages_GBK.numel(), max_blocks)
    cut_pages_U = torch.empty(max(most_partials, 1), dtype=torch.int32, device=device)
    block_b = next_power_of_2(num_blocks)
    block_keys = max(1, min(64, _TILE_ELEMENTS // block_b))
    grid = (cdiv(lists.num_pages, block_keys), num_groups)
    bin_units = torch.empty(grid[0] * num_groups * _BINS, dtype=torch.int32, device=device)
    with torch.cuda.device_of(lists.pages_GBK):
        _index_mark_kernel[(num_blocks, num_groups)](
            lists.pages_GBK, lists.counts_GB, places_KB, lists.num_pages, room, num_blocks,
            BLOCK_K=min(1024, next_power_of_2(room)), num_warps=1,
        )  # fmt: skip
        _index_gather_kernel[grid](
            places_KB, visits_KB, counts_K, units_3K, bin_units, lists.num_pages, num_blocks, max_blocks,
            BINS=_BINS, BLOCK_KEYS=block_keys, BLOCK_B=block_b,
        )  # fmt: skip
        ends_3K = units_3K.cumsum(1, dtype=torch.int32)
        _index_unit_kernel[grid](
            counts_K, ends_3K, bin_units.cumsum(0, dtype=torch.int32), units_U2, cut_pages_U,
            lists.num_pages, max_blocks, BINS=_BINS, BLOCK_KEYS=block_keys,
        )  # fmt: skip
    return PageIndex(visits_KB, counts_K, units_U2, ends_3K, cut_pages_U, max_blocks, most_partials)


def build_page_index(lists: PageLists, max_blocks: int) -> PageIndex:
    """Invert page lists.

    Args:
        lists: of at most 32,767 query blocks and 65,536 entries each; at least one candidate page.
        max_blocks: blocks of a unit of work, at least 1.
    """
    assert lists.num_pages > 0 and max_blocks > 0
    assert lists.pages_GBK.shape[1] < 2**15 and lists.pages_GBK.shape[2] <= 2**16
    assert lists.pages_GBK.is_contiguous() and lists.counts_GB.is_contiguous()
    if lists.pages_GBK.is_cuda:
        return launch_build_page_index(lists, max_blocks)
    return build_page_index_reference(lists, max_blocks)
