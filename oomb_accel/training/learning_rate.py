"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate_factor(
    step: int, *, kind: Literal["constant", "linear", "cosine"], warmup_steps: int, num_steps: int
) -> float:
    """Factor on the learning rate in optimizer step ``step``, counted from 0.

    It rises over ``warmup_steps``, the first step being above 0 already, and would reach 0 behind the last one.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    if kind == "constant":
        return 1.0
    return max(1.0 - done, 0.0) if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
