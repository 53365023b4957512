"""Itinerary: what comes next is brought, not more than two steps ahead, whatever is used in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oomb_accel.pages import Kind, Need, Wanted
from oomb_accel.pages.ahead import STEPS_AHEAD, Bringer, Itinerary
from oomb_accel.schedule import PageRange


@dataclass
class Keeper:
    """Notes what it is told to expect, and refuses when it is full."""

    kind: Kind
    calls: list[tuple[str, int, PageRange, bool]] = field(default_factory=list)
    room: int = 1000

    def expect(self, layer: int, pages: PageRange, wanted: Wanted | None = None) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.calls.append((self.kind, layer, pages, wanted is not None))
        return True

    def forget_expected(self) -> None:
        self.calls.clear()

    @property
    def layers(self) -> list[int]:
        return [layer for _, layer, _, _ in self.calls]


def need(step: int, kind: Kind = "values", page: int = 0, wanted: bool = False) -> Need:
    """A use of one page in the layer that has the step's number."""
    return Need(step, kind, step, PageRange(page, page + 1), (lambda: np.zeros(1, np.int32)) if wanted else None)


def follow(needs: list[Need], room: int = 1000) -> tuple[Itinerary, dict[Kind, Bringer], Keeper, Keeper]:
    values, gradients = Keeper("values", room=room), Keeper("gradients", room=room)
    itinerary = Itinerary()
    itinerary.begin(needs)
    return itinerary, {"values": values, "gradients": gradients}, values, gradients


def test_two_steps_ahead_of_the_last_use() -> None:
    itinerary, records, values, _ = follow([need(step) for step in range(10)])
    itinerary.bring(records)
    assert values.layers == [0, 1, 2]
    itinerary.bring(records)
    assert values.layers == [0, 1, 2], "once"
    itinerary.passed("values", 3, PageRange(0, 1))
    itinerary.bring(records)
    assert values.layers == [0, 1, 2, 4, 5], "what is used is not brought any more"


def test_several_needs_of_a_step_come_in_order() -> None:
    needs = [need(step, kind, page) for step in range(4) for kind in ("values", "gradients") for page in range(2)]
    itinerary, records, values, gradients = follow(needs)
    itinerary.passed("values", 0, PageRange(0, 1), PageRange(1, 2))
    itinerary.bring(records)
    assert values.layers == [1, 1, 2, 2]
    assert gradients.layers == [0, 0, 1, 1, 2, 2]


def test_what_finds_no_room_is_asked_for_again() -> None:
    itinerary, records, values, _ = follow([need(step) for step in range(5)], room=1)
    itinerary.bring(records)
    assert values.layers == [0]
    values.room = 1
    itinerary.bring(records)
    assert values.layers == [0, 1], "in order: nothing is left out"
    itinerary.passed("values", 2, PageRange(0, 1))
    values.room = 5
    itinerary.bring(records)
    assert values.layers == [0, 1, 3, 4]


def test_uses_that_nobody_foresaw_are_passed_over() -> None:
    itinerary, records, values, _ = follow([need(step) for step in range(6)])
    for kind, layer, page in (("values", 9, 0), ("values", 1, 5), ("gradients", 1, 0)):
        itinerary.passed(kind, layer, PageRange(page, page + 1))  # type: ignore[arg-type]
    itinerary.bring(records)
    assert values.layers == [0, 1, 2]


def test_uses_that_never_come_do_not_hold_up_the_others() -> None:
    itinerary, records, values, _ = follow([need(step) for step in range(9)])
    itinerary.passed("values", 4, PageRange(0, 1))
    itinerary.passed("values", 1, PageRange(0, 1))  # late: it lies behind
    itinerary.bring(records)
    assert values.layers == [5, 6]


def test_a_kind_that_stays_on_the_device_is_not_brought_and_not_asked_about() -> None:
    def never() -> Wanted:
        raise AssertionError("the host would wait for nothing")

    needs = [Need(0, "gradients", 0, PageRange(0, 1), never), need(1)]
    itinerary = Itinerary()
    itinerary.begin(needs)
    values = Keeper("values")
    itinerary.bring({"values": values})
    assert values.layers == [1]


def test_selected_pages_come_alone() -> None:
    itinerary, records, values, _ = follow([need(0, wanted=True), need(1)])
    itinerary.bring(records)
    assert [asked for *_, asked in values.calls] == [True, False]


def test_a_new_run_begins_from_the_start() -> None:
    itinerary, records, values, _ = follow([need(step) for step in range(6)])
    itinerary.passed("values", 5, PageRange(0, 1))
    itinerary.begin([need(step) for step in range(6)])
    itinerary.bring(records)
    assert values.layers == [0, 1, 2]


KINDS = st.sampled_from(["values", "gradients"])
NEEDS = st.lists(st.tuples(st.integers(0, 2), KINDS, st.integers(0, 3)), min_size=1, max_size=20)
EVENTS = st.lists(st.tuples(st.integers(0, 25), KINDS, st.integers(0, 4), st.integers(0, 3)), max_size=30)


@given(NEEDS, EVENTS)
def test_whatever_is_used_nothing_comes_twice_or_too_early(
    gaps: list[tuple[int, Kind, int]], events: list[tuple[int, Kind, int, int]]
) -> None:
    step, needs = 0, []
    for gap, kind, page in gaps:
        step += gap
        needs.append(need(step, kind, page))
    itinerary, records, values, gradients = follow(needs)
    allowed = {"values": values, "gradients": gradients}
    for layer, kind, page, room in events:
        before = itinerary._done
        itinerary.passed(kind, layer, PageRange(page, page + 1))
        assert itinerary._done >= before
        if itinerary._done > before:
            last = needs[itinerary._done - 1]
            assert (last.kind, last.layer, last.pages.first) == (kind, layer, page)
        for keeper in allowed.values():
            keeper.room, keeper.calls = room, []
        first = max(itinerary._brought, itinerary._done)
        itinerary.bring(records)
        done_step = needs[itinerary._done - 1].step if itinerary._done else 0
        brought = needs[first : itinerary._brought]
        assert all(n.step <= done_step + STEPS_AHEAD for n in brought)
        for keeper in allowed.values():
            assert keeper.layers == [n.layer for n in brought if n.kind == keeper.kind]
        if itinerary._brought < len(needs):
            following = needs[itinerary._brought]
            assert following.step > done_step + STEPS_AHEAD or allowed[following.kind].room == 0
