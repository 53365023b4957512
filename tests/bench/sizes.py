"""Sizes and made-up times for benchmarks on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from oomb_accel.bench.attention import AttentionSizes
from oomb_accel.bench.timing import Task

CPU = torch.device("cpu")
TINY = AttentionSizes(
    head_dim=16,
    num_groups=2,
    group=2,
    chunk_tokens=128,
    page_tokens=16,
    block_tokens=64,
    top_k=(1, 3),
    past=(64, 96),
    dtype=torch.float32,
    span_tokens=32,
)
TIMES = {
    **{"forward": 2.0, "forward alone": 2.125, "backward float32": 10.0, "backward bfloat16": 8.0},
    **{"index": 0.5, "selection": 0.25, "dense forward": 1.0, "dense backward": 2.0},
}


def made_up(tasks: Mapping[str, Task]) -> dict[str, float]:
    """Runs every task once, as a real measure would, and answers with fixed times."""
    for task in tasks.values():
        task.run(task.prepare())
    return {name: TIMES[name] for name in tasks}
