"""Case 13: full fine-tuning on two ranks, as case 12.

Memory per rank with ``oomb_accel.deepspeed.step`` is in ``tests/distributed/test_engine_step.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.test_case_12 import LIMIT_S, uneven_steps
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import Job, check_outcomes, train, train_alone

pytestmark = needs_deepspeed


@pytest.mark.parametrize("stage", [None, 1, 2, 3], ids=["ddp", "zero1", "zero2", "zero3"])
def test_two_ranks_train_as_one_process(stage: int | None, tmp_path: Path) -> None:
    job = Job(steps=uneven_steps(), stage=stage)
    check_outcomes(run_ranks(train, job, folder=tmp_path, timeout_s=LIMIT_S), train_alone(job), job)
