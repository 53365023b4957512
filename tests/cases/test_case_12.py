"""Case 12: two ranks with LoRA under DDP and ZeRO 0 to 3, of which one has less to do, or nothing.

The same with accumulation, clipping and more is the grid of ``tests/distributed/test_zero_matrix.py``. LoRA on the
head, evaluation and loading under ZeRO 3 are in ``tests/distributed/test_zero_special.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import Job, Step, check_outcomes, steps_of, train, train_alone
from tests.harness.batches import documents_of, only_targets

pytestmark = needs_deepspeed

FIVE_CHUNKS, ONE_CHUNK, LIMIT_S = 80, 16, 60


def uneven_steps() -> tuple[Step, ...]:
    """Five chunks against one; a rank without a row; a rank whose labels are all masked."""
    masked = tuple(only_targets(document, ()) for document in documents_of(FIVE_CHUNKS, seed=99))
    uneven, no_row, other = steps_of(((FIVE_CHUNKS,), (ONE_CHUNK,)), ((), (FIVE_CHUNKS,)), ((ONE_CHUNK,), ()))
    return uneven, no_row, ((other[0][0], masked),)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(None, False), (0, False), (1, False), (2, False), (3, False), (2, True), (3, True)],
    ids=["ddp", "zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"],
)
def test_two_ranks_train_as_one_process(stage: int | None, offload: bool, tmp_path: Path) -> None:
    job = Job(steps=uneven_steps(), stage=stage, lora={}, offload=offload)
    check_outcomes(run_ranks(train, job, folder=tmp_path, timeout_s=LIMIT_S), train_alone(job), job)
