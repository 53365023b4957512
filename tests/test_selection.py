"""PageSelector: what is in reach, which pages are chosen, and that choices are kept and replayed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from oomb_accel.selection import PageSelector, Reach, SelectionSettings, TouchedPages
from oomb_kernels import PageLists
from tests.harness.tolerance import assert_same_bits

HEADS, GROUPS, DIM, PAGE = 4, 2, 8, 4
SCALE = DIM**-0.5


def settings(**changes: Any) -> SelectionSettings:
    values: dict[str, Any] = {
        "top_k": 2,
        "q_block": 8,
        "sink_pages": 1,
        "recent_pages": 2,
        "page_budget": None,
        "select_per": "kv_head",
        "causal_selection": False,
    }
    return SelectionSettings(**(values | changes))


def selector(**changes: Any) -> PageSelector:
    return PageSelector(settings(**changes), frozenset({0, 2}))


def long_document(tokens: int = 110, chunk: int = 20) -> ChunkSchedule:
    return ChunkSchedule.build([tokens], list(range(tokens)), chunk_tokens=chunk, page_tokens=PAGE)


def random_queries(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).transpose(0, 1)


def random_centroids(pages: int, seed: int = 1) -> Tensor:
    return 3 * torch.randn(GROUPS, pages, DIM, generator=torch.Generator().manual_seed(seed))


def choose(
    chooser: PageSelector, q: Tensor, plan: ChunkSchedule, *, seed: int = 1, softcap: float | None = None
) -> PageLists:
    """Lists of the last chunk, whose queries are the end of ``q``; the chunk before it notes its own."""
    before, chunk = plan.chunks[-2:]
    chooser.note_queries(0, before, q[:, before.start : before.end])
    reach = chooser.reach(0, chunk.past_pages)
    assert reach is not None
    centroids = random_centroids(len(reach.candidates), seed)
    return chooser.select(0, chunk, q[:, chunk.start : chunk.end], centroids, reach, SCALE, softcap)


def lists_of(lists: PageLists) -> list[list[list[int]]]:
    result: list[list[list[int]]] = lists.pages_GBK.tolist()
    return result


def expected_lists(q: Tensor, centroids: Tensor, top_k: int, q_block: int, pooled: int) -> list[list[list[int]]]:
    """Written out: pooled queries, softmax over pages, its squares summed over block and group, the heaviest."""
    found: list[list[list[int]]] = []
    for group in range(GROUPS):
        found.append([])
        for block in q.split(q_block, 1):
            mass = torch.zeros(centroids.shape[1], dtype=torch.float64)
            for head in range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS):
                for rows in block[head].split(pooled):
                    weights = torch.softmax(SCALE * (centroids[group].double() @ rows.double().mean(0)), 0)
                    mass += weights * (weights + 1e-6)
            found[-1].append(sorted(mass.argsort(descending=True)[:top_k].tolist()))
    return found


def test_the_past_is_cut_into_sinks_candidates_and_recents() -> None:
    assert selector().reach(0, PageRange(10, 30)) == Reach(PageRange(10, 11), PageRange(28, 30), PageRange(11, 28))
    without = selector(sink_pages=0, recent_pages=0).reach(0, PageRange(10, 30))
    assert without == Reach(PageRange(10, 10), PageRange(30, 30), PageRange(10, 30))


@pytest.mark.parametrize(("sinks", "recents", "top_k"), [(1, 2, 2), (0, 0, 1), (3, 0, 4), (0, 5, 2)])
def test_nothing_is_selected_while_a_list_has_room_for_all(sinks: int, recents: int, top_k: int) -> None:
    chooser = selector(sink_pages=sinks, recent_pages=recents, top_k=top_k)
    everything = sinks + recents + top_k
    for pages in range(everything + 1):
        assert chooser.reach(0, PageRange(7, 7 + pages)) is None
    reach = chooser.reach(0, PageRange(7, 7 + everything + 1))
    assert reach is not None and len(reach.candidates) == top_k + 1
    assert len(reach.sinks) == sinks and len(reach.recents) == recents


def test_other_layers_attend_to_everything() -> None:
    chooser = selector()
    assert chooser.reach(1, PageRange(0, 1000)) is None
    assert chooser.reach(2, PageRange(0, 1000)) is not None


@pytest.mark.parametrize("softcap", [None, 1e6])
def test_lists_are_the_heaviest_pages_of_each_block(softcap: float | None) -> None:
    plan, q = long_document(), random_queries(110)
    lists = choose(selector(), q, plan, softcap=softcap)
    chunk = plan.chunks[-1]
    candidates = len(chunk.past_pages) - 3
    assert lists.num_pages == candidates and lists.block_tokens == 8
    assert lists.pages_GBK.dtype == lists.counts_GB.dtype == torch.int32
    assert (lists.counts_GB == 2).all() and lists.pages_GBK.is_contiguous()
    assert lists_of(lists) == expected_lists(q[:, chunk.start :], random_centroids(candidates), 2, 8, 8)


def test_a_block_is_scored_by_several_means() -> None:
    """With one mean per block, queries of two topics would cancel; 32 queries make two means of 16."""
    plan = long_document(200, 40)
    q = random_queries(200)
    q[:, -40:-24], q[:, -24:-8] = 5.0, -5.0
    chooser = selector(q_block=32, top_k=2)
    chooser.note_queries(0, plan.chunks[-2], q[:, :40])
    chunk = plan.chunks[-1]
    reach = chooser.reach(0, chunk.past_pages)
    assert reach is not None
    centroids = torch.zeros(GROUPS, len(reach.candidates), DIM)
    centroids[:, 3], centroids[:, 9] = 2.0, -2.0
    lists = chooser.select(0, chunk, q[:, chunk.start :], centroids, reach, SCALE)
    assert lists.pages_GBK[:, 0].tolist() == [[3, 9]] * GROUPS


def test_selection_makes_no_graph() -> None:
    """What the selector keeps must not keep a chunk's graph alive."""
    q, chooser = random_queries(110).requires_grad_(), selector(causal_selection=True)
    lists = choose(chooser, q, long_document())
    assert not lists.pages_GBK.requires_grad and not lists.counts_GB.requires_grad
    assert not any(pooled.requires_grad for _, pooled in chooser._last_queries.values())


