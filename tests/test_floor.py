"""Floors of benchmark rows: against numbers counted by hand, and against the profile's, which have the same counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import step_parts
from benchmarks.floor import floor_seconds, peer_config
from benchmarks.step_parts import ATTENTION_BACKWARD_FLOPS, ATTENTION_FORWARD_FLOPS, floors
from oomb_accel import OombConfig
from oomb_accel.bench.figures import FLOOR_FLOPS_PER_SECOND
from oomb_accel.bench.models import SHAPES
from oomb_accel.plan.shape import shape_of

QWEN = shape_of(SHAPES["qwen2.5-7b"], "qwen2.5-7b")
SPARSE = OombConfig(chunk_tokens=8192, attention="sparse", top_k=16, keep_outputs=False)
BASE = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
ENDS = 28 * 3584 * (18944 + 3584)
"""Weights of the last products of MLPs and of attention."""
HEAD = 152064 * 3584
PAIR = 4 * 3584 * 28
"""Operations of attention for a query and a key, in all layers."""
TOKENS, CHUNK = 65536, 8192


def test_floor_of_a_sparse_step() -> None:
    """Eight chunks; the first has no pages to select, the last one's graph is kept."""
    products = 2.0 * BASE * (3 * TOKENS - CHUNK) + 2.0 * HEAD * (3 * (TOKENS - 1) - CHUNK + 1)
    pairs = CHUNK * ((CHUNK + 1) / 2 * (8 + 7 + 8 * 2.5) + (1 + 4 + 16) * 128 * (7 + 6 + 7 * 2.5))
    assert floor_seconds(QWEN, TOKENS, SPARSE) == pytest.approx((products + PAIR * pairs) / 700e12, rel=1e-6)


@pytest.mark.parametrize(("kept", "attended", "skipped"), [(False, 3.5 + (7 / 8) ** 2, 0), ("auto", 3.5, 7 / 8)])
def test_floor_of_a_dense_step(kept: Any, attended: float, skipped: float) -> None:
    """Where outputs are kept, the last products of MLPs and attention and the head run again as little as attention."""
    found = floor_seconds(QWEN, TOKENS, OombConfig(chunk_tokens=CHUNK, keep_outputs=kept))
    products = (BASE + HEAD) * (3 - 1 / 8) - (ENDS + HEAD) * skipped
    least = (2.0 * products * TOKENS + PAIR * TOKENS**2 / 2 * attended) / 700e12
    assert found == pytest.approx(least, rel=1e-4)


def test_the_peer_runs_everything_again() -> None:
    for tokens in (100, 300, TOKENS):
        least = (2.0 * (BASE + HEAD) * 3 * tokens + PAIR * tokens * (tokens + 1) / 2 * 4.5) / 700e12
        assert floor_seconds(QWEN, tokens, peer_config(tokens)) == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize(("kept", "again"), [(False, 0), ("auto", 7 / 8)])
def test_gradients_of_all_weights_are_another_forward(kept: Any, again: float) -> None:
    """And neither outputs of products nor gradients of the head are kept."""
    config = OombConfig(chunk_tokens=CHUNK, keep_outputs=kept)
    more = floor_seconds(QWEN, TOKENS, config, trains_all=True) - floor_seconds(QWEN, TOKENS, config)
    assert more == pytest.approx(2 * (BASE + HEAD + (ENDS + HEAD) * again) * TOKENS / 700e12, rel=1e-4)


def test_base_products_in_8_bits_take_half_the_time() -> None:
    """And nothing else does."""
    plain, float8 = (
        floors(QWEN, TOKENS, dataclasses.replace(SPARSE, base_dtype=dtype), 16) for dtype in ("model", "float8")
    )
    assert float8.pop(step_parts.BASE) == pytest.approx(plain.pop(step_parts.BASE) / 2)
    assert float8 == pytest.approx(plain)


def test_parts_that_outputs_do_not_save() -> None:
    """Kept, they save attention, the last products of it and of MLPs with their adapters, and the head with the loss,
    for seven chunks of eight."""
    without, kept = (
        floors(QWEN, TOKENS, dataclasses.replace(SPARSE, keep_outputs=keep), 16) for keep in (False, "auto")
    )
    saved = {part: seconds - kept[part] for part, seconds in without.items() if seconds != pytest.approx(kept[part])}
    assert saved.pop(step_parts.BASE) == pytest.approx(2 * ENDS * TOKENS * 7 / 8 / 700e12)
    assert saved.pop(step_parts.LORA) == pytest.approx(2 * 28 * 16 * (3 * 3584 + 18944) * TOKENS * 7 / 8 / 700e12)
    assert saved.pop(step_parts.HEAD) == pytest.approx(2 * HEAD * TOKENS * 7 / 8 / 700e12, rel=1e-4)
    assert saved.pop(step_parts.LOSS) == pytest.approx(2 * 152064 * TOKENS * 7 / 8 / step_parts.MEMORY_BYTES)
    assert set(saved) == {step_parts.LOCAL_FORWARD, step_parts.SELECTED_FORWARD}


@pytest.mark.parametrize("base_dtype", ["model", "float8"])
def test_the_profile_counts_the_same_operations(base_dtype: Any) -> None:
    config = dataclasses.replace(SPARSE, base_dtype=base_dtype)
    parts = floors(QWEN, TOKENS, config, 16)
    flops = (parts[step_parts.BASE] + parts[step_parts.HEAD]) * FLOOR_FLOPS_PER_SECOND
    flops += (parts[step_parts.LOCAL_FORWARD] + parts[step_parts.SELECTED_FORWARD]) * ATTENTION_FORWARD_FLOPS
    backward = (step_parts.LOCAL_BACKWARD, step_parts.SELECTED_DQ, step_parts.SELECTED_DKV)
    flops += sum(parts[part] for part in backward) * ATTENTION_BACKWARD_FLOPS
    assert floor_seconds(QWEN, TOKENS, config) == pytest.approx(flops / FLOOR_FLOPS_PER_SECOND)
