"""Frozen weights in 8 bits: the function that the definition says, and the plain one where they are not used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.deepspeed import save_adapter
from oomb_accel.integrations import float8_base, float8_checks, fused_lora
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.saving import WEIGHTS
from oomb_kernels import quantize_rows
from tests.harness.batches import Layout, documents_of, packed, padded
from tests.harness.float8 import with_float8_linears
from tests.harness.models import sgd_step, tiny_model, twin, with_lora
from tests.harness.parity import (
    assert_same_result,
    assert_twice_plain_result,
    chunked,
    config,
    parameter_gradients,
    reference,
    switched_on,
)
from tests.harness.sparse import sparse
from tests.harness.tolerance import assert_same_bits, assert_same_gradients, worst_relative_error

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "recompute": {"keep_outputs": False, "keep_last_graph": False},
    "kept": {"keep_outputs": True},
    "one chunk": {"chunk_tokens": 256},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "on all layers": {},
    "on some layers": {"target_modules": ["q_proj", "down_proj"]},
    "left to PEFT": {"use_dora": True},
}


def float8(**settings: Any) -> OombConfig:
    return config(**{"base_dtype": "float8", **settings})


def lora(model_type: str = "qwen2", **settings: Any) -> Any:
    return with_lora(tiny_model(model_type), **settings)


def forwards(model: nn.Module) -> list[str]:
    """Modules with a forward of their own."""
    return [name for name, module in model.named_modules() if name and "forward" in vars(module)]


def check(model: nn.Module, layout: Layout, settings: OombConfig) -> None:
    """Against the same chunks with layers from the definition: full attention's other rounding would now and then make
    another 8-bit number of an input."""
    model = model.double()
    wanted = chunked(with_float8_linears(twin(model)), layout, settings, embeds=True)
    assert_same_result(chunked(twin(model), layout, replace(settings, base_dtype="float8"), embeds=True), wanted)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model_type", ["qwen2", "gemma2"])
def test_a_step_is_the_defined_function(model_type: str, settings: str) -> None:
    check(lora(model_type), packed(documents_of(85, 9, 40)), config(**SETTINGS[settings]))


@pytest.mark.parametrize("adapters", ADAPTERS)
def test_adapters_of_any_kind(adapters: str) -> None:
    """And layers without one."""
    check(lora(**ADAPTERS[adapters]), packed(documents_of(50, 21)), config())


def test_selected_pages() -> None:
    check(lora(), packed(documents_of(140)), sparse())


def test_chunks_do_not_matter() -> None:
    """But for a number here and there that another rounding brings to another 8-bit neighbour."""
    model, layout = lora().double(), packed(documents_of(85, 9, 40))
    one, many = (chunked(twin(model), layout, float8(chunk_tokens=chunk)) for chunk in (256, 16))
    assert abs(float(one.loss / many.loss) - 1) < 1e-4 and worst_relative_error(one.gradients, many.gradients) < 0.02


def test_bfloat16() -> None:
    """Autocast over fp32 adapters, as PEFT makes them."""
    model = lora().bfloat16()
    layout = packed(documents_of(90, 50))
    exact = reference(with_float8_linears(twin(model).float()), layout.documents)
    plain = reference(with_float8_linears(twin(model)), layout.documents)
    assert_twice_plain_result(chunked(twin(model), layout, float8()), plain, exact)


def test_it_changes_a_little() -> None:
    model, layout = lora(), packed(documents_of(85, 140))
    plain, ours = (chunked(twin(model), layout, settings) for settings in (config(), float8()))
    assert 1e-4 < abs(float(ours.loss / plain.loss) - 1) < 0.02
    a, b = (torch.cat([g.flatten() for g in side.gradients.values()]) for side in (plain, ours))
    assert 0.95 < torch.cosine_similarity(a, b, 0) < 0.999


def test_training_under_autocast_goes_the_same_way() -> None:
    """Losses of some steps, within 2 % of those without."""
    layout = padded(documents_of(60, 40))
    losses: list[list[float]] = []
    for settings in (config(), float8()):
        model = lora()
        model.base_model.model.bfloat16()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        losses.append([])
        with switched_on(model, settings):
            for _ in range(6):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(**layout.batch).loss
                loss.backward()
                sgd_step(model, 0.05)
                losses[-1].append(float(loss.detach()))
    for plain, ours in zip(*losses, strict=True):
        assert abs(ours / plain - 1) < 0.02
    assert losses[1][-1] < losses[1][0] - 0.05


def test_evaluation_is_the_same_function() -> None:
    model, layout = lora().eval(), padded(documents_of(90))
    with switched_on(model, float8()):
        trained = model(**layout.batch).loss
        with torch.no_grad():
            evaluated = model(**layout.batch).loss
    assert_same_bits(evaluated, trained.detach())


def test_nothing_stays_behind_and_other_calls_are_plain() -> None:
    model, layout = lora().eval(), padded(documents_of(40))
    ids, weights = layout.batch["input_ids"], {name: p.clone() for name, p in model.named_parameters()}
    before = model(ids).logits
    with switched_on(model, float8()):
        model(**layout.batch).loss.backward()
        copies = attachment_of(model).float8_base
        assert copies is not None and copies.num_layers == 21
        numbers = sum(layer.weight.numel() for layer in copies.layers)
        assert 2 * numbers < copies.num_bytes < 2.3 * numbers
        assert forwards(model) == []
        with torch.no_grad():
            assert_same_bits(model(ids).logits, before)
    assert copies.num_layers == 0 and forwards(model) == []
    assert_same_bits(dict(model.named_parameters()), weights)
    assert_same_bits(model(ids).logits, before)


def test_what_is_saved_and_merged_while_it_is_on_is_plain(tmp_path: Path) -> None:
    """Nothing of the copies comes into a file, and a merge is of the weights themselves."""
    model, layout = lora(), padded(documents_of(40))
    plain, state = twin(model), {name: values.clone() for name, values in model.state_dict().items()}
    with switched_on(model, float8()):
        model(**layout.batch).loss.backward()
        assert_same_bits(model.state_dict(), state)
        save_adapter(model, tmp_path / "ours")
        plain.save_pretrained(str(tmp_path / "plain"))
        assert_same_bits(*(load_file(tmp_path / name / WEIGHTS) for name in ("ours", "plain")))
        model.merge_adapter()
        merged = {name: values.clone() for name, values in model.state_dict().items()}
        model.unmerge_adapter()
    plain.merge_adapter()
    assert_same_bits(merged, plain.state_dict())


def test_an_input_is_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For query, key and value, and for gate and up; and each output gradient."""
    model, layout = lora(), padded(documents_of(30))
    seen: list[Tensor] = []

    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(x)
        return quantize_rows(x)

    monkeypatch.setattr(float8_base, "quantize_rows", counted)
    with switched_on(model, float8(chunk_tokens=64)):
        loss = model(**layout.batch).loss  # one chunk: the caller's graph
        assert len(seen) == 3 * (2 * 7 + 4)
        loss.backward()
        assert len(seen) == 3 * (2 * 7 + 4 + 7) - 3, "nobody wants the gradient of the embeddings"
        model(**layout.batch)
        assert len(seen) == 3 * (2 * 7 + 4 + 7 + 4) - 3, "copies are made once"


