"""Case 16: where pages lie, and when they are copied, changes no bit of loss and gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oomb_accel.pages import room as rooms
from oomb_accel.progress import GIB
from tests.harness.batches import documents_of, packed, padded
from tests.harness.late import LateMover
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import Result, chunked, config
from tests.harness.sparse import sparse
from tests.harness.tolerance import assert_same_bits
from tests.harness.uses import recorded_runs

SETTINGS: dict[str, Any] = {
    "dense": config(span_tokens=8),
    "dense, all run again": config(span_tokens=16, keep_outputs=False, keep_last_graph=False),
    "sparse": sparse(),
    "causal, shared, recomputed": sparse(
        causal_selection=True, select_per="layer", keep_outputs=False, keep_last_graph=False
    ),
    "bf16 page gradients": sparse(page_grad_dtype="bfloat16"),
    "one dense layer": sparse(dense_layers=(0,), span_tokens=8),
    "no sinks, budget": sparse(sink_pages=0, page_budget=3),
    "kept outputs": sparse(keep_outputs=True),
    "other cut": sparse(40, 5, q_block=64, top_k=3),
    "8-bit pages": config(span_tokens=8, page_dtype="float8"),
    "sparse, 8-bit pages": sparse(page_dtype="float8", dense_layers=(0,), span_tokens=8, keep_last_graph=False),
}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[dict[str, Any], Any]] = {
    "mistral": ({}, config(span_tokens=8)),
    "gemma2": ({"layer_types": _TYPES}, sparse(span_tokens=8)),
    "gemma3_text": ({"layer_types": _TYPES}, config(span_tokens=8)),
    "qwen3": ({}, sparse(sink_pages=2)),
}


@functools.cache
def model_of(kind: str = "qwen2", num_layers: int = 4) -> PreTrainedModel:
    extra = FAMILIES[kind][0] if kind in FAMILIES else {}
    return tiny_model(kind, num_hidden_layers=num_layers, hidden_size=32, intermediate_size=48, **extra)


@functools.cache
def run(settings: Any, kind: str = "qwen2") -> Result:
    return chunked(twin(model_of(kind)), packed(documents_of(100, 21, 70)), settings, embeds=True)


def assert_same(ours: Result, wanted: Result) -> None:
    assert_same_bits(ours.loss, wanted.loss)
    assert_same_bits(torch.cat(ours.log_probs), torch.cat(wanted.log_probs))
    assert_same_bits(ours.gradients, wanted.gradients)


def late(seed: int, monkeypatch: pytest.MonkeyPatch) -> LateMover:
    """The mover of the next model of this test, with a wish for room that differs by seed. What it puts off may never
    come, so that it must not meet another model, whose host memory is elsewhere."""
    mover = LateMover(seed, haste=(0.2, 1.0, 0.0)[seed % 3])
    monkeypatch.setattr("oomb_accel.offload.HostMover", lambda: mover)
    monkeypatch.setattr(rooms, "_AHEAD", 1 + seed % 3)
    return mover


@pytest.mark.parametrize(
    ("settings", "seed"),
    [(name, seed) for number, name in enumerate(SETTINGS) for seed in range(3) if seed == number % 3 or number < 3],
)
def test_the_smallest_pools_and_late_copies(settings: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without room to bring pages ahead, and copies at random times, at once, and as late as can be."""
    wanted = run(SETTINGS[settings])
    mover = late(seed, monkeypatch)
    assert_same(run.__wrapped__(dataclasses.replace(SETTINGS[settings], offload=True)), wanted)
    assert mover.num_copies > 50 and (mover.num_late > 10 or mover.haste == 1)


@pytest.mark.parametrize("kind", FAMILIES)
def test_model_families(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows beside layers that see everything, dense and sparse."""
    settings = FAMILIES[kind][1]
    mover = late(1, monkeypatch)
    wanted = run(settings, kind)
    assert_same(run.__wrapped__(dataclasses.replace(settings, offload=True), kind), wanted)
    assert mover.num_copies > 40


@pytest.mark.parametrize("settings", ["dense", "bf16 page gradients", "one dense layer"])
def test_any_size_of_the_pools(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what a chunk needs at once to all but everything: values, gradients or both in two tiers."""
    chosen = SETTINGS[settings]
    wanted = run(chosen)
    late(0, monkeypatch)
    with pytest.raises(ValueError) as caught:
        run.__wrapped__(dataclasses.replace(chosen, device_pages_gib=1 / GIB))
    least = float(str(caught.value).split("device_pages_gib=")[1].split()[0])
    copies = []
    for factor in (1, 1.3, 2, 4, 1000):
        mover = late(0, monkeypatch)
        assert_same(run.__wrapped__(dataclasses.replace(chosen, device_pages_gib=factor * least)), wanted)
        copies.append(mover.num_copies)
    assert copies[0] > 100 and copies[-1] == 0
    assert len(set(copies)) >= 3, copies


@pytest.mark.parametrize("settings", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_adapters_and_documents_side_by_side(
    settings: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_lora(twin(model_of()), lora_dropout=0.1).to(dtype)
    layout = padded(documents_of(90, 47, 3, 16))
    results = []
    for offload in (False, True):
        mover = late(2, monkeypatch)
        torch.manual_seed(3)
        chosen = dataclasses.replace(SETTINGS[settings], offload=offload)
        results.append(chunked(twin(model), layout, chosen, embeds=True))
        assert (mover.num_copies > 50) == offload
    assert_same(results[1], results[0])


def test_checkpointed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_lora(twin(model_of()))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layout = padded(documents_of(90, 47))
    results = []
    for offload in (False, True):
        late(1, monkeypatch)
        results.append(chunked(twin(model), layout, dataclasses.replace(SETTINGS["sparse"], offload=offload)))
    assert_same(results[1], results[0])


# Pages come before they are used.


@pytest.mark.parametrize(("settings", "share"), [("dense", 0.9), ("sparse", 0.9), ("one dense layer", 0.9)])
def test_in_the_backward_sweep_pages_come_ahead(settings: str, share: float) -> None:
    """Nobody selects there, so all uses are known: what comes late is what found no room."""
    with recorded_runs() as runs:
        run.__wrapped__(dataclasses.replace(SETTINGS[settings], offload=True))
    ahead, late_ = (sum(r.uploads[kind] for r in runs if r.phase != "forward") for kind in ("ahead", "late"))
    assert ahead + late_ > 100
    assert ahead / (ahead + late_) > share, (ahead, late_)


def test_in_the_forward_sweep_dense_layers_come_ahead() -> None:
    with recorded_runs() as runs:
        run.__wrapped__(dataclasses.replace(SETTINGS["dense"], offload=True))
    ahead, late_ = (sum(r.uploads[kind] for r in runs if r.phase == "forward") for kind in ("ahead", "late"))
    assert ahead > 100 and ahead / (ahead + late_) > 0.8, (ahead, late_)
