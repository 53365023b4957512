"""LoRA layers with a common input share work: PEFT's values and gradients, however the layers are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from oomb_accel.integrations.fused_lora import fused_lora
from oomb_accel.integrations.lora_layers import lora_siblings
from tests.harness.models import ALL_LINEAR, tiny_model
from tests.integrations.test_fused_lora import as_peft_makes_it, lora_layers, nodes_of

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
WIDTH = 24


class Attention(nn.Module):
    """Layers of different widths, some with a bias. All could read the same input; by its name the last does not."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 8, bias=False)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        out: Tensor = self.o_proj((q[..., :8] * k * v).repeat(*[1] * (x.dim() - 1), 3))
        return out


def adapted(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Adapters of different ranks that add something."""
    torch.manual_seed(0)
    config: dict[str, Any] = dict(r=4, rank_pattern={"k_proj": 3}, lora_alpha=6, target_modules=list(NAMES))
    return get_peft_model(Attention().to(dtype), LoraConfig(**config | changes, init_lora_weights=False)).to(dtype)


def attention_of(model: Any) -> Any:
    return model.base_model.model


def fused(model: nn.Module) -> AbstractContextManager[None]:
    return fused_lora(lora_layers(model), lora_siblings(model.modules()))()


def num_groups(*outs: Tensor) -> int:
    """Groups of layers that ran together, those of one layer as well."""
    return sum("FusedLinears" in name for name in nodes_of(*outs))


def check_equal(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.booleans()), min_size=1, max_size=6),
    trained=st.sets(st.sampled_from(["x", "lora_A", "lora_B", "q_proj.lora_A", "k_proj.lora_A"]), min_size=1),
    shape=st.sampled_from([(WIDTH,), (5, WIDTH), (2, 3, WIDTH), (0, WIDTH)]),
    transposed=st.booleans(),
)
def test_any_calls(
    calls: list[tuple[str, bool, bool]], trained: set[str], shape: tuple[int, ...], transposed: bool
) -> None:
    """Layers in any order, left out, called again, with the same input or another; outputs that nobody uses."""
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    leaf = torch.randn(shape[::-1] if transposed else shape, dtype=torch.float64, requires_grad="x" in trained)

    def outcome() -> list[Tensor | None]:
        torch.manual_seed(1)
        x, outs, shares = leaf.permute(*reversed(range(leaf.dim()))) if transposed else leaf, [], []
        for name, other_input, is_used in calls:
            x = x * 2 if other_input else x
            out = getattr(attention_of(model), name)(x)
            outs += [out.detach(), torch.tensor(out.requires_grad)]
            shares += [(out * torch.randn_like(out)).sum()] * is_used
        loss = sum(shares, torch.zeros(()))
        wanted = [p for p in (leaf, *model.parameters()) if p.requires_grad]
        return outs + (list(torch.autograd.grad(loss, wanted, allow_unused=True)) if loss.requires_grad else [])

    wanted = outcome()
    with fused(model):
        check_equal(outcome(), wanted)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma2"])
def test_layers_of_real_models_share(model_type: str) -> None:
    """q, k and v in each of three layers, gate and up; same numbers."""
    model: Any = get_peft_model(
        tiny_model(model_type).double(), LoraConfig(r=2, target_modules=list(ALL_LINEAR), init_lora_weights=False)
    ).double()
    ids = torch.arange(40)[None] % 100
    wanted = model(input_ids=ids, labels=ids).loss
    with fused(model):
        found = model(input_ids=ids, labels=ids).loss
    assert num_groups(found) == 3 * 4
    trained = [p for p in model.parameters() if p.requires_grad]
    check_equal(list(torch.autograd.grad(found, trained)), list(torch.autograd.grad(wanted, trained)))


class Watch(TorchDispatchMode):
    """Names of the operations, and the most bytes that were alive among their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.peak_bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **kwargs or {})
        self.names.append(func.__name__.split(".")[0])
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._storages.values()))
        return results


def watched(model: Any, layers: AbstractContextManager[None], x: Tensor) -> Watch:
    wanted = [p for p in (x, *model.parameters()) if p.requires_grad]
    with layers, Watch() as watch:
        torch.autograd.grad(model(x).sum(), wanted)
    return watch


@pytest.mark.parametrize("x_needs_grad", [True, False])
def test_the_input_is_read_once_and_gradients_are_not_summed(x_needs_grad: bool) -> None:
    model, x = adapted(), torch.randn(200, WIDTH, dtype=torch.float64, requires_grad=x_needs_grad)
    alone, shared = (watched(model, layers, x) for layers in (fused_lora(lora_layers(model))(), fused(model)))
    num_products, num_sums = (
        [sum(name in kinds for name in watch.names) for watch in (alone, shared)]
        for kinds in (("mm", "addmm", "addmm_"), ("add", "add_"))
    )
    # Of x A^T and dA one instead of three, of dx += dy A where it is wanted; and no sums of three dx.
    assert num_products[1] == num_products[0] - (6 if x_needs_grad else 4)
    assert num_sums == [2 if x_needs_grad else 0, 0]
    copies = sum(p.nbytes for name, p in model.named_parameters() if "lora_A" in name)
    assert shared.peak_bytes <= alone.peak_bytes + copies


def test_what_a_step_looks_at_once_is_forgotten_with_it() -> None:
    """Weights that have changed since, and adapters that were switched off."""
    model, x = adapted(torch.bfloat16), torch.randn(9, WIDTH).bfloat16()
    with fused(model):
        first = model(x)
    with torch.no_grad():
        attention_of(model).q_proj.lora_A["default"].weight.mul_(3)
    with fused(model):
        second = model(x)
    torch.testing.assert_close(second, model(x), rtol=0.05, atol=0.05)
    assert (first - second).abs().max() > 0.1
    with fused(model), model.disable_adapter():
        assert torch.equal(model(x), attention_of(model)(x))


