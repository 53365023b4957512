"""The inverted index of page lists: for every page, the query blocks that attend to it.

Suffixes as in `page_lists`; U units of work. With it each page's gradient has one owner, which adds everything up
in registers and writes once: no atomics, and the same bits each time. A page that many blocks attend to would keep
its owner busy long after all others; so its blocks are cut into units of `max_blocks`, whose sums are added in order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.page_lists import PageLists

_TILE_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class PageIndex:
    """Blocks of every page, and the units of work they are cut into. Sizes are bounds: no host ever waits for them.

    A page's key is ``kv_head * num_pages + page``.
    """

    blocks_KB: Tensor
    """int16 ``[G * N, B]``: blocks of each page in ascending order; what stands at or beyond its count is undefined."""
    counts_K: Tensor
    """int32 ``[G * N]``: blocks of each page."""
    units_U2: Tensor
    """int32 ``[U, 2]``: key and number, among the units of its page, of each unit; by key, then number."""
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
    num_keys = num_groups * lists.num_pages
    members = torch.zeros(num_groups, lists.num_pages, num_blocks, dtype=torch.bool)
    for g in range(num_groups):
        for b in range(num_blocks):
            members[g, lists.pages_GBK[g, b, : int(lists.counts_GB[g, b])].long(), b] = True
    members_KB = members.view(num_keys, num_blocks)
    counts_K = members_KB.sum(1, dtype=torch.int32)
    # A stable sort of "is no member" brings members to the front, in order.
    blocks_KB = torch.sort((~members_KB).to(torch.int8), dim=1, stable=True).indices.to(torch.int16)
    units_K = (counts_K + max_blocks - 1) // max_blocks
    cut_K = units_K > 1
    ends_3K = torch.stack([units_K, units_K * cut_K, cut_K.int()]).cumsum(1, dtype=torch.int32)
    keys = torch.arange(num_keys)
    unit_key = torch.repeat_interleave(keys, units_K)
    unit_number = torch.arange(len(unit_key)) - (ends_3K[0] - units_K)[unit_key]
    return PageIndex(
        blocks_KB,
        counts_K,
        torch.stack([unit_key, unit_number], 1).int(),
        ends_3K,
        keys[cut_K].int(),
        max_blocks,
        _max_partials(lists, max_blocks),
    )


def _max_partials(lists: PageLists, max_blocks: int) -> int:
    """Units of cut pages: a page of c > m blocks has at most (c + m - 1) / m, that is below 2c / (m + 1)."""
    return 2 * lists.pages_GBK.numel() // (max_blocks + 1)


@triton.jit(do_not_specialize=["num_pages", "room", "num_blocks"])
def _index_mark_kernel(pages, counts, members, num_pages, room, num_blocks, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    # grid: (query blocks, KV heads); every byte is written by at most one program
    block = tl.program_id(0)
    group = tl.program_id(1)
    number = group * num_blocks + block
    count = tl.load(counts + number)
    for start in range(0, count, BLOCK_K):
        entry = start + tl.arange(0, BLOCK_K)
        page = tl.load(pages + number.to(tl.int64) * room + entry, mask=entry < count, other=0)
        key = (group * num_pages + page).to(tl.int64)
        tl.store(members + key * num_blocks + block, 1, mask=entry < count)


@triton.jit(do_not_specialize=["num_keys", "num_blocks", "max_blocks"])
def _index_gather_kernel(  # type: ignore[no-untyped-def]
    members, blocks, counts, units, num_keys, num_blocks, max_blocks, BLOCK_KEYS: tl.constexpr, BLOCK_B: tl.constexpr
):
    # grid: blocks of pages
    key = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    block = tl.arange(0, BLOCK_B)
    inside = (key[:, None] < num_keys) & (block[None, :] < num_blocks)
    at = key.to(tl.int64)[:, None] * num_blocks
    member = tl.load(members + at + block[None, :], mask=inside, other=0).to(tl.int32)
    place = tl.cumsum(member, 1) - 1
    tl.store(blocks + at + place, (block[None, :] + tl.zeros_like(place)).to(tl.int16), mask=inside & (member == 1))
    count = tl.sum(member, 1)
    valid = key < num_keys
    num_units = (count + max_blocks - 1) // max_blocks
    cut = (num_units > 1).to(tl.int32)
    tl.store(counts + key, count, mask=valid)
    tl.store(units + key, num_units, mask=valid)
    tl.store(units + num_keys + key, num_units * cut, mask=valid)
    tl.store(units + 2 * num_keys + key, cut, mask=valid)


@triton.jit(do_not_specialize=["num_keys"])
def _index_unit_kernel(ends, units, cut_pages, num_keys, BLOCK_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    # grid: blocks of pages
    key = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    valid = key < num_keys
    end = tl.load(ends + key, mask=valid, other=0)
    first = tl.load(ends + key - 1, mask=valid & (key > 0), other=0)
    cut_end = tl.load(ends + 2 * num_keys + key, mask=valid, other=0)
    cut_first = tl.load(ends + 2 * num_keys + key - 1, mask=valid & (key > 0), other=0)
    tl.store(cut_pages + cut_first, key, mask=valid & (cut_end > cut_first))
    longest = tl.max(end - first, 0)
    for number in range(longest):
        here = valid & (first + number < end)
        at = 2 * (first + number).to(tl.int64)
        tl.store(units + at, key, mask=here)
        tl.store(units + at + 1, number + tl.zeros_like(key), mask=here)


def launch_build_page_index(lists: PageLists, max_blocks: int) -> PageIndex:
    """The Triton kernels of `build_page_index`."""
    num_groups, num_blocks, room = lists.pages_GBK.shape
    num_keys, device = num_groups * lists.num_pages, lists.pages_GBK.device
    members_KB = torch.zeros(num_keys, num_blocks, dtype=torch.uint8, device=device)
    blocks_KB = torch.empty(num_keys, num_blocks, dtype=torch.int16, device=device)
    units_3K = torch.empty(3, num_keys, dtype=torch.int32, device=device)
    counts_K = torch.empty(num_keys, dtype=torch.int32, device=device)
    # A page has at most as many units as blocks, so there are no more units than list entries.
    units_U2 = torch.empty(max(lists.pages_GBK.numel(), 1), 2, dtype=torch.int32, device=device)
    max_partials = _max_partials(lists, max_blocks)
    cut_pages_U = torch.empty(max(max_partials, 1), dtype=torch.int32, device=device)
    block_b = triton.next_power_of_2(num_blocks)
    block_keys = max(1, min(64, _TILE_ELEMENTS // block_b))
    with torch.cuda.device_of(lists.pages_GBK):
        _index_mark_kernel[(num_blocks, num_groups)](
            lists.pages_GBK, lists.counts_GB, members_KB, lists.num_pages, room, num_blocks,
            BLOCK_K=min(1024, triton.next_power_of_2(room)), num_warps=1,
        )  # fmt: skip
        _index_gather_kernel[(triton.cdiv(num_keys, block_keys),)](
            members_KB, blocks_KB, counts_K, units_3K, num_keys, num_blocks, max_blocks,
            BLOCK_KEYS=block_keys, BLOCK_B=block_b,
        )  # fmt: skip
        ends_3K = units_3K.cumsum(1, dtype=torch.int32)
        _index_unit_kernel[(triton.cdiv(num_keys, 256),)](ends_3K, units_U2, cut_pages_U, num_keys, BLOCK_KEYS=256)
    return PageIndex(blocks_KB, counts_K, units_U2, ends_3K, cut_pages_U, max_blocks, max_partials)


@torch.no_grad()
def build_page_index(lists: PageLists, max_blocks: int) -> PageIndex:
    """Invert page lists.

    Args:
        lists: of at most 32,767 query blocks; at least one candidate page.
        max_blocks: blocks of a unit of work, at least 1.
    """
    assert lists.num_pages > 0 and lists.pages_GBK.shape[1] < 2**15 and max_blocks > 0
    assert lists.pages_GBK.is_contiguous() and lists.counts_GB.is_contiguous()
    if lists.pages_GBK.is_cuda:
        return launch_build_page_index(lists, max_blocks)
    return build_page_index_reference(lists, max_blocks)
