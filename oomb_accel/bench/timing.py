"""Times of several tasks, measured in turns so that clocks and temperature are the same for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

_FLUSH_BYTES = 256 * 1024**2
_FLUSHES = 16
"""About a millisecond on an H200: longer than the host takes to queue any of the tasks."""
_WARM_UP_TURNS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """Something to be timed."""

    run: Callable[[Any], object]
    """Queues the work; gets what ``prepare`` returned."""
    prepare: Callable[[], Any] = lambda: None
    """Queues what has to come first and is not timed, before every run."""


Measure: TypeAlias = Callable[[Mapping[str, Task]], dict[str, float]]
"""Milliseconds of each task by its name."""


def device_times(device: torch.device, repeats: int) -> Measure:
    """A measure by CUDA events: medians of ``repeats`` turns, in each of which every task runs once.

    Between the tasks a buffer is overwritten: caches are cold as in training, and the host gets ahead of the device,
    so that a task of many small launches is not charged for the host.
    """

    def measure(tasks: Mapping[str, Task]) -> dict[str, float]:
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)  # not before: the memory of steps is told
        times: dict[str, list[float]] = {name: [] for name in tasks}
        for turn in range(_WARM_UP_TURNS + repeats):
            for name, task in tasks.items():
                prepared = task.prepare()
                for _ in range(_FLUSHES):
                    flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                task.run(prepared)
                end.record()
                end.synchronize()
                if turn >= _WARM_UP_TURNS:
                    times[name].append(start.elapsed_time(end))
        return {name: statistics.median(values) for name, values in times.items()}

    return measure


def host_times(repeats: int) -> Measure:
    """The same on the CPU, by the clock, after one turn to warm up."""

    def measure(tasks: Mapping[str, Task]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in tasks}
        for turn in range(1 + repeats):
            for name, task in tasks.items():
                prepared = task.prepare()
                start = time.perf_counter()
                task.run(prepared)
                if turn:
                    times[name].append((time.perf_counter() - start) * 1e3)
        return {name: statistics.median(values) for name, values in times.items()}

    return measure
