"""SelectionTally: means and counts of a step, and memory that does not grow with its chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from oomb_accel.selection_tally import HostCopy, SelectionTally
from oomb_kernels import PageLists

HEADS, GROUPS, DIM, TOKENS, PAGES = 4, 2, 8, 16, 6


def sample(tally: SelectionTally, seed: int) -> None:
    """The last queries of some chunk, two of six pages for each KV head."""
    generator = torch.Generator().manual_seed(seed)
    pages_GBK = torch.stack([torch.randperm(PAGES, generator=generator)[:2].sort().values for _ in range(GROUPS)])
    lists = PageLists(pages_GBK[:, None].int(), torch.full((GROUPS, 1), 2, dtype=torch.int32), TOKENS, PAGES)
    tally.sample(
        torch.randn(HEADS, TOKENS, DIM, generator=generator),
        3 * torch.randn(GROUPS, PAGES, DIM, generator=generator),
        lists,
        pooled_tokens=8,
        scale=DIM**-0.5,
        softcap=None,
    )


def mass_of(seed: int) -> float:
    alone = SelectionTally()
    sample(alone, seed)
    return float(alone.take()["selected_mass"])


@dataclass
class Copied:
    """An event of the device."""

    there: bool = False

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        assert self.there, "somebody waits"


def on_its_way(mass: float, event: Copied) -> HostCopy:
    copy = HostCopy(torch.tensor(mass))
    copy._copied = event  # type: ignore[assignment]
    return copy


def test_samples_that_are_there_are_not_kept() -> None:
    tally = SelectionTally()
    for step in range(2):
        seeds = range(50 * step, 50 * step + 50)
        for seed in seeds:
            sample(tally, seed)
            assert len(tally._masses) == 1
        wanted = [mass_of(seed) for seed in seeds]
        assert min(wanted) < 0.25 < 0.5 < max(wanted)
        assert tally.take() == {"selected_mass": pytest.approx(np.mean(wanted), rel=1e-6)}
    assert tally.take() == {}


def test_nobody_waits_for_samples_on_their_way() -> None:
    tally, late, early = SelectionTally(), Copied(), Copied(there=True)
    sample(tally, 0)
    tally._masses.append(on_its_way(0.5, late))
    tally._masses.append(on_its_way(0.125, early))
    sample(tally, 1)
    assert len(tally._masses) == 3  # behind the late one
    late.there = True
    sample(tally, 2)
    assert len(tally._masses) == 1
    tally._masses.append(on_its_way(9.0, Copied()))
    # Two layers of two KV heads, three lists each.
    pages = [[[[0, 1], [1, 5], [0, 1]], [[2, 3], [2, 3], [2, 3]]], [[[0, 1], [2, 3], [4, 5]], [[0, 1], [0, 2], [0, 3]]]]
    counts = torch.full((GROUPS, 3), 2, dtype=torch.int32)
    tally.count([PageLists(torch.tensor(layer, dtype=torch.int32), counts, TOKENS, PAGES) for layer in pages])
    wanted = np.mean([mass_of(0), 0.5, 0.125, mass_of(1), mass_of(2)])
    assert tally.take() == {
        "pages_selected": (3 + 2 + 6 + 4) / 4,
        "pages_selected_most": 6,
        "distinct_share": 15 / 24,
        "selected_mass": pytest.approx(wanted, rel=1e-6),
    }
    assert tally.take() == {}
