"""Case 10: adapters of every kind; what is saved is what plain PEFT would have saved."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import oomb_accel
from tests.harness.batches import documents_of, padded
from tests.harness.models import ALL_LINEAR, sgd_step, tiny_model, twin, with_lora
from tests.harness.parity import check_parity, chunked, config, reference
from tests.harness.tolerance import assert_same_gradients, assert_same_values, assert_twice_plain

ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "lm_head": {"target_modules": [*ALL_LINEAR, "lm_head"]},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "embeddings-and-head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "lora-on-embeddings": {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "one-layer": {"target_modules": ["v_proj"], "layers_to_transform": [1]},
}


@pytest.mark.parametrize("embeds", [True, False])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_gradients(adapter: str, embeds: bool) -> None:
    model = with_lora(tiny_model(), **ADAPTERS[adapter])
    check_parity(model, padded(documents_of(50, 9)), embeds=embeds)


@pytest.mark.parametrize("trainable", ["full", "lora", "norms"])
def test_tied_embeddings(trainable: str) -> None:
    model: Any = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if trainable == "lora":
        model = with_lora(model)
    elif trainable == "norms":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    check_parity(model, padded(documents_of(50, 9)), config(keep_last_graph=False))


def test_tied_embeddings_that_are_trained_beside_lora() -> None:
    model = with_lora(tiny_model(tie_word_embeddings=True), modules_to_save=["embed_tokens"])
    check_parity(model, padded(documents_of(50, 9)))


def test_a_bare_model_with_frozen_layers() -> None:
    model = tiny_model()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.lm_head.requires_grad_(False)
    check_parity(model, padded(documents_of(50, 9)))


def test_two_adapters_only_the_active_one_is_trained() -> None:
    model = with_lora(tiny_model())
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("default")
    ours, _ = check_parity(model, padded(documents_of(50)))
    assert not any("other" in name for name in ours.gradients)


def settings_of(folder: Path) -> dict[str, Any]:
    """What PEFT saved beside the weights; it keeps the target modules as a set, in no order."""
    settings: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in settings.items()}


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=documents_of(30, seed=5)[0].ids[None]).logits


@pytest.mark.parametrize("adapter", ["all-linear", "lm_head", "embeddings", "rslora", "dora"])
def test_a_saved_adapter_is_plain_pefts(adapter: str, tmp_path: Path) -> None:
    plain = with_lora(tiny_model(), **ADAPTERS[adapter])
    trained = twin(plain)
    oomb_accel.enable(trained, config())
    trained(**padded(documents_of(50, 9)).batch).loss.backward()
    sgd_step(trained)
    trained.save_pretrained(str(tmp_path / "ours"))  # while switched on
    plain.save_pretrained(str(tmp_path / "plain"))
    ours, wanted = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "plain"))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in wanted.items()}
    names = {p.name for p in (tmp_path / "plain").iterdir()}
    assert {p.name for p in (tmp_path / "ours").iterdir()} == names
    assert settings_of(tmp_path / "ours") == settings_of(tmp_path / "plain")

    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "ours")
    before = logits_of(with_lora(tiny_model(), **ADAPTERS[adapter]))
    after = logits_of(loaded)
    assert (after - before).abs().max() > 1e-3, "the step changed the model"
    assert_same_values(logits_of(trained), after, "logits while switched on")
    merged = loaded.merge_and_unload()
    assert_same_gradients({"logits after merging": logits_of(merged)}, {"logits after merging": after})


def test_a_saved_base_model_is_plain(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "plain")
    oomb_accel.enable(model, config())
    model.save_pretrained(tmp_path / "ours")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_merging_while_switched_on() -> None:
    model = with_lora(tiny_model())
    wanted = logits_of(twin(model))
    oomb_accel.enable(model, config())
    merged = model.merge_and_unload()
    assert_same_gradients({"logits after merging": logits_of(merged)}, {"logits after merging": wanted})


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_base_in_4_bits(tmp_path: Path) -> None:
    tiny_model(head_dim=64, hidden_size=128).save_pretrained(tmp_path)

    def load(dtype: torch.dtype) -> PeftModel:
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
        base = AutoModelForCausalLM.from_pretrained(
            tmp_path,
            quantization_config=quantization,
            device_map={"": 0},
            dtype=dtype,
            attn_implementation="eager",
        )
        return with_lora(base)

    documents = documents_of(500, 60)
    exact = reference(load(torch.float32), documents)
    plain = reference(load(torch.bfloat16), documents)
    ours = chunked(load(torch.bfloat16), padded(documents), config(128, 32))
    assert_twice_plain(ours.low_precision_view(), plain.low_precision_view(), exact.low_precision_view())
