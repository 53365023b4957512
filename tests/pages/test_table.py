"""PageTable: slots are given once, come back, and never belong to two pages."""

from __future__ import annotations

import numpy as np
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
    table.allocate(0, PageRange(0, 1))
    with pytest.raises(AssertionError, match="allocated once"):
        table.allocate(0, PageRange(0, 1))
    with pytest.raises(AssertionError, match="sized"):
        table.allocate(0, PageRange(1, 4))
    assert table.num_free == 2, "what fails takes nothing"


def test_single_heads_of_pages() -> None:
    table = PageTable(1, 2, 4, 8)
    table.allocate(0, PageRange(1, 3), np.array([0, 3]))
    assert table.slots(0, PageRange(0, 4)).tolist() == [[-1, -1], [0, -1], [-1, 1], [-1, -1]]
    with pytest.raises(AssertionError, match="allocated once"):
        table.allocate(0, PageRange(0, 2))
    table.allocate(0, PageRange(1, 3), np.array([1, 2]))
    assert table.slots(0, PageRange(1, 3)).tolist() == [[0, 2], [3, 1]]
    assert table.num_free == 4


HELD = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 3), st.booleans()), max_size=60)
"""Layer, page, heads (a bit each), and whether to take or to free."""


@given(HELD)
def test_no_slot_is_held_twice(steps: list[tuple[int, int, int, bool]]) -> None:
    table = PageTable(num_layers=3, num_heads=2, num_pages=7, num_slots=20)
    held: dict[tuple[int, int, int], int] = {}
    for layer, page, heads, take in steps:
        pages = PageRange(page, page + 1)
        new = [head for head in range(2) if heads >> head & 1 and (layer, page, head) not in held]
        if take and len(new) <= table.num_free:
            table.allocate(layer, pages, np.array(sorted(new), np.int64))
            held |= {(layer, page, head): int(table.slots(layer, pages)[0, head]) for head in new}
        elif not take:
            table.free(layer, pages)
            held = {key: slot for key, slot in held.items() if key[:2] != (layer, page)}
        assert len(set(held.values())) == len(held) and all(0 <= slot < 20 for slot in held.values())
        assert table.num_free == 20 - len(held)
        for at_layer in range(3):
            for at_page, slots in enumerate(table.slots(at_layer, PageRange(0, 7)).tolist()):
                assert slots == [held.get((at_layer, at_page, head), NO_SLOT) for head in range(2)]
