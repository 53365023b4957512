"""What is kept for the recompute: which chunks', how many bytes, and what it saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomb_accel.plan import Estimate, Job, estimate, read_shape
from oomb_accel.plan import kept as kept_module
from oomb_accel.plan.kept import KeptResults, block_ends
from oomb_accel.plan.memory import activation_bytes_per_token, estimate_memory
from oomb_accel.plan.sizes import GIB, head_gradient_bytes, kept_product_bytes

M = 1 << 20
ATTENTION, PRODUCT = 28 * 28 * (128 * 2 + 4), 28 * 2 * (3584 + 16)
"""Bytes per token of the 7B in bf16, r=16: of attention outputs, and of outputs of a product that ends MLPs, or
attention."""
HEAD = 3584 * 2 + 4
"""Bytes per target."""
ENDS = {"mlp": (28 * 18944 * 3584, 28 * 16 * (18944 + 3584)), "o_proj": (28 * 3584 * 3584, 28 * 16 * 2 * 3584)}
"""Numbers of these products' weights and of their adapters."""


def job(tokens: int = M // 8, model: str = "qwen2.5-7b", **changes: Any) -> Job:
    return Job(model=read_shape(model), tokens=tokens, **changes)


def kept(found: Estimate) -> list[list[int]]:
    """Head gradients, attention outputs, outputs of MLPs and of attention's last product."""
    return [list(of_kind.chunks) for of_kind in found.memory.kept]


def without_end(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """From here on no such product is kept."""
    monkeypatch.setattr(kept_module, "block_ends", lambda job: {k: v for k, v in block_ends(job).items() if k != kind})


def test_all_where_there_is_room() -> None:
    """But not of the last chunk, whose graph holds its outputs, and whose own head gradient is made with it."""
    found = estimate(job(M // 16))
    assert kept(found) == [list(range(7))] * 4
    device = found.memory.device
    assert device["kept head gradients"] == 7 * 8192 * HEAD
    assert device["kept attention outputs"] == 7 * 8192 * ATTENTION
    assert device["kept MLP outputs"] == device["kept o_proj outputs"] == 7 * 8192 * PRODUCT
    counts = {found.as_dict()[f"kept_{what}chunks"] for what in ("", "mlp_", "o_proj_", "head_")}
    assert counts == {7}
    again = estimate(job(M // 16, keep_last_graph=False))
    assert kept(again) == [list(range(8))] * 4
    assert again.memory.device["kept head gradients"] == (M // 16 - 1) * HEAD, "the last token is no target"
    single = estimate(job(8192))
    assert kept(single) == [[]] * 4


def test_chunks_that_run_again_without_the_head_have_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the last chunk is the worst moment, which makes its own attention outputs. One that needs the head is enough
    to have them."""
    of = job(offload=False)
    graph, logits = 8192 * activation_bytes_per_token(of), 8192 * 152064 * 2

    def worst(of: Job) -> tuple[int, int]:
        device = estimate_memory(of).device
        return device["activations of one chunk"], device["logits of one chunk"]

    assert worst(of) == (graph, 0)
    smaller = [replace(of, gpu=replace(of.gpu, memory_bytes=n * GIB // 2)) for n in range(120, 240)]
    few = next(of for of in smaller if estimate_memory(of).kept.head.chunks)
    assert len(estimate_memory(few).kept.head.chunks) < 15 and worst(few) == (graph, logits)
    monkeypatch.setattr("oomb_accel.plan.kept._can_keep_head", lambda job: False)
    assert worst(of) == (graph - 8192 * ATTENTION, logits)


def test_the_size_of_a_number_counts() -> None:
    assert kept_product_bytes(3584, 16, 2) * 28 == PRODUCT and head_gradient_bytes(3584, 2) == HEAD
    wide = estimate(job(M // 32, weights_dtype="float32", compute_dtype="float32", lora_r=8)).memory
    assert wide.device["kept MLP outputs"] == 3 * 8192 * 28 * 4 * (3584 + 8)
    assert wide.device["kept head gradients"] == 3 * 8192 * (4 * 3584 + 4)


def test_head_gradients_come_first_then_attention_outputs_and_the_latest_of_each() -> None:
    """From the least GPU with room for all attention outputs on, each chunk's MLP outputs more are kept when they
    fit, and behind all of them those of attention's last product. 6 % of a GPU are never planned for."""
    of = job(M // 4, page_grad_dtype="bfloat16", host_bytes=2 * GIB)

    def on(memory_bytes: int, **changes: Any) -> KeptResults:
        return estimate_memory(replace(of, gpu=replace(of.gpu, memory_bytes=memory_bytes), **changes)).kept

    low, high = 64 * GIB, of.gpu.memory_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(on(middle).attention.chunks) == 31 else (middle, high)
    assert on(low).attention.chunks == range(1, 31) and on(low).head.chunks == range(31)
    assert on(high).attention.chunks == range(31) and not on(high).mlp.chunks
    for chunks in (1, 5):
        least = high + round(chunks * 8192 * PRODUCT / 0.94)
        assert on(least + 2).mlp.chunks == range(31 - chunks, 31)
        assert on(least - 2).mlp.chunks == range(32 - chunks, 31) and on(least + 2).attention.chunks == range(31)
        assert not on(least + 2).o_proj.chunks
        least = high + round((31 + chunks) * 8192 * PRODUCT / 0.94)
        assert on(least + 2).o_proj.chunks == range(31 - chunks, 31) and on(least + 2).mlp.chunks == range(31)
        assert on(least - 2).o_proj.chunks == range(32 - chunks, 31)
        least = high - round((31 * 8192 * ATTENTION + (31 - chunks) * 8192 * HEAD) / 0.94)
        assert on(least + 2).head.chunks == range(31 - chunks, 31) and not on(least + 2).attention.chunks
        assert on(least - 2).head.chunks == range(32 - chunks, 31)
        asked = high - round((31 - chunks) * 8192 * HEAD / 0.94)
        assert on(asked + 2, keep_outputs=True).head.chunks == range(31 - chunks, 31)
        assert on(asked - 2, keep_outputs=True).head.chunks == range(32 - chunks, 31)
        at_once = on(asked, keep_outputs=True)
        assert at_once.attention.chunks == range(31) and not at_once.mlp.chunks
    whole = on(high + round(8192 * PRODUCT / 0.94) + 2, keep_outputs=True)
    assert (whole.head.chunks, whole.mlp.chunks) == (range(31), range(30, 31))


def test_what_the_setting_says() -> None:
    assert kept(estimate(job(keep_outputs=False))) == [[]] * 4
    assert kept(estimate(job(keep_outputs=True))) == kept(estimate(job()))


@pytest.mark.parametrize(
    ("changes", "rest"), [({"lora_r": 0}, False), ({"model": "qwen3-30b-a3b", "tokens": M // 32}, True)], ids=str
)
def test_no_mlp_outputs_without_fused_lora(changes: dict[str, Any], rest: bool) -> None:
    """Of experts' products LoRA has none; their attention has one, and their head is frozen all the same."""
    memory = estimate(job(**changes)).memory
    kept, device = memory.kept, memory.device
    assert kept.attention.chunks and not kept.mlp.chunks and device["kept MLP outputs"] == 0
    assert bool(kept.head.chunks) == rest == bool(device["kept head gradients"])
    assert bool(kept.o_proj.chunks) == rest == bool(device["kept o_proj outputs"])


def test_attention_may_be_wider_than_the_model() -> None:
    """Of Qwen3-30B-A3B: 32 heads of 128 for 2,048 numbers. What is kept is as wide as the model."""
    found = estimate(job(M // 32, "qwen3-30b-a3b"))
    assert block_ends(found.job) == {"o_proj": 4096}
    assert found.memory.device["kept o_proj outputs"] == 3 * 8192 * 48 * 2 * (2048 + 16)


@pytest.mark.parametrize(("stage", "heads"), [(2, 7), (3, 0)])
def test_zero_3_keeps_outputs_but_no_head_gradients(stage: int, heads: int) -> None:
    found = estimate(job(M // 16, zero_stage=stage, num_gpus=2))
    assert [len(of_kind) for of_kind in kept(found)] == [heads, 7, 7, 7]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("keep_outputs", "chunks"), [("auto", 0), (True, 31)])
def test_while_pages_leave_only_the_host_has_memory_to_spare(keep_outputs: Any, chunks: int, sparse: bool) -> None:
    """Also where settings leave a part of the device alone, as the engine does it."""
    of = job(M // 4, keep_outputs=keep_outputs, page_grad_dtype="bfloat16", device_pages_bytes=4 * GIB)
    found = estimate(replace(of, attention="sparse") if sparse else of)
    assert found.memory.plan.offloads
    assert [len(places.on_device) for places in found.memory.kept] == [0, chunks, 0, 0]
    assert any(places.on_host for places in found.memory.kept)


def test_results_on_the_host_leave_pages_their_room_there() -> None:
    """A step fits with and without, and does not get longer by them."""
    for gib in (48, 64, 96, 256):
        of = job(M // 2, page_grad_dtype="bfloat16", host_bytes=gib * GIB, device_pages_bytes=24 * GIB)
        found, without = estimate(of), estimate(replace(of, keep_outputs=False))
        pages = found.memory.pinned["K, V and page gradients"]
        assert found.fits and without.memory.plan.offloads
        assert 0 <= pages - without.memory.pinned["K, V and page gradients"] < 2 * GIB
        half = (gib - min(gib / 16, 4) - 2) / 2 * GIB
        assert found.memory.pinned["kept outputs"] <= max(0, half - found.memory.plan.host_bytes)
        assert bool(found.memory.pinned["kept outputs"]) == (gib > 64)
        assert found.time.seconds <= without.time.seconds


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize(("base_dtype", "faster"), [("model", 1), ("float8", 1.65)])
def test_the_recompute_skips_the_last_product(
    base_dtype: Any, faster: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 operations for each number and token, at 690e12 a second; of base weights in 8 bits faster. Nothing else."""
    of = job(M // 16, attention="sparse", page_grad_dtype="bfloat16", base_dtype=base_dtype)
    everything = estimate(of)
    assert kept(everything) == [list(range(7))] * 4
    without_end(monkeypatch, kind)
    without = estimate(of)
    skips = [7, 7, 0, 7] if kind == "mlp" else [7, 7, 7, 0]
    assert [len(of_kind) for of_kind in kept(without)] == skips
    gained = {part: seconds - everything.time.parts[part] for part, seconds in without.time.parts.items()}
    weights, adapter = ENDS[kind]
    seconds = 2 * 7 * 8192 * (weights / faster + adapter) / 690e12
    assert gained.pop("linear layers") == pytest.approx(seconds)
    assert set(gained.values()) == {0.0}


def test_the_recompute_skips_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three products, of the targets of the chunks that are kept; in bf16 whatever the base is in."""
    of = job(attention="sparse", page_grad_dtype="bfloat16", base_dtype="float8", keep_last_graph=False)
    with_head = estimate(of)
    assert with_head.memory.kept.head.chunks == range(16)
    monkeypatch.setattr("oomb_accel.plan.kept._can_keep_head", lambda job: False)
    without = estimate(of)
    assert not without.memory.kept.head.chunks and without.memory.kept.mlp.chunks == with_head.memory.kept.mlp.chunks
    gained = {part: seconds - with_head.time.parts[part] for part, seconds in without.time.parts.items()}
    assert gained.pop("linear layers") == pytest.approx(2 * (M // 8 - 1) * 152064 * 3584 / 690e12)
    assert set(gained.values()) == {0.0}


def test_outputs_that_are_wanted_have_their_room_before_pages() -> None:
    """As in the engine: pages that have no room beside them go to the host, unless settings say otherwise."""
    of = job(300 * 1024, keep_outputs=True)
    asked, auto = estimate(of), estimate(replace(of, keep_outputs="auto"))
    assert asked.fits and asked.memory.plan.offloads and not auto.memory.plan.offloads
    assert [len(places.on_device) for places in asked.memory.kept] == [0, 37, 0, 0]
    assert asked.memory.device_bytes <= 0.94 * of.gpu.memory_bytes
    assert asked.memory.pinned["K, V and page gradients"] > 0
    assert not estimate(replace(of, offload=False)).fits
    assert estimate(replace(of, device_pages_bytes=8 * GIB)).memory.plan.device_value_bytes < 8 * GIB


@pytest.mark.parametrize(
    ("tokens", "host_gib", "enough"), [(M // 2, 128, True), (M * 3 // 2, 128, False), (M // 4, 8, True)]
)
def test_outputs_for_which_pages_have_no_room(tokens: int, host_gib: int, enough: bool) -> None:
    """The device is too small beside them, or the host for the pages that they drive out."""
    of = job(tokens, keep_outputs=True, host_bytes=host_gib * GIB)
    found = estimate(of)
    assert not found.fits and estimate(replace(of, keep_outputs="auto")).fits is enough
    advice = found.refusal.splitlines()[2]
    assert advice.startswith(
        "  Set keep_outputs='auto'" if enough else "  keep_outputs='auto', which keeps what fits, is part"
    )
    assert "attention outputs" in found.refusal or host_gib == 8
