"""Imports everything that ranks need, then forks ranks for each line of JSON on its standard input.

Started by `tests.distributed.ranks`, which describes what a rank finds. One line of JSON is written for each job: the
text "finished", or what went wrong. Ends when its input is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.ports import free_port

GRACE_S = 3.0
"""Seconds for the other ranks to fail by themselves, with a text of their own, after the first one has."""
DUMP_S = 0.5
_PR_SET_PDEATHSIG = 1
_ALWAYS = ("accelerate", "peft", "transformers", "oomb_accel", "tests.harness.parity")
# What deepspeed.initialize imports late: a function there is compiled with torch.compile, and that takes seconds.
_DEEPSPEED = (
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    gc.disable()  # in this process: imports leave little to collect
    _import_everything()
    print(json.dumps("ready"), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(_run(json.loads(line), number)), file=answers, flush=True)


def _import_everything() -> None:
    for name in _ALWAYS:
        importlib.import_module(name)
    if importlib.util.find_spec("deepspeed") is not None:
        for name in _DEEPSPEED:
            importlib.import_module(name)
        operators = importlib.import_module("deepspeed.ops")
        operators.__compatible_ops__["deepspeed_shm_comm"] = False
    transformers = importlib.import_module("transformers")
    for name in ("AutoModelForCausalLM", "Qwen2ForCausalLM", "Trainer"):
        getattr(transformers, name)  # imported at first use
    torch.set_num_threads(1)
    assert threading.active_count() == 1, "forked processes would lack the other threads"


def _import_before_the_fork(module: str) -> None:
    """Import the module of a job once, not in every rank of every job. If that fails, it fails in the ranks too."""
    if module in sys.modules:
        return
    with contextlib.suppress(Exception):
        importlib.import_module(module)
    assert threading.active_count() == 1, f"{module} starts a thread when it is imported, and ranks would lack it"


def _run(job: dict[str, Any], number: int) -> str:
    _import_before_the_fork(job["module"])
    # A rank's garbage collector leaves frozen objects alone: no time is spent on them, and their memory stays shared.
    gc.freeze()
    environment = {
        **job["environment"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port(20000 + (os.getpid() * 37 + number) % 10000)),  # another one for each job
        "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_WORLD_SIZE": str(job["ranks"]),
        "LOCAL_SIZE": str(job["ranks"]),  # keeps DeepSpeed from looking for numactl
    }
    running: dict[int, int] = {}
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, job, environment)
        running[pid] = rank
    deadline, failed = time.monotonic() + job["timeout_s"], ""
    while running and time.monotonic() < deadline:
        for pid, rank, status in _ended(running):
            if status and not failed:
                failed = f"rank {rank} {_spell(status)}"
                deadline = min(deadline, time.monotonic() + GRACE_S)
            del running[pid]
        time.sleep(0.01)
    if running:
        failed = failed or f"rank {_names(running)} did not finish within {job['timeout_s']:g} s"
        _kill(running)
    return failed or "finished"


def _be_rank(rank: int, job: dict[str, Any], environment: dict[str, str]) -> None:
    """What a forked process does. It never returns: gloo's destructors may wait for each other."""
    status = 1
    try:
        gc.enable()
        # Torch makes its thread pool anew at the first call behind a fork, and two threads that call it at one time may
        # find none ("Invalid thread pool!"): transformers loads weights by several.
        torch.set_num_threads(1)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the server
        folder = Path(job["folder"])
        log = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(all_threads=True)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        function = getattr(importlib.import_module(job["module"]), job["function"])
        arguments = torch.load(folder / "arguments", weights_only=False)
        result = function(rank, *arguments)
        torch.save(result, folder / f"rank{rank}.result")
        if dist.is_initialized():
            dist.barrier()  # rank 0 holds the store that the others may still ask
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(running: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    for pid, rank in list(running.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            yield pid, rank, status


def _kill(running: dict[int, int]) -> None:
    for pid in running:
        os.kill(pid, signal.SIGUSR1)  # writes the stacks
    time.sleep(DUMP_S)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _spell(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.WEXITSTATUS(status)}"


def _names(running: dict[int, int]) -> str:
    return " and ".join(str(rank) for rank in sorted(running.values()))


if __name__ == "__main__":
    main()
