"""The cases of the matrix on two GPUs over NCCL: what `test_nccl.py` starts by torchrun, one process per GPU.

Starting a process with CUDA takes longer than a case, so one start runs them all. Each rank writes what it got for
each case; judging is left to the test.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.test_zero_matrix import QUICK
from tests.distributed.training import train


def main(folder: Path) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for case in QUICK:
        try:
            outcome = train(rank, case.job())
        except Exception:  # the next case may tell more; a rank that hangs is ended by the test's limit
            traceback.print_exc()
            continue
        torch.save(outcome, folder / f"{case}.rank{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
