"""LoRA layers run fused inside of a pass: PEFT's values and gradients, and PEFT itself wherever they would differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.integrations.fused_lora import _only_adapter, fused_lora
from tests.harness.models import tiny_model


class Block(nn.Module):
    """A layer with a bias and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return down


def adapted(dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Adapters that add something, with a scaling that is no power of two."""
    torch.manual_seed(0)
    config: dict[str, Any] = dict(r=4, lora_alpha=6, target_modules=["up", "down"], init_lora_weights=False)
    return get_peft_model(Block().to(dtype), LoraConfig(**config | settings)).to(dtype)


def lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def outcome(model: nn.Module, x: Tensor, dout: Tensor) -> list[Tensor]:
    out = model(x)
    wanted = [p for p in (x, *model.parameters()) if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, dout)]


def nodes_of(*outs: Tensor) -> list[str]:
    """Names of the nodes in the graph of results."""
    nodes, seen = [out.grad_fn for out in outs], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return [type(node).__name__ for node in seen]


def num_fused(out: Tensor) -> int:
    """Fused layers in the graph of a result."""
    return sum("FusedLinear" in name for name in nodes_of(out))


@pytest.mark.parametrize("x_needs_grad", [True, False])
def test_values_and_gradients_are_those_of_peft(x_needs_grad: bool) -> None:
    model = adapted()
    x = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=x_needs_grad)
    dout = torch.randn(3, 5, 24, dtype=torch.float64)
    wanted = outcome(model, x, dout)
    with fused_lora(lora_layers(model))():
        found = outcome(model, x, dout)
    assert len(found) == len(wanted) == 5 + x_needs_grad
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def as_peft_makes_it(model: nn.Module, exact: nn.Module) -> None:
    """fp32 adapters on a bf16 base; ``exact`` gets the same numbers in fp64."""
    for (name, parameter), exact_parameter in zip(model.named_parameters(), exact.parameters(), strict=True):
        if "lora_" in name:
            parameter.data = parameter.data.float()
        exact_parameter.data = parameter.data.double()


def test_under_autocast_it_is_at_least_as_exact() -> None:
    """fp32 adapters on a bf16 base, against fp64."""
    model, exact = adapted(torch.bfloat16), adapted()
    as_peft_makes_it(model, exact)
    x = torch.randn(2, 200, 24).bfloat16().requires_grad_()
    dout = torch.randn(2, 200, 24).bfloat16()
    wanted = outcome(exact, x.detach().double().requires_grad_(), dout.double())
    sides = []
    for layers in ([], lora_layers(model)):
        with fused_lora(layers)(), torch.autocast("cpu", torch.bfloat16):
            sides.append(outcome(model, x, dout))
    for peft, ours, truth in zip(*sides, wanted, strict=True):
        assert ours.dtype == peft.dtype
        assert (ours.double() - truth).norm() <= 1.1 * (peft.double() - truth).norm() + 1e-12


def test_autocast_leaves_fp64_alone() -> None:
    model = adapted()
    x = torch.randn(3, 24, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        with fused_lora(lora_layers(model))():
            torch.testing.assert_close(model(x), wanted, rtol=1e-12, atol=1e-12)


def test_plain_lora_is_fused_and_nothing_stays_behind() -> None:
    model = adapted()
    x = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    with fused_lora(lora_layers(model))():
        assert num_fused(model(x)) == 2
    assert not any("forward" in vars(layer) for layer in lora_layers(model))
    assert num_fused(model(x)) == 0


def with_hook(model: nn.Module) -> None:
    for layer in lora_layers(model):
        layer.base_layer.register_forward_pre_hook(lambda *_: None)


def with_second_adapter(model: Any) -> None:
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    model.to(torch.float64)


def with_fp32_adapters(model: nn.Module) -> None:
    for layer in lora_layers(model):
        layer.lora_A.float()
        layer.lora_B.float()


def with_trained_base(model: nn.Module) -> None:
    for layer in lora_layers(model):
        layer.base_layer.weight.requires_grad_()


OTHERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "dropout": ({"lora_dropout": 0.5}, lambda model: None),
    "DoRA": ({"use_dora": True}, lambda model: None),
    "LoRA with a bias": ({"lora_bias": True}, lambda model: None),
    "a hook": ({}, with_hook),
    "two adapters": ({}, with_second_adapter),
    "a trained base": ({}, with_trained_base),
    "merged": ({}, lambda model: model.merge_adapter()),
    "switched off": ({}, lambda model: model.base_model.disable_adapter_layers()),
    "mixed dtypes": ({}, with_fp32_adapters),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_plain_is_left_to_peft(kind: str) -> None:
    settings, change = OTHERS[kind]
    model = adapted(**settings)
    change(model)
    x = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    wanted = model(x)
    torch.manual_seed(1)
    with fused_lora(lora_layers(model))():
        found = model(x)
    assert torch.equal(found, wanted)
    assert num_fused(found) == 0


def test_dropout_does_not_matter_in_evaluation() -> None:
    model = adapted(lora_dropout=0.5).eval()
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    with fused_lora(lora_layers(model))():
        assert num_fused(model(x)) == 2


@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 3, 5, 24)])
@pytest.mark.parametrize("name", ["up", "down"])
def test_inputs_of_any_shape_and_outputs_that_are_changed_in_place(shape: tuple[int, ...], name: str) -> None:
    layer = getattr(adapted().base_model.model, name)
    x = torch.randn(*shape[:-1], layer.in_features, dtype=torch.float64, requires_grad=True)
    wanted = layer(x).mul(2)
    with fused_lora([layer])():
        found = layer(x)
        assert num_fused(found) == 1
        found = found.mul_(2)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    (wanted_dx,), (dx,) = (torch.autograd.grad(out.sum(), x) for out in (wanted, found))
    torch.testing.assert_close(dx, wanted_dx, rtol=1e-12, atol=1e-12)


def test_a_forward_that_somebody_else_has_changed_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    monkeypatch.setattr(lora.Linear, "forward", lambda self, x: self.base_layer(x))
    x = torch.randn(3, 24, dtype=torch.float64)
    with fused_lora(lora_layers(model))():
        assert torch.equal(model(x), model.base_model.model.down.base_layer(torch.relu(model.base_model.model.up(x))))


def test_a_watched_weight_is_not_looked_at() -> None:
    """ZeRO 3 gathers what is looked at."""
    model = adapted()
    with_hook(model)
    looked: list[str] = []

    class Parameters(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            looked.append(key)
            return super().__getitem__(key)

    base = model.base_model.model.up.base_layer
    base._parameters = Parameters(base._parameters)
    assert _only_adapter(model.base_model.model.up) is None
    assert looked == []


def test_layers_that_a_wrapper_runs_again_stay_as_they_are() -> None:
    """Non-reentrant checkpointing compares what both runs save."""
    model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    oomb_accel.enable(model, OombConfig(chunk_tokens=16, page_tokens=4))
    ids = torch.arange(40)[None] % 100
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()
