"""A training run that is killed at a moment: behind some seconds, or at one of its changes to its folder."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from oomb_accel.training import loop
from tests.training.ranks_train import Settings, recipe_of

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def train_and_count(rank: int, settings: Settings) -> tuple[float, int]:
    """Train to the end. Returns seconds, and changes to the output folder."""
    changes = count_changes(Path(settings["output_dir"]), None)
    started = time.perf_counter()
    loop.train(recipe_of(settings))
    return time.perf_counter() - started, changes[0]


def train_and_be_killed(rank: int, settings: Settings, seconds: float | None, change: int | None) -> None:
    """Train, and be killed with SIGKILL behind ``seconds``, or just before a change to the folder."""
    if seconds is not None:
        kill_behind(seconds)
    count_changes(Path(settings["output_dir"]), change)
    loop.train(recipe_of(settings))


def count_changes(folder: Path, last: int | None) -> list[int]:
    """Count what Python does to a folder, from now on in this process.

    Args:
        last: the process is killed in place of this change, from 0.

    Returns: a list with the number so far.
    """
    counted = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not (int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            return
        if counted[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        counted[0] += 1

    sys.addaudithook(hook)
    return counted


def kill_behind(seconds: float) -> None:
    """Another process kills this one, wherever it is then."""
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        if os.getppid() == victim:
            os.kill(victim, signal.SIGKILL)
        os._exit(0)
