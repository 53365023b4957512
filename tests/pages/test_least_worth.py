"""LeastWorth: what it finds among a few candidates is what a look at everything would find."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomb_accel.pages import Places, Worths, least_worth
from oomb_accel.pages.least_worth import LeastWorth, least
from oomb_accel.pages.table import NO_SLOT


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.5, 3.0, np.inf]), max_size=30), st.integers(1, 10))
def test_of_equal_ones_the_first_are_least(worths: list[float], count: int) -> None:
    chosen = np.flatnonzero(least(np.array(worths, np.float32), count)).tolist()
    assert chosen == sorted(sorted(range(len(worths)), key=lambda i: (worths[i], i))[:count])


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_worth, "_TIMES", 3)
    monkeypatch.setattr(least_worth, "_LEAST_CANDIDATES", 4)
    monkeypatch.setattr(least_worth, "_MOST_NOTED", 60)


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("ties", [False, True])
def test_nothing_that_is_worth_less_is_passed_over(ties: bool) -> None:
    """Records come, are used and leave, as in a sweep; every choice is compared with one among all."""
    random, known, asked = np.random.default_rng(ties), LeastWorth(), list[int]()
    worths: Worths = np.full(400, -1, np.float32)
    slots = np.full(400, NO_SLOT, np.int32)

    def worth(places: Places) -> Worths:
        asked.append(len(places))
        return worths[places]

    for number in range(300):
        used = np.unique(random.integers(0, 400, 12))
        slots[used] = 1
        worths[used] = random.integers(0, 6, len(used)) if ties else random.random(len(used))
        risen = random.integers(0, 400, 5)  # without a use a record can only be worth more
        worths[risen] += 1
        if number % 40:
            known.note(used)
        else:
            known.forget()  # nobody knew what was used
        count = int((slots != NO_SLOT).sum()) - 150
        if count > 0:
            found = known.find(count, slots, worth)
            everything = np.flatnonzero(slots != NO_SLOT)
            assert len(found) == count and (np.diff(found) > 0).all() and (slots[found] != NO_SLOT).all()
            assert sorted(worths[found]) == sorted(worths[everything])[:count]
            slots[found[random.random(count) < 0.8]] = NO_SLOT  # the others are expected, and stay
    assert np.median(asked) < 80 < max(asked), "few are looked at, as a rule"
