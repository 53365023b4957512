"""Models of real shape with seeded random weights: speed and memory do not depend on the weights."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from oomb_accel.plan.known import KNOWN

_CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
TINY = "tiny"
"""A shape for tests on the CPU."""
SHAPES: dict[str, dict[str, Any]] = {
    **{name: fields for name, fields in KNOWN.items() if fields["model_type"] in _CLASSES},
    TINY: dict(
        model_type="qwen2", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=32768, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Fields of config.json by name: the published sizes without a sliding window or experts, and a tiny one."""
LONGEST = 4_194_304
LORA_RANK = 16


def base_model(shape: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model with positions up to `LONGEST`, all weights trainable."""
    fields = dict(SHAPES[shape])
    make_config, make_model = _CLASSES[fields.pop("model_type")]
    config = make_config(
        **fields | {"max_position_embeddings": LONGEST}, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            base = make_model(config)
    finally:
        torch.set_default_dtype(usual)
    base.config.use_cache = False
    return base.train()


def lora_model(
    shape: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, *, rank: int = LORA_RANK
) -> PeftModel:
    """Base weights in ``dtype``, and adapters as `with_lora` makes them."""
    return with_lora(base_model(shape, device, dtype), rank)


def with_lora(base: PreTrainedModel, rank: int = LORA_RANK) -> PeftModel:
    """LoRA in fp32 on all linear layers but the head, as PEFT makes them."""
    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, adapter)
    model.train()
    return model
