"""Two ranks under DDP and ZeRO 0 to 3 train as one process does on the union of their data.

The grid is in `CASES`. CI runs a selection in which every pair of values occurs; the others are marked slow.
``python -m tests.distributed.table`` runs the whole grid and writes the table in ``docs/distributed.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple, dataclass
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import Job, Outcome, Step, check_outcomes, train, train_alone
from tests.harness.batches import documents_of, only_targets

pytestmark = needs_deepspeed

ENGINES = ("DDP", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3")
WEIGHTS = ("LoRA", "full")
ROWS = ("equal", "unequal", "empty rank", "masked rank")
EXTRAS = ("none", "accumulation", "clipping", "offload")

LENGTHS = {
    "equal": ((40, 33), (40, 33)),
    "unequal": ((100, 37), (12,)),
    "empty rank": ((50, 7), ()),
    "masked rank": ((35, 20), (70,)),
}
"""Lengths of the documents of each rank; ranks change places from one micro-batch to the next."""
NUM_STEPS = 2


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    engine: str
    weights: str
    rows: str
    extra: str

    def __str__(self) -> str:
        return "-".join(astuple(self)).replace(" ", "_")

    @property
    def exists(self) -> bool:
        """Offload of the optimizer belongs to ZeRO, from stage 1."""
        return self.extra != "offload" or self.engine in ENGINES[2:]

    def job(self) -> Job:
        return Job(
            steps=_steps(self.rows, 2 if self.extra == "accumulation" else 1),
            stage=None if self.engine == "DDP" else int(self.engine[-1]),
            lora={} if self.weights == "LoRA" else None,
            clip=0.5 if self.extra == "clipping" else 0.0,
            offload=self.extra == "offload",
            rate=2.0 if self.extra == "clipping" else 0.3,
        )


def _steps(rows: str, accumulation: int) -> tuple[Step, ...]:
    """Two steps of documents; every micro-batch has other documents, and the ranks change places."""
    steps = []
    for step in range(NUM_STEPS):
        micros = []
        for micro in range(accumulation):
            number = step * accumulation + micro
            ranks = [documents_of(*lengths, seed=2 * number + rank) for rank, lengths in enumerate(LENGTHS[rows])]
            if rows == "masked rank":
                ranks[1] = [only_targets(document, ()) for document in ranks[1]]
            if number % 2:
                ranks.reverse()
            micros.append(tuple(map(tuple, ranks)))
        steps.append(tuple(micros))
    return tuple(steps)


CASES = tuple(case for values in product(ENGINES, WEIGHTS, ROWS, EXTRAS) if (case := Case(*values)).exists)


def pairwise(cases: tuple[Case, ...]) -> list[Case]:
    """A selection in which every pair of values that occurs in the cases occurs, greedily."""

    def pairs(case: Case) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(astuple(case)), 2))

    uncovered = set().union(*map(pairs, cases))
    chosen = []
    while uncovered:
        best: Case = max(cases, key=lambda case: len(pairs(case) & uncovered))
        chosen.append(best)
        uncovered -= pairs(best)
    return chosen


QUICK = pairwise(CASES)


@functools.cache
def _alone(weights: str, rows: str, extra: str) -> Outcome:
    """The reference, which does not depend on the engine."""
    return train_alone(Case("DDP", weights, rows, "none" if extra == "offload" else extra).job())


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_equals_one_process_on_the_union(
    case: Case, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    outcomes = run_ranks(train, case.job(), folder=tmp_path)
    record_property("error", check_outcomes(outcomes, _alone(case.weights, case.rows, case.extra), case.job()))
    assert max(outcomes[0].num_chunks) > 1, "rank 0 ran everything in one piece"


def test_the_selection_has_every_pair() -> None:
    for first, second in combinations(range(4), 2):
        wanted = {(astuple(c)[first], astuple(c)[second]) for c in CASES}
        assert {(astuple(c)[first], astuple(c)[second]) for c in QUICK} == wanted
    assert len(QUICK) < len(CASES) / 4
