"""Tests on several real processes: ``run_ranks(function, *arguments, folder=tmp_path)``.

Importing torch, transformers and DeepSpeed takes longer than any of these tests, so a server process
(`tests.distributed.rank_server`) imports them once and forks the ranks of each call. What a test needs to know:

* ``function(rank, *arguments)`` is at the top level of a module (in a folder without ``__init__.py``). It runs once per
  rank in a process of its own, on the CPU with one thread. Arguments and results are pickled. Results come back as a
  list, one per rank.
* ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set, as by
  torchrun, with a port of its own for each call; ``environment`` adds to them. No process group is made:
  ``torch.distributed.init_process_group("gloo")``, ``deepspeed.initialize`` or ``Accelerator`` do that.
* When a rank raises, or the whole takes longer than ``timeout_s``, the others are killed and `RanksFailed` tells the
  end of each rank's output; in case of a timeout with the stack of every thread. All output is in
  ``folder/rank<N>.log``.
* DeepSpeed's shared-memory operator is off, because its build takes 95 s and it leaves 66 MiB per rank in /dev/shm.
* ``pytestmark = needs_deepspeed`` skips a file where DeepSpeed is not installed; in CI it has to be.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 40
START_S = 240.0
"""Seconds that the server may take to import everything on a machine that has other things to do."""

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None and os.environ.get("CI") != "true",
    reason="DeepSpeed is not installed",
)


class RanksFailed(AssertionError):
    """A rank raised, died or did not finish; the text has the end of each rank's output."""


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    ranks: int = 2,
    timeout_s: float = 90.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, *arguments)`` on several ranks; see the top of this file.

    Args:
        folder: for output, arguments and results; several calls may share it, one after another.
        environment: variables for all ranks of this call.

    Returns:
        What the function returned, by rank.

    Raises:
        RanksFailed: with the end of each rank's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        (folder / f"rank{rank}.result").unlink(missing_ok=True)
    torch.save(arguments, folder / "arguments")
    job = {
        "module": function.__module__,
        "function": function.__qualname__,
        "folder": str(folder),
        "ranks": ranks,
        "timeout_s": timeout_s,
        "environment": dict(environment or {}),
    }
    verdict = _server().ask(job)
    if verdict != "finished":
        raise RanksFailed(f"{function.__qualname__}: {verdict}\n" + "\n".join(_ends_of_logs(folder, ranks)))
    return [torch.load(folder / f"rank{rank}.result", weights_only=False) for rank in range(ranks)]


def _ends_of_logs(folder: Path, ranks: int) -> list[str]:
    ends = []
    for rank in range(ranks):
        lines = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        ends += [f"--- rank {rank}, last {LOG_LINES} of {len(lines)} lines", *lines[-LOG_LINES:]]
    return ends


class _Server:
    """The process that forks ranks; one for this process, started at its first use."""

    def __init__(self) -> None:
        # No GPU: forked processes could not use it, and these tests compare in fp32 on the CPU. Nothing that the test
        # that happens to be the first has set for itself.
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "OOMB_"))},
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more would be processes, started by an import
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.rank_server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer(START_S)
        atexit.register(self.close)

    def ask(self, job: dict[str, Any]) -> str:
        """Run a job and return its verdict."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer(job["timeout_s"] + 60)

    def _answer(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        guard = threading.Timer(timeout_s, self._process.kill)  # a second watchdog, should the first one hang
        guard.start()
        try:
            line = self._process.stdout.readline()
        except BaseException:  # an interrupted test must not leave its answer to the next one
            self._process.kill()
            raise
        finally:
            guard.cancel()
        if not line:
            raise RanksFailed(f"The server of ranks ended with status {self._process.wait()}; see its error output.")
        answer: str = json.loads(line)
        return answer

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks end with it


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers or not _servers[-1].running:
        _servers.append(_Server())
    return _servers[-1]