def test_the_same_bits_again() -> None:
    model, x = adapted(torch.bfloat16), torch.randn(50, WIDTH).bfloat16().requires_grad_()
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    with fused(model):
        first, second = (torch.autograd.grad(model(x).sum(), wanted) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_under_autocast_it_is_at_least_as_exact() -> None:
    """fp32 adapters and input, a bf16 base; against fp64."""
    model, exact = adapted(torch.bfloat16), adapted()
    as_peft_makes_it(model, exact)
    x = torch.randn(2, 200, WIDTH)
    douts = [torch.randn(2, 200, width).bfloat16() for width in (40, 8, 8)]

    def outcome(model: Any, x: Tensor, douts: list[Tensor]) -> list[Tensor]:
        x = x.detach().requires_grad_()
        outs = [getattr(attention_of(model), name)(x) for name in NAMES[:3]]
        wanted = [x, *(p for n, p in model.named_parameters() if p.requires_grad and "o_proj" not in n)]
        return [*outs, *torch.autograd.grad(outs, wanted, douts)]

    truth = outcome(exact, x.double(), [dout.double() for dout in douts])
    sides = []
    for layers in (nullcontext(), fused(model)):
        with layers, torch.autocast("cpu", torch.bfloat16):
            sides.append(outcome(model, x, douts))
    assert num_groups(*sides[1][:3]) == 1
    for peft, ours, true in zip(*sides, truth, strict=True):
        assert ours.dtype == peft.dtype
        assert (ours.double() - true).norm() <= 1.1 * (peft.double() - true).norm() + 1e-12


def changed_in_place(x: Tensor) -> AbstractContextManager[Any]:
    x.mul_(2)
    return nullcontext()


CHANGES: dict[str, tuple[Any, Callable[[Tensor], AbstractContextManager[Any]]]] = {
    "the input, in place": (torch.no_grad, changed_in_place),
    "the input, in place, in inference": (torch.inference_mode, changed_in_place),
    "gradients on": (torch.no_grad, lambda x: torch.enable_grad()),
    "gradients off": (torch.enable_grad, lambda x: torch.no_grad()),
    "autocast on": (torch.no_grad, lambda x: torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls(change: str) -> None:
    model = adapted(torch.float32)
    mode, changed = CHANGES[change]

    def outcome() -> tuple[Tensor, ...]:
        with mode():
            x = torch.ones(5, WIDTH)
            q = attention_of(model).q_proj(x)
            with changed(x):
                k = attention_of(model).k_proj(x)
        a = attention_of(model).k_proj.lora_A["default"].weight
        return q, k, *(torch.autograd.grad(k.sum(), a) if k.requires_grad else ())

    wanted = outcome()
    with fused(model):
        found = outcome()
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.requires_grad == theirs.requires_grad
        tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_change_of_what_the_backward_needs_is_found() -> None:
    model = adapted()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True) * 1
    with fused(model):
        q = attention_of(model).q_proj(x)
        k = attention_of(model).k_proj(x.mul_(2))
    with pytest.raises(RuntimeError, match="inplace operation"):
        (q.sum() + k.sum()).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_run_again_for_a_checkpoint(reentrant: bool) -> None:
    model = adapted()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        x.grad = None
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]

    wanted = gradients()
    with fused(model):
        check_equal(gradients(), wanted)


def hooked(layer: Any) -> None:
    layer.base_layer.register_forward_hook(lambda module, args, out: out * 2)


def dropping(layer: Any) -> None:
    layer.lora_dropout["default"] = nn.Dropout(1.0)


def of_another_dtype(layer: Any) -> None:
    layer.lora_A.float()
    layer.lora_B.float()


@pytest.mark.parametrize("change", [hooked, dropping, of_another_dtype])
def test_a_sibling_that_is_left_to_peft(change: Callable[[Any], None]) -> None:
    model = adapted()
    change(attention_of(model).k_proj)
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted_grads = [x, *(p for p in model.parameters() if p.requires_grad)]

    def outcome() -> list[Tensor | None]:
        out = model(x)
        return [out, *torch.autograd.grad(out.sum(), wanted_grads, allow_unused=True)]

    wanted = outcome()
    with fused(model):
        found = outcome()
    assert num_groups(*(out for out in found[:1] if out is not None)) == 2
    check_equal(found, wanted)


@pytest.mark.parametrize("calls", [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("q_proj", "other")])
def test_an_input_is_not_kept(calls: tuple[str, ...]) -> None:
    """Once all of its layers have come, or a layer with another input."""
    model = adapted()
    with fused(model):
        x = torch.randn(5, WIDTH, dtype=torch.float64)
        for name in calls:
            if name == "other":
                attention_of(model).o_proj(torch.randn(5, WIDTH, dtype=torch.float64))
            else:
                getattr(attention_of(model), name)(x)
        seen = weakref.ref(x)
        del x
        assert seen() is None


def test_siblings_of_another_width() -> None:
    """As in attention to another sequence."""
    model = adapted()
    narrow = nn.ModuleDict({"k_proj": nn.Linear(16, 8, dtype=torch.float64)})
    narrow_model: Any = get_peft_model(narrow, LoraConfig(r=4, target_modules=["k_proj"]))
    attention_of(model).k_proj = attention_of(narrow_model)["k_proj"]
    x, other = (torch.randn(5, width, dtype=torch.float64) for width in (WIDTH, 16))
    with fused(model):
        q = attention_of(model).q_proj(x)
        assert attention_of(model).k_proj(other).shape == (5, 8)
        assert num_groups(q, attention_of(model).v_proj(x)) == 2