def test_adapters_stay_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []

    def counted(*args: Any) -> None:
        used.append(args[-1])
        float8_base.base_product(*args)

    monkeypatch.setattr(fused_lora, "base_product", counted)
    chunked(lora(), padded(documents_of(30)), float8(chunk_tokens=64))
    assert len(used) == 21 and all(isinstance(weight, float8_base.Float8Weight) for weight in used)


def test_an_input_that_was_changed_is_another() -> None:
    last = float8_base.LastInput()
    x = torch.ones(2, 16)
    first = last.rows(x)
    assert last.rows(x) is first
    x.mul_(2)
    assert not torch.equal(last.rows(x)[1], first[1])
    del x
    y = torch.ones(2, 16)
    assert_same_bits(last.rows(y)[1], first[1])


def test_copies_follow_the_weights() -> None:
    model, layout = lora().double(), padded(documents_of(40))
    with switched_on(model, float8()):
        model(**layout.batch).loss.backward()
        model.zero_grad()
        with torch.no_grad():
            for parameter in model.base_model.model.model.layers.parameters():
                parameter.mul_(1.25)
        model(**layout.batch).loss.backward()
        ours = parameter_gradients(model)
    assert_same_gradients(ours, chunked(model, layout, float8()).gradients)


def test_layers_of_other_sizes_and_trained_ones_run_as_they_are() -> None:
    model: Any = with_lora(tiny_model(intermediate_size=72))
    layout = padded(documents_of(40))
    model.base_model.model.model.layers[0].self_attn.o_proj.base_layer.weight.requires_grad_()
    oomb_accel.enable(model, float8())
    assert "base       11 of 21 linear layers in float8" in oomb_accel.banner(model)
    model(**layout.batch).loss.backward()
    copies = attachment_of(model).float8_base
    assert copies is not None and copies.num_layers == 11
    assert model.base_model.model.model.layers[0].self_attn.o_proj.base_layer.weight.grad.norm() > 0


