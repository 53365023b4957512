"""The harness itself: results come back, and failures and hangs end with a text that says where."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RanksFailed, run_ranks


def _sum_of_ranks(rank: int, start: int) -> dict[str, object]:
    dist.init_process_group("gloo")
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return {"total": total, "greeting": os.environ["GREETING"], "threads": torch.get_num_threads()}


def _one_raises(rank: int) -> None:
    dist.init_process_group("gloo")
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def _one_hangs(rank: int) -> None:
    if rank == 0:
        _sleep_for_ever()


def _sleep_for_ever() -> None:
    time.sleep(3600)


def _one_dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), 9)


def test_results_come_back(tmp_path: Path) -> None:
    for start in (10, 20):
        results = run_ranks(_sum_of_ranks, start, folder=tmp_path, ranks=3, environment={"GREETING": "hello"})
        assert [r["total"].item() for r in results] == [3 * start + 3] * 3
        assert [(r["greeting"], r["threads"]) for r in results] == [("hello", 1)] * 3


def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 ended with status 1.*rank one has had enough"):
        run_ranks(_one_raises, folder=tmp_path)
    assert time.monotonic() - start < 60


def test_a_hang_is_killed_and_shown(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 did not finish within 2 s.*_sleep_for_ever"):
        run_ranks(_one_hangs, folder=tmp_path, timeout_s=2)


def test_a_killed_rank_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 was ended by SIGKILL"):
        run_ranks(_one_dies, folder=tmp_path)
