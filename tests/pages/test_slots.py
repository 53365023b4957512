"""SlotQueue: a slot has one owner, and what must pass before it is written travels with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomb_accel.pages.slots import SlotQueue

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=80)
"""Take or give, and how many."""


@given(st.integers(0, 12), STEPS, st.randoms(use_true_random=False))
def test_a_slot_is_never_given_out_twice_and_its_marks_travel_with_it(num_slots: int, steps, random) -> None:  # type: ignore[no-untyped-def]
    queue = SlotQueue(num_slots)
    held: set[int] = set()
    behind: dict[int, set[str]] = {slot: set() for slot in range(num_slots)}
    for number, (take, size) in enumerate(steps):
        if take:
            count = min(size, len(queue))
            slots, marks = queue.take(count)
            assert slots.dtype == np.int32 and len(slots) == count == len(set(slots.tolist()))
            assert not held & set(slots.tolist())
            for slot in slots.tolist():
                assert behind[slot] <= set(marks), "a mark was lost"
            assert set(marks) <= set().union(*(behind[slot] for slot in slots.tolist()), set()), "a mark of others"
            held |= set(slots.tolist())
        elif held:
            given = random.sample(sorted(held), min(size, len(held)))
            new = {f"{number}", f"{number}+"}
            queue.give(np.array(given, np.int32), sorted(new))
            held -= set(given)
            behind |= dict.fromkeys(given, new)
        assert len(queue) == num_slots - len(held)
    slots, _ = queue.take(len(queue))
    assert sorted([*slots.tolist(), *held]) == list(range(num_slots))


def test_the_oldest_come_first() -> None:
    queue = SlotQueue(4)
    first, marks = queue.take(3)
    assert first.tolist() == [0, 1, 2] and marks == []
    queue.give(first[1:], ("a",))
    queue.give(first[:1], iter(("b", "c")))
    assert [(slots.tolist(), marks) for slots, marks in (queue.take(2), queue.take(1), queue.take(1))] == [
        ([3, 1], ["a"]),
        ([2], ["a"]),
        ([0], ["b", "c"]),
    ]


def test_more_than_there_are_is_a_defect_of_the_caller() -> None:
    queue = SlotQueue(2)
    with pytest.raises(AssertionError, match="3 slots wanted, 2 are free"):
        queue.take(3)
    assert len(queue) == 2 and queue.take(0)[0].size == 0
