"""The parameters of a model, as a step looks them up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from oomb_accel.integrations.agreement import is_partitioned
from oomb_accel.integrations.parameters import ZERO3, parameters_of
from oomb_accel.integrations.support import gathered_bytes
from tests.harness.models import tiny_model, with_lora


def shared() -> nn.Module:
    """Modules and parameters that come up twice, and such as are None."""
    inner = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2))
    outer = nn.ModuleList([inner, nn.Linear(2, 3), inner])
    outer[1].weight = inner[0].weight
    outer.register_module("nothing", None)
    return outer


def switched() -> nn.Module:
    model: Any = with_lora(tiny_model())
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("other")
    model.delete_adapter("default")
    return model


@pytest.mark.parametrize("make", [shared, tiny_model, lambda: with_lora(tiny_model("qwen3_moe")), switched])
def test_the_same_in_the_same_order(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert [id(p) for p in parameters_of(model)] == [id(p) for p in model.parameters()]


def test_parts_are_found_once_deepspeed_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3)
    model.bias.ds_id, model.bias.ds_numel = 0, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ZERO3, torch)
    assert is_partitioned(model) and gathered_bytes(model) > 0
    assert not is_partitioned(nn.Linear(2, 3)) and gathered_bytes(nn.Linear(2, 3)) == 0
