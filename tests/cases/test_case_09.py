"""Case 9: model families, head sizes and groupings are exact; what is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import oomb_accel
from oomb_accel.integrations.support import SUPPORTED_MODEL_TYPES
from tests.harness.batches import documents_of, packed, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import assert_same_result, check_parity, chunked, config, reference

TYPES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
    "factor": 32.0,
}


def test_every_type_on_the_list_is_tested_here() -> None:
    assert set(TYPES) == SUPPORTED_MODEL_TYPES


@pytest.mark.parametrize("model_type", TYPES)
def test_parity(model_type: str) -> None:
    check_parity(tiny_model(model_type), padded(documents_of(50, 5, 33), side="left"), embeds=True)


@pytest.mark.parametrize("model_type", TYPES)
def test_parity_of_packed_rows_with_trainable_embeddings(model_type: str) -> None:
    settings = config(keep_outputs=False, keep_last_graph=False)
    check_parity(tiny_model(model_type), packed(documents_of(21, 8, 34)), settings)


@pytest.mark.parametrize("model_type", [t for t in TYPES if t not in ("phi3", "qwen3_moe")])
def test_parity_with_lora(model_type: str) -> None:
    check_parity(with_lora(tiny_model(model_type)), padded(documents_of(50, 9)))


def test_parity_with_lora_on_fused_projections() -> None:
    model = with_lora(tiny_model("phi3"), target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
    check_parity(model, padded(documents_of(50, 9)))


def test_parity_with_lora_on_the_attention_of_a_mixture_of_experts() -> None:
    model = with_lora(tiny_model("qwen3_moe"), target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    check_parity(model, padded(documents_of(50, 9)))


@pytest.mark.parametrize("window", [3, 4, 5, 8, 20, 64])
@pytest.mark.parametrize("chunk", [8, 16])
def test_windows_that_cross_chunk_borders(window: int, chunk: int) -> None:
    model = tiny_model("mistral", sliding_window=window)
    check_parity(model, padded(documents_of(75)), config(chunk, 4), embeds=True)


@pytest.mark.parametrize("window", [1, 2, 8])
def test_windows_of_packed_rows(window: int) -> None:
    model = tiny_model("mistral", sliding_window=window)
    check_parity(model, packed(documents_of(21, 8, 34, 3, 40)), config(12, 5))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_windows_and_full_layers_in_turn(attention: str) -> None:
    model = tiny_model(
        "qwen3",
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    )
    wanted = reference(twin(model), documents_of(50))
    model.set_attn_implementation(attention)
    assert_same_result(chunked(model, padded(documents_of(50))), wanted)


@pytest.mark.parametrize("rope", [LLAMA3, YARN])
def test_rope_scalings_that_do_not_depend_on_the_length(rope: dict[str, Any]) -> None:
    model = tiny_model("llama", max_position_embeddings=128, rope_parameters=rope)
    check_parity(model, padded(documents_of(90, 10)), embeds=True)


@pytest.mark.parametrize("lengths", [(20,), (90,), (20, 90), (90, 20, 60)])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_rope_scalings_that_depend_on_the_length(kind: str, lengths: tuple[int, ...], layout: str) -> None:
    """Each document as it would be alone in a fresh model: below and above the original range."""
    if kind == "dynamic":
        model = tiny_model("llama", max_position_embeddings=32, rope_parameters=DYNAMIC)
    else:
        model = tiny_model("phi3", max_position_embeddings=1024, rope_parameters=LONGROPE)
    documents = documents_of(*lengths)
    ours = chunked(twin(model), padded(documents) if layout == "rows" else packed(documents), embeds=True)
    fresh = twin(model)
    rotary = twin(model.model.rotary_emb)

    def forget() -> None:
        fresh.model.rotary_emb = twin(rotary)

    assert_same_result(ours, reference(fresh, documents, embeds=True, before_each=forget))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    model = tiny_model("llama", head_dim=head_dim, num_hidden_layers=2)
    check_parity(model, padded(documents_of(40)), embeds=True)


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("model_type", ["qwen2", "gemma2"])
def test_query_heads_per_kv_head(group: int, model_type: str) -> None:
    model = tiny_model(
        model_type,
        num_attention_heads=2 * group,
        num_key_value_heads=2,
        hidden_size=16 * group,
        head_dim=8,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
    )
    check_parity(model, padded(documents_of(40)), embeds=True)


def test_scaled_and_capped_logits_are_those_of_the_model() -> None:
    """The loss would be another one without what the model does behind its head."""
    for model_type, plain in (
        ("granite", {"logits_scaling": 1.0}),
        ("gemma2", {"final_logit_softcapping": None}),
    ):
        documents = documents_of(40)
        ours = chunked(tiny_model(model_type), padded(documents))
        assert abs(ours.loss - chunked(tiny_model(model_type, **plain), padded(documents)).loss) > 1e-2


# Refusals: at enable, by name, with a remedy.


def refused(model: PreTrainedModel | peft.PeftModel, *texts: str) -> None:
    with pytest.raises(ValueError) as caught:
        oomb_accel.enable(model, config())
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    assert "forward" not in vars(model), "a refused model is left as it was"


def other_model(model_type: str, **settings: Any) -> PreTrainedModel:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    model_config = AutoConfig.for_model(model_type, **{**small, **settings})
    return AutoModelForCausalLM.from_config(model_config, attn_implementation="eager").train()


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mamba", {"state_size": 4}),
        ("falcon_h1", {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
        ("gpt2", {"n_head": 4, "n_positions": 64, "attn_pdrop": 0.1}),
        ("bloom", {"n_head": 4}),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(model_type: str, settings: dict[str, Any]) -> None:
    model = other_model(model_type, **settings)
    with pytest.raises(ValueError, match=r"does not support") as caught:
        oomb_accel.enable(model, config())
    assert model_type in str(caught.value) or type(model).__name__ in str(caught.value)


def test_attention_sinks_are_refused() -> None:
    settings: dict[str, Any] = {
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "pad_token_id": 0,
    }
    refused(other_model("gpt_oss", **settings), "GptOss")


def test_a_model_without_a_head_is_refused() -> None:
    refused(tiny_model().model, "Qwen2Model", "AutoModelForCausalLM")


def test_a_module_that_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)Linear is not a transformers model.*before it is wrapped"):
        oomb_accel.enable(torch.nn.Linear(2, 2), config())


@pytest.mark.parametrize("model_type", ["qwen2", "granite"])
def test_attention_dropout_is_refused(model_type: str) -> None:
    model = tiny_model(model_type, attention_dropout=0.1)
    refused(model, "attention_dropout is 0.1", "config.attention_dropout = 0.0")


def test_attention_dropout_set_later_is_refused_in_the_step() -> None:
    """transformers reads it from the layer, which keeps its own copy."""
    model = tiny_model()
    model.model.layers[1].self_attn.attention_dropout = 0.2
    with pytest.raises(RuntimeError, match=r"(?s)Layer 1.*dropout 0.2.*attention_dropout = 0.0"):
        chunked(model, padded(documents_of(30)))


def test_the_auxiliary_loss_of_a_mixture_of_experts_is_refused() -> None:
    refused(tiny_model("qwen3_moe", output_router_logits=True), "output_router_logits", "False")


def test_asking_for_the_auxiliary_loss_in_a_call_is_refused() -> None:
    model = oomb_accel.enable(tiny_model("qwen3_moe"), config())
    with pytest.raises(ValueError, match="output_router_logits"):
        model(**padded(documents_of(30)).batch, output_router_logits=True)


def test_switching_the_auxiliary_loss_on_later_is_refused() -> None:
    model = oomb_accel.enable(tiny_model("qwen3_moe"), config())
    model.config.output_router_logits = True
    with pytest.raises((ValueError, RuntimeError), match="output_router_logits"):
        model(**padded(documents_of(30)).batch)


@pytest.mark.parametrize(
    "make",
    [
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
)
def test_prompt_learning_is_refused(make: Callable[[], peft.PeftConfig]) -> None:
    model = peft.get_peft_model(tiny_model(), make())
    refused(model, "TUNING", "LoRA")


def test_bidirectional_attention_is_refused() -> None:
    refused(tiny_model("gemma3_text", use_bidirectional_attention=True), "both directions")


def test_an_unknown_layer_type_names_the_layer() -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    refused(model, "Layer 1", "chunked_attention")


def test_a_layer_that_attends_otherwise_than_its_config_says_is_refused_in_the_step() -> None:
    model = tiny_model("mistral")
    model.config.sliding_window = None
    oomb_accel.enable(model, config())
    model.config.sliding_window = 8
    with pytest.raises(RuntimeError, match=r"(?s)Layer 0.*sliding_window=8"):
        model(**padded(documents_of(30)).batch)


@pytest.mark.parametrize("reentrant", [True])
def test_reentrant_checkpointing_is_refused_in_training(reentrant: bool) -> None:
    model = with_lora(tiny_model())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with pytest.raises(ValueError, match=r"(?s)Reentrant gradient checkpointing.*'use_reentrant': False"):
        chunked(model, padded(documents_of(30)))


def test_switching_on_twice_is_an_error_and_off_twice_is_not() -> None:
    model = oomb_accel.enable(tiny_model(), config())
    with pytest.raises(ValueError, match=r"(?s)already on.*disable"):
        oomb_accel.enable(model, config())
    oomb_accel.disable(model)
    oomb_accel.disable(model)
    assert "forward" not in vars(model)
