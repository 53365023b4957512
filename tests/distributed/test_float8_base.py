"""Frozen weights in 8 bits on two ranks: the same as in one process that runs the batches of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import Job, check_outcomes, steps_of, train, train_alone_in_chunks
from tests.harness.batches import documents_of
from tests.harness.tolerance import assert_same_values

pytestmark = needs_deepspeed

LENGTHS = (((120, 37), (12,)), ((9,), (100,)))
"""Of each rank in both steps: chunks on one, an ordinary step on the other."""


@pytest.mark.parametrize("engine", ["DDP", "ZeRO 2"])
def test_equals_one_process(engine: str, tmp_path: Path) -> None:
    """So do evaluations before and after training, which are no other function."""
    job = Job(
        steps=steps_of(*LENGTHS),
        stage=None if engine == "DDP" else 2,
        lora={},
        settings={"base_dtype": "float8"},
        evaluation=() if engine == "DDP" else (tuple(documents_of(90, seed=5)), tuple(documents_of(20, seed=6))),
    )
    outcomes, alone = run_ranks(train, job, folder=tmp_path), train_alone_in_chunks(job)
    check_outcomes(outcomes, alone, replace(job, evaluation=()))  # which would compare with the plain function
    assert max(outcomes[0].num_chunks) > 5
    for number, wanted in enumerate(alone.log_probs):
        got = [values for outcome in outcomes for values in outcome.log_probs[number]]
        for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert_same_values(ours, theirs, f"evaluation of document {index}")
