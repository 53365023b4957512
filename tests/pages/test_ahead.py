"""Itinerary: what comes next is brought, not more than two steps ahead, whatever is used in between."""

from __future__ import annotations

from collections.abc import Iterable
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
    batches: list[int] = field(default_factory=list)
    """Uses of each call."""
    room: int = 1000

    def expect(self, layer: int, uses: Iterable[tuple[PageRange, Wanted | None]]) -> int:
        count = 0
        for pages, wanted in uses:
            if self.room == 0:
                break
            self.room, count = self.room - 1, count + 1
            self.calls.append((self.kind, layer, pages, wanted is not None))
        self.batches.append(count)
        return count

    def forget_expected(self) -> None:
        self.calls.clear()

    @property
    def layers(self) -> list[int]:
        return [layer for _, layer, _, _ in self.calls]


def need(step: int, kind: Kind = "values", page: int = 0, wanted: bool = False) -> Need:
    """A use of one page in the layer that has the step's number."""
    return Need(step, kind, step, PageRange(page, page + 1), (lambda: np.zeros(1, np.int64)) if wanted else None)


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
    assert (values.batches, gradients.batches) == ([2, 2], [2, 2, 2]), "those of a step at once"


def test_a_step_that_is_partly_done_or_partly_brought() -> None:
    needs = [need(step, "values", page) for step in range(4) for page in range(3)]
    itinerary, records, values, _ = follow(needs, room=3)
    itinerary.passed("values", 0, PageRange(0, 1))
    itinerary.bring(records)
    assert [(layer, pages.first) for _, layer, pages, _ in values.calls] == [(0, 1), (0, 2), (1, 0)]
    values.room, values.calls = 2, []
    itinerary.bring(records)
    assert [(layer, pages.first) for _, layer, pages, _ in values.calls] == [(1, 1), (1, 2)]


def test_a_kind_without_room_does_not_hold_up_the_other() -> None:
    itinerary, records, values, gradients = follow([need(0), need(0, "gradients"), need(1), need(1, "gradients")])
    values.room = 0
    itinerary.bring(records)
    assert (values.layers, gradients.layers) == ([], [0, 1])
    values.room = 1
    itinerary.passed("gradients", 0, PageRange(0, 1))
    itinerary.bring(records)
    assert (values.layers, gradients.layers) == ([1], [0, 1])


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
    allowed: dict[Kind, Keeper] = {"values": values, "gradients": gradients}
    for layer, passed, page, room in events:
        before = itinerary._done
        itinerary.passed(passed, layer, PageRange(page, page + 1))
        assert itinerary._done >= before
        if itinerary._done > before:
            last = needs[itinerary._done - 1]
            assert (last.kind, last.layer, last.pages.first) == (passed, layer, page)
        for keeper in allowed.values():
            keeper.room, keeper.calls = room, []
        first = {kind: max(itinerary._brought.get(kind, 0), behind(needs, kind, itinerary._done)) for kind in allowed}
        itinerary.bring(records)
        done_step = needs[itinerary._done - 1].step if itinerary._done else 0
        for kind, keeper in allowed.items():
            of_kind, end = [n for n in needs if n.kind == kind], itinerary._brought.get(kind, 0)
            brought = of_kind[first[kind] : end]
            assert all(n.step <= done_step + STEPS_AHEAD for n in brought)
            assert keeper.layers == [n.layer for n in brought]
            if end < len(of_kind):
                assert of_kind[end].step > done_step + STEPS_AHEAD or keeper.room == 0


def behind(needs: list[Need], kind: Kind, done: int) -> int:
    """Needs of this kind that lie behind."""
    return sum(n.kind == kind for n in needs[:done])