def test_heads_of_a_layer_share_one_list_on_request() -> None:
    plan, q = long_document(), random_queries(110)
    apart, shared = choose(selector(), q, plan), choose(selector(select_per="layer"), q, plan)
    assert lists_of(apart)[0] != lists_of(apart)[1]
    assert lists_of(shared)[0] == lists_of(shared)[1] and shared.pages_GBK.is_contiguous()
    assert shared.pages_GBK.shape == apart.pages_GBK.shape and shared.counts_GB.shape == apart.counts_GB.shape
    # Both heads have a say: with the keys of one made indifferent, the other decides alone.
    for deciding in range(GROUPS):
        chooser, chunk = selector(select_per="layer"), plan.chunks[-1]
        reach = chooser.reach(0, chunk.past_pages)
        assert reach is not None
        centroids = random_centroids(len(reach.candidates))
        centroids[1 - deciding] = 0
        lists = chooser.select(0, chunk, q[:, chunk.start :], centroids, reach, SCALE)
        assert lists_of(lists)[0] == expected_lists(q[:, chunk.start :], centroids, 2, 8, 8)[deciding]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("share", ["kv_head", "layer"])
@pytest.mark.parametrize("budget", [2, 3, 5])
def test_a_budget_caps_the_pages_of_a_chunk(budget: int, share: str, causal: bool) -> None:
    plan, q = long_document(220, 40), random_queries(220)
    free = choose(selector(select_per=share, causal_selection=causal), q, plan)
    capped = choose(selector(select_per=share, causal_selection=causal, page_budget=budget), q, plan)
    for group in range(GROUPS):
        assert len({*free.pages_GBK[group].flatten().tolist()}) > 5, "the case must need the budget"
        assert len({*capped.pages_GBK[group].flatten().tolist()}) <= budget
    assert capped.pages_GBK.shape == free.pages_GBK.shape
    assert (capped.pages_GBK.diff(dim=2) > 0).all()


