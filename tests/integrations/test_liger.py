"""Liger's kernels: the same call from training and benchmarks, and why there is none."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from oomb_accel.bench.models import base_model, lora_model
from oomb_accel.integrations.liger import use_liger
from oomb_accel.training.model import apply_liger
from oomb_accel.training.recipe import Recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda")
RECIPE = Recipe(model_name_or_path="m", data_path="d", output_dir="o")
Calls = list[tuple[Any, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of a package in Liger's place."""
    found: Calls = []
    patching = ModuleType("liger_kernel.transformers.monkey_patch")
    patching.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None}  # type: ignore[attr-defined]
    patching._apply_liger_kernel_to_instance = lambda model, **options: found.append((model, options))  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, patching.__name__, patching)
    return found


def test_training_and_benchmarks_make_the_same_call(calls: Calls) -> None:
    model = lora_model("tiny", CPU)
    assert use_liger(model, GPU, fused_loss=False) is None
    assert apply_liger(model, RECIPE, GPU)
    assert calls == 2 * [(model.get_base_model(), {"cross_entropy": False, "fused_linear_cross_entropy": False})]


def test_why_it_does_not_run(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    model = base_model("tiny", CPU)
    assert "runs on cpu" in str(use_liger(model, CPU, fused_loss=True))
    model.config.model_type = "other"  # type: ignore[misc]
    assert use_liger(model, GPU, fused_loss=True) == "It has no kernels for other."
    monkeypatch.delattr(sys.modules["liger_kernel.transformers.monkey_patch"], "_apply_liger_kernel_to_instance")
    sys.modules["liger_kernel"].__spec__ = sys.__spec__
    assert "cannot be imported: " in str(use_liger(model, GPU, fused_loss=True))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    monkeypatch.delitem(sys.modules, "liger_kernel")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert use_liger(model, GPU, fused_loss=True) == "The package liger-kernel is not installed."
    assert not calls and not apply_liger(model, RECIPE, GPU)


def test_a_model_leaves_the_default_dtype_as_it_was() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert base_model("tiny", CPU).dtype == torch.bfloat16
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
