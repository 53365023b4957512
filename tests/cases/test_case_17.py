"""Case 17: the same step twice gives the same bits on the CPU (the GPU's part is in test_gpu_parity.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.batches import documents_of, packed, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import chunked, config
from tests.harness.sparse import recorded_selections, sparse
from tests.harness.tolerance import assert_same_bits

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "recompute": {"keep_outputs": False, "keep_last_graph": False},
    "deterministic": {"deterministic": True},
    "bf16 page gradients": {"page_grad_dtype": "bfloat16"},
    "small spans": {"span_tokens": 8},
    "8-bit pages": {"page_dtype": "float8", "keep_outputs": False},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twice(settings: str, dtype: torch.dtype) -> None:
    model = with_lora(tiny_model("mistral"), lora_dropout=0.1).to(dtype)
    layout = packed(documents_of(70, 21, 33))
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(chunked(twin(model), layout, config(**SETTINGS[settings]), embeds=True))
    assert_same_bits(results[1].loss, results[0].loss)
    assert_same_bits(torch.cat(results[1].log_probs), torch.cat(results[0].log_probs))
    assert_same_bits(results[1].gradients, results[0].gradients)


SPARSE: dict[str, dict[str, Any]] = {
    "default": {},
    "deterministic": {"deterministic": True},
    "recompute": {"keep_outputs": False, "keep_last_graph": False, "deterministic": True},
    "bf16 page gradients": {"page_grad_dtype": "bfloat16", "deterministic": True},
    "8-bit pages": {"page_dtype": "float8", "keep_outputs": False},
    "causal, budget, shared": {"causal_selection": True, "page_budget": 3, "select_per": "layer"},
}


@pytest.mark.parametrize("settings", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_twice(settings: str, dtype: torch.dtype) -> None:
    model = with_lora(tiny_model("gemma2"), lora_dropout=0.1).to(dtype)
    layout = packed(documents_of(90, 21, 70))
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        with recorded_selections() as calls:
            result = chunked(twin(model), layout, sparse(**SPARSE[settings]), embeds=True)
        results.append((result, [c.lists.pages_GBK for c in calls]))
    (first, lists), (second, lists_again) = results
    assert lists and all(torch.equal(a, b) for a, b in zip(lists, lists_again, strict=True))
    assert_same_bits(second.loss, first.loss)
    assert_same_bits(torch.cat(second.log_probs), torch.cat(first.log_probs))
    assert_same_bits(second.gradients, first.gradients)


def test_deterministic_changes_no_number_on_the_cpu_and_leaves_the_callers_switch_alone() -> None:
    layout = padded(documents_of(70))
    assert not torch.are_deterministic_algorithms_enabled()
    ours = chunked(tiny_model(), layout, config(deterministic=True))
    assert not torch.are_deterministic_algorithms_enabled()
    assert_same_bits(ours.gradients, chunked(tiny_model(), layout).gradients)


def test_a_step_leaves_nothing_behind_for_the_next() -> None:
    layout, other = padded(documents_of(70)), packed(documents_of(9, 120, seed=1))
    model = tiny_model()
    first = chunked(model, layout)
    chunked(model, other, config(8, 2))
    assert_same_bits(chunked(model, layout).gradients, first.gradients)
