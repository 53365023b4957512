"""Sizes read from a config are those of the model that transformers makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oomb_accel.integrations.support import model_facts
from oomb_accel.plan import ModelShape, read_shape, shape_of
from oomb_accel.plan.known import KNOWN

TINY: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7, "num_attention_heads": 6, "vocab_size": 96},
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3_moe", {"head_dim": 16, **EXPERTS}),
    ("llama", {}),
    ("llama", {"attention_bias": True}),
    ("mistral", {"sliding_window": 16}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"pad_token_id": 0}),
    ("smollm3", {"pad_token_id": 0}),
    ("olmo2", {}),
    ("granite", {}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16, "sliding_window": 16}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 16}),
]


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_sizes_are_those_of_the_model(model_type: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **TINY, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    written = json.loads(config.to_json_string())  # as save_pretrained does
    for shape in (shape_of(written, "tiny"), read_shape(config)):
        facts = model_facts(model)
        assert shape.num_parameters == model.num_parameters()
        assert shape.windows == facts.windows
        assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (
            facts.num_heads,
            facts.num_kv_heads,
            facts.head_dim,
        )


def test_adapters_are_those_of_peft() -> None:
    from peft import LoraConfig, get_peft_model

    config = AutoConfig.for_model("qwen2", **TINY)
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config),
        LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert read_shape(config).lora_parameters(3) == trainable


# As the models' cards or files say.
COUNTS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_known_models_have_their_number_of_parameters(name: str, count: int) -> None:
    assert read_shape(name).num_parameters == count


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_model_has_a_shape(name: str) -> None:
    shape = read_shape(name)
    assert isinstance(shape, ModelShape) and shape.num_heads % shape.num_kv_heads == 0


def test_windows_of_files_from_before_layer_types() -> None:
    old = {"model_type": "qwen2", **TINY, "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 3}
    assert shape_of(old, "old").windows == (None,) * 7
    assert shape_of({"model_type": "gemma2", **TINY, "sliding_window": 16}, "old").windows[:3] == (16, None, 16)


def test_the_text_part_of_a_larger_model_is_taken() -> None:
    assert shape_of({"model_type": "many", "text_config": {"model_type": "qwen2", **TINY}}, "many").hidden == 48


def test_missing_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"has no num_hidden_layers, intermediate_size \(model_type 'qwen2'\)"):
        shape_of({"model_type": "qwen2", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}, "broken")