def test_the_default_says_nothing_and_makes_nothing() -> None:
    model = lora()
    oomb_accel.enable(model, config())
    assert attachment_of(model).float8_base is None and "  base " not in oomb_accel.banner(model)


def refusal(model: nn.Module) -> list[str]:
    with switched_on(model, float8()), pytest.raises(ValueError) as error:
        model(**padded(documents_of(40)).batch)
    assert forwards(model) == []
    return str(error.value).splitlines()


def test_a_model_without_frozen_layers_is_refused() -> None:
    what, got, remedy = refusal(tiny_model())
    assert "nothing to do" in what and "21 of them, 21 of them trained" in got and "base_dtype='model'" in remedy


def test_checkpointing_is_refused() -> None:
    model = lora()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    what, got, remedy = refusal(model)
    assert "checkpointing" in what and "base_dtype='float8'" in got and "gradient_checkpointing=False" in remedy
    wrapped = lora()
    layers = wrapped.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    assert refusal(wrapped)[0] == what


def test_weights_in_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_checks, "is_partitioned", lambda model: True)
    what, got, remedy = refusal(lora())
    assert what.startswith("ZeRO 3") and "stage 3" in got and "ZeRO 2" in remedy


def test_gpus_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match="base_dtype='float8' asks for") as error:
        float8_checks.check_device(torch.device("cuda"), torch.bfloat16)
    assert len(str(error.value).splitlines()) == 3 and str(error.value).endswith("Set base_dtype='model'.")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(float8_checks, "float8_product_fault", lambda device: None)
    with pytest.raises(ValueError, match=r"bfloat16.\n.*computes in float32.\n.*mixed_precision='bf16'"):
        float8_checks.check_device(torch.device("cuda"), torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        float8_checks.check_device(torch.device("cuda"), dtype)
    float8_checks.check_device(torch.device("cpu"), torch.float32)


def test_products_that_fail_on_a_new_enough_gpu_are_refused_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some builds of torch have no product with a scale for every row (pytorch/ao#2904)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX")
    monkeypatch.setattr(float8_checks, "float8_product_fault", lambda device: "RuntimeError: no such kernel")
    with pytest.raises(ValueError) as error:
        float8_checks.check_device(torch.device("cuda"), torch.bfloat16)
    what, got, remedy = str(error.value).splitlines()
    assert "a scale for every row" in what and "base_dtype='float8'" in what and "base_dtype='model'" in remedy
    assert "NVIDIA RTX" in got and torch.__version__ in got and got.endswith("RuntimeError: no such kernel.")
    float8_checks.check_device(torch.device("cuda"), torch.float64)  # by the definition


def test_the_setting_is_checked() -> None:
    with pytest.raises(ValueError, match=r"base_dtype has a value .*\n.*'int8'.*\n.*'model' or 'float8'"):
        OombConfig(base_dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Did you mean 'base_dtype'"):
        OombConfig(base_dtyp="float8")  # type: ignore[call-arg]


def test_originals_that_never_run_have_no_copies() -> None:
    """PEFT's ``modules_to_save`` keeps them beside the trained copies, and those of other adapters too."""
    model: Any = lora(target_modules=["q_proj"], modules_to_save=["down_proj", "mlp"])
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj", "mlp"]))
    oomb_accel.enable(model, float8())
    assert "base       12 of 21 linear layers in float8" in oomb_accel.banner(model)
    model(**padded(documents_of(40)).batch).loss.backward()
    copies = attachment_of(model).float8_base
    assert copies is not None and copies.num_layers == 12


def test_autocast_leaves_fp64_alone() -> None:
    """Also in layers that are not fused."""
    layer, x = nn.Linear(16, 32).double().requires_grad_(False), torch.randn(3, 16).double()
    forward = float8_base.Float8Forward(layer, float8_base.Float8Weight.of(layer.weight, float8_base.LastInput()))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(forward(x), forward(x.clone()))
        assert forward(x).dtype == layer(x).dtype == torch.float64
        assert forward(x.float()).dtype == torch.bfloat16