def test_a_budget_keeps_the_heaviest_pages_of_the_chunk() -> None:
    """Three blocks like page 5, one likes page 1 and one page 2 a little more: a budget of 2 keeps 5 and 2."""
    plan = long_document(220, 40)
    chooser, chunk = selector(top_k=1, page_budget=2), plan.chunks[-1]
    reach = chooser.reach(0, chunk.past_pages)
    assert reach is not None
    directions = torch.eye(DIM)
    liked = [5, 1, 5, 2, 5]
    strength = {5: 4.0, 1: 4.0, 2: 6.0}
    q = torch.cat([directions[page].expand(8, DIM) * strength[page] for page in liked]).expand(HEADS, 40, DIM)
    chunk = Chunk(
        chunk.index, 0, 40, (type(chunk.segments[0])(0, 0, 40, 180),), chunk.past_pages, PageRange(0, 0), 0, 0
    )
    centroids = torch.zeros(GROUPS, len(reach.candidates), DIM)
    centroids[:, :DIM] = 4 * directions
    lists = chooser.select(0, chunk, q, centroids, reach, SCALE)
    assert lists.pages_GBK[0, :, 0].tolist() == [5, 2, 5, 2, 5]


def test_a_budget_beyond_the_candidates_changes_nothing() -> None:
    plan, q = long_document(), random_queries(110)
    free = choose(selector(), q, plan)
    assert_same_bits(choose(selector(page_budget=10_000), q, plan).pages_GBK, free.pages_GBK)


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("share", ["kv_head", "layer"])
def test_causal_lists_do_not_depend_on_the_blocks_own_or_later_queries(share: str, budget: int | None) -> None:
    plan, q = long_document(220, 40), random_queries(220)
    start = plan.chunks[-1].start

    def lists_for(queries: Tensor, causal: bool) -> Tensor:
        return choose(selector(causal_selection=causal, select_per=share, page_budget=budget), queries, plan).pages_GBK

    before, looking_ahead = lists_for(q, True), lists_for(q, False)
    assert before.shape == looking_ahead.shape
    num_blocks = before.shape[1]
    ahead = False
    for block in range(num_blocks):
        changed = q.clone()
        changed[:, start + 8 * block :] = random_queries(220, seed=5)[:, start + 8 * block :]
        assert_same_bits(lists_for(changed, True)[:, : block + 1], before[:, : block + 1])
        ahead |= not torch.equal(lists_for(changed, False)[:, block], looking_ahead[:, block])
    assert ahead, "the other variant must be told apart by this test"


