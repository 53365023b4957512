"""Outputs that are kept for the recompute: which chunks', how many bytes, and what they save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomb_accel.plan import Estimate, Job, estimate, read_shape
from oomb_accel.plan.memory import Memory, activation_bytes_per_token, estimate_memory
from oomb_accel.plan.sizes import GIB, mlp_output_bytes

M = 1 << 20
ATTENTION, MLP = 28 * 28 * (128 * 2 + 4), 28 * 2 * (3584 + 16)
"""Bytes per token of the 7B in bf16, r=16."""
DOWN, ADAPTER = 28 * 18944 * 3584, 28 * 16 * (18944 + 3584)
"""Numbers of the last products' weights and of their adapters."""


def job(tokens: int = M // 8, model: str = "qwen2.5-7b", **changes: Any) -> Job:
    return Job(model=read_shape(model), tokens=tokens, **changes)


def kept(found: Estimate) -> tuple[list[int], list[int]]:
    return list(found.memory.kept), list(found.memory.kept_mlp)


def test_all_outputs_where_there_is_room() -> None:
    """But those of the last chunk, whose graph holds them; MLP outputs are no part of a graph."""
    found = estimate(job())
    assert kept(found) == (list(range(15)),) * 2
    device = found.memory.device
    activations = 8192 * (activation_bytes_per_token(job()) - ATTENTION)
    assert device["activations of one chunk"] == activations
    assert device["kept attention outputs"] == 15 * 8192 * ATTENTION
    assert device["kept MLP outputs"] == 15 * 8192 * MLP
    assert found.as_dict()["kept_chunks"] == found.as_dict()["kept_mlp_chunks"] == 15
    again = estimate(job(keep_last_graph=False))
    assert kept(again) == (list(range(16)),) * 2
    single = estimate(job(8192))
    assert kept(single) == ([], [])


def test_the_size_of_a_number_counts() -> None:
    assert mlp_output_bytes(3584, 16, 2) * 28 == MLP
    wide = estimate(job(M // 32, weights_dtype="float32", compute_dtype="float32", lora_r=8)).memory
    assert wide.device["kept MLP outputs"] == 3 * 8192 * 28 * 4 * (3584 + 8)


def test_attention_outputs_come_first_and_the_latest_of_each() -> None:
    """From the least GPU with room for all attention outputs on, each chunk's MLP outputs more are kept when they
    fit. 6 % of a GPU are never planned for."""
    of = job(M // 4, page_grad_dtype="bfloat16")

    def on(memory_bytes: int, **changes: Any) -> Memory:
        return estimate_memory(replace(of, gpu=replace(of.gpu, memory_bytes=memory_bytes), **changes))

    low, high = 64 * GIB, of.gpu.memory_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(on(middle).kept) == 31 else (middle, high)
    assert on(low).kept == range(1, 31) and on(high).kept == range(31) and not on(high).kept_mlp
    for chunks in (1, 5):
        least = high + round(chunks * 8192 * MLP / 0.94)
        assert on(least + 2).kept_mlp == range(31 - chunks, 31)
        assert on(least - 2).kept_mlp == range(32 - chunks, 31) and on(least + 2).kept == range(31)
    short = on(low, keep_outputs=True)
    assert short.kept == range(31) and not short.kept_mlp


def test_what_the_setting_says() -> None:
    assert kept(estimate(job(keep_outputs=False))) == ([], [])
    assert kept(estimate(job(keep_outputs=True))) == kept(estimate(job()))


@pytest.mark.parametrize("changes", [{"lora_r": 0}, {"model": "qwen3-30b-a3b", "tokens": M // 32}], ids=str)
def test_no_mlp_outputs_without_fused_lora(changes: dict[str, Any]) -> None:
    """Of experts' products LoRA has none."""
    found = estimate(job(**changes))
    assert found.memory.kept and not found.memory.kept_mlp and found.memory.device["kept MLP outputs"] == 0


def test_zero_3_keeps_them_too() -> None:
    assert estimate(job(zero_stage=3, num_gpus=2)).memory.kept_mlp == range(15)


@pytest.mark.parametrize(("keep_outputs", "chunks"), [("auto", 0), (True, 31)])
def test_while_pages_leave_there_is_no_memory_to_spare(keep_outputs: Any, chunks: int) -> None:
    """Also where settings leave a part of the device alone, as the engine does it."""
    found = estimate(job(M // 4, keep_outputs=keep_outputs, page_grad_dtype="bfloat16", device_pages_bytes=4 * GIB))
    assert found.memory.plan.offloads
    assert (len(found.memory.kept), len(found.memory.kept_mlp)) == (chunks, 0)


@pytest.mark.parametrize(("base_dtype", "faster"), [("model", 1), ("float8", 1.65)])
def test_the_recompute_skips_the_last_product(base_dtype: Any, faster: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 operations for each number and token, at 650e12 a second; of base weights in 8 bits faster. Nothing else."""
    of = job(attention="sparse", page_grad_dtype="bfloat16", base_dtype=base_dtype)
    with_mlp = estimate(of)
    assert len(with_mlp.memory.kept_mlp) == 15
    monkeypatch.setattr("oomb_accel.plan.memory._can_keep_mlp", lambda job: False)
    without = estimate(of)
    assert without.memory.kept == with_mlp.memory.kept and not without.memory.kept_mlp
    gained = {part: seconds - with_mlp.time.parts[part] for part, seconds in without.time.parts.items()}
    seconds = 2 * 15 * 8192 * (DOWN / faster + ADAPTER) / 650e12
    assert gained.pop("linear layers") == pytest.approx(seconds)
    assert set(gained.values()) == {0.0}
