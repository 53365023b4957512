"""Means with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
BLOCK = 32
"""Consecutive tokens that are drawn together: losses of neighbours go together."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its 95 % interval."""

    value: float
    low: float
    high: float
    over: Literal["documents", "blocks of 32 tokens"]
    """What was drawn anew: an interval over the blocks of one document says nothing about other documents."""


def mean_of(losses: Sequence[NDArray[np.float64]], seed: int) -> Mean:
    """Mean over documents of their mean losses.

    Args:
        losses: of the scored tokens of each document; none is empty.
        seed: of the draws. The same one for two lists of like shape draws the same, so their intervals compare.
    """
    rng = np.random.default_rng([11, seed])
    if len(losses) > 1:
        means = np.array([values.mean() for values in losses])
        draws = means[rng.integers(0, len(means), (RESAMPLES, len(means)))].mean(axis=1)
        return Mean(float(means.mean()), *_middle(draws), "documents")
    (values,) = losses
    edges = range(0, len(values), BLOCK)
    sums = np.add.reduceat(values, edges)
    sizes = np.diff([*edges, len(values)])
    drawn = rng.integers(0, len(sums), (RESAMPLES, len(sums)))
    draws = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return Mean(float(values.mean()), *_middle(draws), "blocks of 32 tokens")


def _middle(draws: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)
