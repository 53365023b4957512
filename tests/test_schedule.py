"""The schedule: every token once, chunks that end on page borders, pasts of whole pages, pages and targets once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange


def build(lengths: list[int], chunk: int, page: int, targets: list[int] | None = None) -> tuple[Chunk, ...]:
    positions = list(range(sum(lengths))) if targets is None else targets
    return ChunkSchedule.build(lengths, positions, chunk_tokens=chunk, page_tokens=page).chunks


@st.composite
def schedules(draw: st.DrawFn) -> tuple[ChunkSchedule, list[int], list[int], int]:
    page = draw(st.integers(1, 7))
    chunk = draw(st.integers(page, 40))
    lengths = draw(st.lists(st.integers(1, 90), min_size=0, max_size=6))
    targets = sorted(draw(st.sets(st.integers(0, max(sum(lengths) - 1, 0))))) if lengths else []
    schedule = ChunkSchedule.build(lengths, targets, chunk_tokens=chunk, page_tokens=page)
    return schedule, lengths, targets, chunk


@given(schedules())
def test_every_token_is_in_one_segment(case: tuple[ChunkSchedule, list[int], list[int], int]) -> None:
    schedule, lengths, _, chunk_tokens = case
    position = 0
    for index, chunk in enumerate(schedule.chunks):
        assert chunk.index == index
        assert chunk.start == position == chunk.segments[0].start
        assert 1 <= chunk.num_tokens <= chunk_tokens
        for segment in chunk.segments:
            assert segment.start == position and segment.num_tokens >= 1
            position = segment.end
        assert chunk.end == position
    assert position == sum(lengths) == schedule.num_tokens
    for document, length in enumerate(lengths):
        parts = [s for c in schedule.chunks for s in c.segments if s.document == document]
        assert [p.past_tokens for p in parts] == [p.start - parts[0].start for p in parts]
        assert sum(p.num_tokens for p in parts) == length


@given(schedules())
def test_a_chunk_ends_on_a_page_border_or_at_the_end_of_a_document(
    case: tuple[ChunkSchedule, list[int], list[int], int],
) -> None:
    schedule, lengths, _, _ = case
    page = schedule.page_tokens
    for chunk in schedule.chunks:
        last = chunk.segments[-1]
        in_document = last.past_tokens + last.num_tokens
        assert in_document % page == 0 or in_document == lengths[last.document]
        assert all(s.past_tokens == 0 for s in chunk.segments[1:])
        assert chunk.segments[0].past_tokens % page == 0
        assert len(chunk.past_pages) * page == chunk.segments[0].past_tokens


@given(schedules())
def test_no_chunk_could_be_longer(case: tuple[ChunkSchedule, list[int], list[int], int]) -> None:
    """Greedy: the next page (or the whole rest of the document) would not have fitted."""
    schedule, lengths, _, chunk_tokens = case
    for chunk, following in zip(schedule.chunks, schedule.chunks[1:], strict=False):
        head = following.segments[0]
        rest_of_document = lengths[head.document] - head.past_tokens
        assert chunk.num_tokens + min(schedule.page_tokens, rest_of_document) > chunk_tokens


@given(schedules())
def test_page_numbers_are_a_partition(case: tuple[ChunkSchedule, list[int], list[int], int]) -> None:
    schedule, lengths, _, _ = case
    owner: dict[int, int] = {}
    for chunk in schedule.chunks:
        last = chunk.segments[-1]
        for page in range(chunk.own_pages.first, chunk.own_pages.end):
            assert page not in owner
            owner[page] = last.document
        goes_on = last.past_tokens + last.num_tokens < lengths[last.document]
        assert len(chunk.own_pages) == (last.num_tokens // schedule.page_tokens if goes_on else 0)
        # The past of a chunk is all earlier pages of its own document and of no other.
        past = range(chunk.past_pages.first, chunk.past_pages.end)
        head = chunk.segments[0].document
        earlier = [p for p, d in owner.items() if d == head and p < chunk.past_pages.end]
        assert list(past) == (earlier if chunk.segments[0].past_tokens else [])
    assert sorted(owner) == list(range(schedule.num_pages))


@given(schedules())
def test_targets_are_a_partition(case: tuple[ChunkSchedule, list[int], list[int], int]) -> None:
    schedule, _, targets, _ = case
    listed = []
    for chunk in schedule.chunks:
        mine = targets[chunk.first_target : chunk.end_target]
        assert len(mine) == chunk.num_targets
        assert all(chunk.start <= position < chunk.end for position in mine)
        listed += mine
    assert listed == targets
    assert schedule.num_targets == len(targets)


def test_a_chunk_of_12_with_pages_of_5_is_cut_at_10() -> None:
    assert [c.num_tokens for c in build([33], 12, 5)] == [10, 10, 10, 3]


def test_the_room_behind_a_document_is_used_in_whole_pages() -> None:
    first, second = build([5, 20], 16, 4)
    assert [(s.document, s.num_tokens) for s in first.segments] == [(0, 5), (1, 8)]
    assert first.own_pages == PageRange(0, 2)
    assert [(s.document, s.past_tokens, s.num_tokens) for s in second.segments] == [(1, 8, 12)]
    assert second.past_pages == PageRange(0, 2) and not second.own_pages


def test_a_document_that_fills_its_chunk_has_no_past_to_keep() -> None:
    (chunk,) = build([16], 16, 4)
    assert not chunk.own_pages and not chunk.past_pages


def test_an_empty_stream_has_no_chunks() -> None:
    schedule = ChunkSchedule.build([], [], chunk_tokens=4, page_tokens=4)
    assert schedule.chunks == () and schedule.num_targets == schedule.num_tokens == schedule.num_pages == 0


@pytest.mark.parametrize(("chunk", "page"), [(3, 4), (0, 1), (4, 0)])
def test_a_chunk_smaller_than_a_page_is_an_error(chunk: int, page: int) -> None:
    with pytest.raises(ValueError, match=rf"(?s)at least one page.*chunk_tokens={chunk}.*Set chunk_tokens="):
        ChunkSchedule.build([10], [], chunk_tokens=chunk, page_tokens=page)


def test_newest_pages() -> None:
    pages = PageRange(3, 9)
    assert pages.newest(2) == PageRange(7, 9)
    assert pages.newest(50) == pages
    assert len(pages.newest(0)) == 0
