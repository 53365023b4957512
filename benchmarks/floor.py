"""The least time that the arithmetic of a step can take, and the operations that every floor is made of."""

from __future__ import annotations

from collections import Counter

from oomb_accel import OombConfig
from oomb_accel.bench import ceiling
from oomb_accel.bench.ceiling import Attention, Product, step_work
from oomb_accel.bench.figures import FLOOR_FLOPS_PER_SECOND
from oomb_accel.plan.shape import ModelShape

FLOAT8 = 2.0
"""How much faster products of 8-bit floats can be."""


def step_flops(
    shape: ModelShape, tokens: int, config: OombConfig, *, trains_all: bool = False
) -> Counter[tuple[str, bool]]:
    """Operations of a step on one document by part of `ceiling.PARTS`, attention's backward apart (True). They are
    those of bf16: in 8 bits two count as one.
    """
    found: Counter[tuple[str, bool]] = Counter()
    for part, call, times in step_work(shape, tokens, config, trains_all=trains_all):
        rate = FLOAT8 if isinstance(call, Product) and call.float8 else 1.0
        found[part, isinstance(call, Attention) and call.backward] += call.flops * times / rate  # type: ignore[assignment]
    return found


def floor_seconds(shape: ModelShape, tokens: int, config: OombConfig, *, trains_all: bool = False) -> float:
    """Floor of one step: matrix products of base weights and head, and attention, all at the rate of the former.

    With LoRA the adapters themselves are not counted. Outputs and head gradients are kept for all chunks, or with
    ``keep_outputs=False`` for none; those of products and of the head with adapters only.

    Args:
        config: of the peer one that recomputes everything, see `peer_config`.
        trains_all: add the gradients of all weights, each as large a product as its forward.
    """
    flops = step_flops(shape, tokens, config, trains_all=trains_all)
    weights = flops[ceiling.FORWARD, False] + 2 * shape.head_weights * (tokens - 1) if trains_all else 0.0
    return (sum(flops.values()) + weights) / FLOOR_FLOPS_PER_SECOND


def peer_config(tokens: int) -> OombConfig:
    """Settings of a step with the arithmetic of plain training with gradient checkpointing: one chunk, all of it run
    again."""
    return OombConfig(chunk_tokens=max(tokens, 128), keep_last_graph=False, keep_outputs=False)
