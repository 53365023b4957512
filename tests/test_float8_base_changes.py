"""Frozen weights in 8 bits whose originals change between steps, or between the sweeps."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from peft.tuners.lora import layer as lora_layer
from torch import Tensor

from oomb_accel import OombConfig
from oomb_accel.integrations import float8_base
from tests.harness.batches import Layout, documents_of, padded
from tests.harness.float8 import with_float8_linears
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import chunked, config, parameter_gradients, switched_on
from tests.harness.tolerance import assert_same_gradients, assert_same_total


def float8() -> OombConfig:
    return config(base_dtype="float8")


def lora() -> Any:
    return with_lora(tiny_model())


def _trained_on(model: Any, layout: Layout, change: Callable[[Any], object]) -> dict[str, Tensor]:
    """Gradients of the step after a change, between two steps with the same copies."""
    with switched_on(model, float8()):
        model(**layout.batch).loss.backward()
        change(model)
        model.zero_grad()
        model(**layout.batch).loss.backward()
        return parameter_gradients(model)


def _relora(model: Any) -> None:
    """Merge, and begin anew with B zero."""
    model.merge_adapter()
    for module in model.modules():
        if isinstance(module, lora_layer.Linear):
            module.merged_adapters.clear()
            # Not zero, or A would get no gradient.
            module.get_submodule("lora_B.default").get_parameter("weight").data.mul_(-0.5)


def _swapped(model: Any) -> None:
    """The sum of its bits stays."""
    weight = model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
    weight.data[[0, 1]] = weight.data[[1, 0]]


def _in_place(model: Any) -> None:
    model.base_model.model.model.layers[2].self_attn.v_proj.base_layer.weight.data[3, 5] *= 1.25


def _base_replaced(model: Any) -> None:
    layer = model.base_model.model.model.layers[1].self_attn.o_proj
    layer.base_layer = deepcopy(layer.base_layer)
    layer.base_layer.weight.data.mul_(1.25)


@pytest.mark.parametrize("change", [_relora, _swapped, _in_place, _base_replaced])
def test_copies_follow_changes_that_autograd_does_not_see(change: Callable[[Any], object]) -> None:
    """PEFT merges by ``weight.data += delta``: neither the version nor the address of the weight tells."""
    model, layout = lora().double(), padded(documents_of(40))
    ours = _trained_on(model, layout, change)
    assert_same_gradients(ours, chunked(model, layout, float8()).gradients)


def test_copies_are_made_of_what_changed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    of = float8_base.Float8Weight.of

    def counted(weight_OI: Tensor, last_input: float8_base.LastInput) -> float8_base.Float8Weight:
        made.append(weight_OI)
        return of(weight_OI, last_input)

    def change(model: Any) -> None:
        made.clear()
        _in_place(model)

    monkeypatch.setattr(float8_base.Float8Weight, "of", counted)
    _trained_on(lora(), padded(documents_of(30)), change)
    assert len(made) == 1


def test_a_merged_model_trains_as_the_definition_says() -> None:
    """Merged adapters: PEFT runs the base layer alone."""
    model, layout = lora().double(), padded(documents_of(40))
    for parameter in model.base_model.model.model.embed_tokens.parameters():
        parameter.requires_grad_()
    merged = twin(model)
    merged.merge_adapter()
    with switched_on(model, float8()):
        model(**layout.batch).loss.backward()
        model.merge_adapter()
        loss = model(**layout.batch).loss.detach()
    assert_same_total(loss, chunked(with_float8_linears(merged), layout, config()).loss)


@pytest.mark.parametrize("base_dtype", ["model", "float8"])
def test_a_merge_between_the_sweeps_is_refused(base_dtype: str) -> None:
    model: Any = lora()
    with switched_on(model, config(base_dtype=base_dtype)):
        loss = model(**padded(documents_of(40)).batch).loss
        model.merge_adapter()
        with pytest.raises(RuntimeError, match="between forward and backward: which adapters are merged"):
            loss.backward()
