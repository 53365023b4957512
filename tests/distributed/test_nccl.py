"""The quick part of the matrix on two GPUs over NCCL, in fp32, against one process on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import ROOT, needs_deepspeed
from tests.distributed.test_zero_matrix import QUICK, Case
from tests.distributed.training import check_outcomes, train_alone

pytestmark = [
    needs_deepspeed,
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LIMIT_S = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have written, a file per case and rank."""
    path = tmp_path_factory.mktemp("nccl")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    try:
        subprocess.run(
            [*command, "-m", "tests.distributed.nccl_ranks", str(path)],
            cwd=ROOT,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"the ranks did not finish within {LIMIT_S} s")
    return path


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_two_gpus_equal_one_process_on_the_union(folder: Path, case: Case) -> None:
    files = [folder / f"{case}.rank{rank}" for rank in range(2)]
    assert all(file.is_file() for file in files), "a rank failed or hung; see the output of the first test"
    outcomes = [torch.load(file, weights_only=False) for file in files]
    check_outcomes(outcomes, train_alone(case.job()), case.job())