@pytest.mark.parametrize("tokens", [200, 220])
def test_causal_lists_are_those_of_the_queries_right_before_the_block(tokens: int) -> None:
    plan, q = long_document(tokens, 40), random_queries(tokens)
    chunk = plan.chunks[-1]
    lists = choose(selector(causal_selection=True), q, plan)
    num_blocks = -(-chunk.num_tokens // 8)
    before = q[:, chunk.start - 8 : chunk.start - 8 + 8 * num_blocks]
    assert lists_of(lists) == expected_lists(before, random_centroids(lists.num_pages), 2, 8, 8)


def test_causal_selection_after_less_than_a_block() -> None:
    """A document that starts at the end of a chunk has had four tokens when its second chunk begins."""
    plan = ChunkSchedule.build([16, 60], list(range(76)), chunk_tokens=20, page_tokens=PAGE)
    first, second = plan.chunks[:2]
    chooser = selector(causal_selection=True, top_k=1, sink_pages=0, recent_pages=0, q_block=32)
    assert first.segments[-1].num_tokens == 4 and len(second.past_pages) == 1
    q = random_queries(20)
    chooser.note_queries(0, first, q)
    # Pages of one token each would let it select; here the candidates are made up.
    reach = Reach(PageRange(0, 0), PageRange(6, 6), PageRange(0, 6))
    lists = chooser.select(0, second, random_queries(20, seed=3), random_centroids(6), reach, SCALE)
    assert lists_of(lists) == expected_lists(q[:, 16:], random_centroids(6), 1, 32, 16)


def test_a_ragged_last_block_has_a_list() -> None:
    plan = long_document(110)
    assert plan.chunks[-1].num_tokens == 10
    for causal in (False, True):
        assert choose(selector(causal_selection=causal), random_queries(110), plan).pages_GBK.shape == (GROUPS, 2, 2)


def test_only_the_first_segment_selects() -> None:
    plan = ChunkSchedule.build([64, 6], list(range(70)), chunk_tokens=20, page_tokens=PAGE)
    chunk, chooser = plan.chunks[-1], selector()
    assert [segment.num_tokens for segment in chunk.segments] == [4, 6]
    reach = chooser.reach(0, chunk.past_pages)
    assert reach is not None
    centroids = random_centroids(len(reach.candidates))
    assert chooser.select(0, chunk, random_queries(4), centroids, reach, SCALE).pages_GBK.shape[1] == 1
    with pytest.raises(AssertionError):
        chooser.select(2, chunk, random_queries(10), centroids, reach, SCALE)


def test_replay_returns_the_very_lists_and_release_forgets_them() -> None:
    plan, q, chooser = long_document(), random_queries(110), selector()
    lists = choose(chooser, q, plan)
    chunk = plan.chunks[-1]
    reach = chooser.reach(0, chunk.past_pages)
    assert reach is not None
    assert chooser.recorded(0, chunk) is lists
    with pytest.raises(AssertionError, match="chosen once"):
        chooser.select(0, chunk, q[:, chunk.start :], random_centroids(lists.num_pages), reach, SCALE)
    other = chooser.select(2, chunk, q[:, chunk.start :], random_centroids(lists.num_pages, 9), reach, SCALE)
    assert chooser.recorded(0, chunk) is lists and chooser.recorded(2, chunk) is other
    chooser.release(plan.chunks[-2])
    assert chooser.recorded(0, chunk) is lists
    chooser.release(chunk)
    for layer in (0, 2):
        with pytest.raises(KeyError):
            chooser.recorded(layer, chunk)
    chooser.release(chunk)


@given(st.integers(1, 70), st.integers(1, 4), st.integers(1, 5), st.integers(0, 1000))
def test_touched_pages_are_those_that_some_list_names(pages: int, blocks: int, top_k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(GROUPS, blocks, pages, generator=generator).topk(min(top_k, pages)).indices
    lists = PageLists(chosen.sort().values.int(), torch.full((GROUPS, blocks), chosen.shape[2]).int(), 8, pages)
    touched = TouchedPages(lists)
    named = [(page, group) for group in range(GROUPS) for page in range(pages) if page in lists.pages_GBK[group]]
    assert touched().tolist() == sorted(page * GROUPS + group for page, group in named)
    assert touched().dtype == np.int64


def test_what_a_chunk_touches_is_told_until_it_is_released() -> None:
    plan, chooser = long_document(), selector()
    lists = choose(chooser, random_queries(110), plan)
    chunk = plan.chunks[-1]
    touched = chooser.touched(0, chunk)
    assert touched is not None and len(touched()) == sum(
        len(lists.pages_GBK[group].unique()) for group in range(GROUPS)
    )
    assert chooser.touched(2, chunk) is None, "it did not select"
    assert chooser.touched(0, plan.chunks[-2]) is None
    chooser.release(chunk)
    assert chooser.touched(0, chunk) is None


def test_the_same_queries_give_the_same_lists() -> None:
    plan, q = long_document(), random_queries(110)
    assert_same_bits(choose(selector(), q, plan).pages_GBK, choose(selector(), q, plan).pages_GBK)
