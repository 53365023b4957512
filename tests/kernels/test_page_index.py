"""The inverted index of page lists against one made entry by entry in Python."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oomb_kernels import PageLists
from oomb_kernels.page_index import PageIndex, build_page_index, build_page_index_reference, launch_build_page_index
from tests.kernels.page_reference import PATTERNS, any_lists, make_lists
from tests.kernels.reference import INTERPRETED, ON_GPU

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

Build = Callable[[PageLists, int], PageIndex]
EVERYWHERE = pytest.mark.parametrize(
    ("build", "device"),
    [
        pytest.param(build_page_index, "cpu", id="public"),
        pytest.param(build_page_index_reference, "cpu", id="reference"),
        pytest.param(launch_build_page_index, "cpu", marks=INTERPRETED, id="interpreted"),
        pytest.param(build_page_index, "cuda", marks=ON_GPU, id="gpu"),
    ],
)


def visits_of_pages(lists: PageLists) -> list[list[int]]:
    """The query blocks of every page in ascending order and its place in their lists, by key."""
    visits: list[list[int]] = [[] for _ in range(len(lists.pages_GBK) * lists.num_pages)]
    counts = lists.counts_GB.tolist()
    for group, rows in enumerate(lists.pages_GBK.tolist()):
        for block, pages in enumerate(rows):
            for place, page in enumerate(pages[: counts[group][block]]):
                visits[group * lists.num_pages + page].append(block * 65536 + place)
    return visits


def check(build: Build, device: str, lists: PageLists, max_blocks: int) -> None:
    placed = PageLists(
        lists.pages_GBK.to(device), lists.counts_GB.to(device), lists.block_tokens, lists.num_pages
    )  # fmt: skip
    index = build(placed, max_blocks)
    wanted = visits_of_pages(lists)
    assert index.max_blocks == max_blocks
    assert index.counts_K.tolist() == [len(visits) for visits in wanted]
    rows = index.visits_KB.tolist()
    for row, visits in zip(rows, wanted, strict=True):
        assert row[: len(visits)] == visits

    num_units = [-(-len(visits) // max_blocks) for visits in wanted]
    cut = [key for key, number in enumerate(num_units) if number > 1]
    totals = index.totals_3.tolist()
    assert totals == [sum(num_units), sum(num_units[key] for key in cut), len(cut)]
    assert totals[0] <= len(index.units_U2) and totals[1] <= index.max_partials and totals[2] <= len(index.cut_pages_U)
    units = index.units_U2[: totals[0]].tolist()
    # By KV head, pages with much work first: in order of their counts, up to the width of a bin.
    assert sorted(units) == [[key, number] for key, count in enumerate(num_units) for number in range(count)]
    for (key, number), (after, next_number) in pairwise(units):
        assert next_number == (number + 1 if after == key else 0)
        group, next_group = key // lists.num_pages, after // lists.num_pages
        work, next_work = (min(len(wanted[k]), max_blocks) for k in (key, after))
        assert group < next_group or (group == next_group and work >= next_work - max_blocks // 31)
    assert index.cut_pages_U[: totals[2]].tolist() == cut
    ends = index.ends_3K.tolist()
    for key, count in enumerate(num_units):
        before = [row[key - 1] if key else 0 for row in ends]
        assert [row[key] - b for row, b in zip(ends, before, strict=True)] == [
            count, count * (count > 1), int(count > 1),
        ]  # fmt: skip

    # What the units stand for: together every list entry once, each page's visits in order.
    walked: list[list[int]] = [[] for _ in wanted]
    for key, number in units:
        walked[key] += rows[key][: len(wanted[key])][number * max_blocks : (number + 1) * max_blocks]
    assert walked == wanted


@EVERYWHERE
@given(data=st.data())
def test_any_lists(build: Build, device: str, data: st.DataObject) -> None:
    groups, blocks, pages = (data.draw(st.integers(1, most)) for most in (3, 9, 7))
    lists = data.draw(any_lists(groups, blocks, pages, 16))
    check(build, device, lists, data.draw(st.integers(1, 5)))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("max_blocks", [1, 2, 5, 6])
@EVERYWHERE
def test_patterns(build: Build, device: str, pattern: str, max_blocks: int) -> None:
    check(build, device, make_lists(PATTERNS[pattern], 2, 6, 5, 16), max_blocks)


@pytest.mark.parametrize("max_blocks", [1, 2, 7])
@EVERYWHERE
def test_as_many_units_as_there_can_be(build: Build, device: str, max_blocks: int) -> None:
    """One block more than a unit takes, on every page: the bound of the partial sums is reached."""
    lists = make_lists(PATTERNS["all"], 2, max_blocks + 1, 5, 16)
    check(build, device, lists, max_blocks)
    assert build_page_index(lists, max_blocks).totals_3[1] == build_page_index(lists, max_blocks).max_partials


@pytest.mark.parametrize(
    ("groups", "blocks", "pages", "pattern"),
    [
        pytest.param(2, 9, 300, "counts differ", id="more pages than one program of units takes"),
        pytest.param(1, 70, 90, "hot and another", id="more blocks than pages of one program"),
        pytest.param(1, 2, 2100, "many", id="longer lists than one step marks"),
        pytest.param(1, 1, 1, "all", id="one page"),
    ],
)
@EVERYWHERE
def test_sizes_of_several_tiles(build: Build, device: str, groups: int, blocks: int, pages: int, pattern: str) -> None:
    check(build, device, make_lists(PATTERNS[pattern], groups, blocks, pages, 16), 4)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_million_tokens(device: str) -> None:
    """8192 pages of 4 KV heads, 64 blocks that pick 64 each, and one page that all pick."""
    pattern = lambda block, pages, chance: {7, *chance.sample(range(pages), 63)}  # noqa: E731
    check(build_page_index, device, make_lists(pattern, 4, 64, 8192, 128), 16)


def test_refuses_lists_it_cannot_number() -> None:
    lists = make_lists(PATTERNS["one"], 1, 2, 3, 16)
    with pytest.raises(AssertionError):
        build_page_index(lists, 0)
    with pytest.raises(AssertionError):
        build_page_index(PageLists(torch.zeros(1, 2**15, 1, dtype=torch.int32), lists.counts_GB, 16, 3), 4)
