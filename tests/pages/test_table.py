"""PageTable: slots are given once, come back, and never belong to two pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomb_accel.pages import PageTable
from oomb_accel.pages.table import NO_SLOT
from oomb_accel.schedule import PageRange


def test_slots_are_taken_in_ascending_order_and_reused() -> None:
    table = PageTable(num_layers=2, num_heads=2, num_pages=4, num_slots=8)
    table.allocate(0, PageRange(0, 2))
    assert table.slots(0, PageRange(0, 2)).tolist() == [[0, 1], [2, 3]]
    table.free(0, PageRange(0, 1))
    table.allocate(1, PageRange(3, 4))
    assert table.slots(1, PageRange(3, 4)).tolist() == [[0, 1]]
    assert (table.slots(0, PageRange(0, 1)) == NO_SLOT).all()


def test_free_passes_over_pages_without_a_slot() -> None:
    table = PageTable(1, 3, 4, 12)
    table.allocate(0, PageRange(1, 3))
    table.free(0, PageRange(0, 4))
    table.free(0, PageRange(0, 4))
    assert table.num_free == 12


def test_a_page_is_allocated_once_and_only_where_there_is_room() -> None:
    table = PageTable(1, 2, 4, 4)
    assert table.can_allocate(PageRange(0, 2)) and not table.can_allocate(PageRange(0, 3))
    table.allocate(0, PageRange(0, 1))
    with pytest.raises(AssertionError):
        table.allocate(0, PageRange(0, 1))
    with pytest.raises(AssertionError):
        table.allocate(0, PageRange(1, 4))


def test_runs() -> None:
    table = PageTable(1, 2, 8, 16)
    table.allocate(0, PageRange(2, 4))
    table.allocate(0, PageRange(6, 7))
    assert table.runs(0, PageRange(0, 8)) == [
        (PageRange(0, 2), False),
        (PageRange(2, 4), True),
        (PageRange(4, 6), False),
        (PageRange(6, 7), True),
        (PageRange(7, 8), False),
    ]
    assert table.runs(0, PageRange(2, 4)) == [(PageRange(2, 4), True)]
    assert table.runs(0, PageRange(3, 3)) == []


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.booleans()), max_size=60))
def test_no_slot_is_held_twice(steps: list[tuple[int, int, bool]]) -> None:
    table = PageTable(num_layers=3, num_heads=2, num_pages=7, num_slots=20)
    held: dict[tuple[int, int], tuple[int, ...]] = {}
    for layer, page, take in steps:
        pages = PageRange(page, page + 1)
        if take and (layer, page) not in held and table.can_allocate(pages):
            table.allocate(layer, pages)
            held[layer, page] = tuple(table.slots(layer, pages)[0].tolist())
        elif not take:
            table.free(layer, pages)
            held.pop((layer, page), None)
        slots = [slot for pair in held.values() for slot in pair]
        assert len(set(slots)) == len(slots) and all(0 <= slot < 20 for slot in slots)
        assert table.num_free == 20 - len(slots)
        for (at_layer, at_page), pair in held.items():
            assert tuple(table.slots(at_layer, PageRange(at_page, at_page + 1))[0].tolist()) == pair
