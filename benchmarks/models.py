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

from oomb_accel.integrations.support import base_model_of

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, tie_word_embeddings=False,
    ),
    "qwen2.5-14b": dict(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8,
        vocab_size=152064, tie_word_embeddings=False,
    ),
    "qwen2.5-32b": dict(
        hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8,
        vocab_size=152064, tie_word_embeddings=False,
    ),
    "qwen3-8b": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ),
    "llama-3.1-8b": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False,
    ),
    "tiny": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=False,
    ),
}  # fmt: skip
_KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
"""Classes by the beginning of a shape's name; others are Qwen2."""
LONGEST = 4_194_304


def base_model(shape: str, device: torch.device) -> PreTrainedModel:
    """A model in bf16, all weights trainable."""
    make_config, make_model = _KINDS.get(shape.split("-")[0], (Qwen2Config, Qwen2ForCausalLM))
    config = make_config(
        **SHAPES[shape],
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            base = make_model(config)
    finally:
        torch.set_default_dtype(torch.float32)
    base.config.use_cache = False
    return base.train()


def lora_model(shape: str, device: torch.device, *, rank: int = 16) -> PeftModel:
    """bf16 base weights, LoRA in fp32 on all linears, as PEFT makes them."""
    base = base_model(shape, device)
    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, adapter)
    model.train()
    return model


def use_liger(model: PreTrainedModel | PeftModel, *, fused_loss: bool) -> bool:
    """Liger's norm, RoPE and SwiGLU where it is installed; with ``fused_loss`` also its linear cross entropy."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return False
    base = base_model_of(model)
    MODEL_TYPE_TO_APPLY_LIGER_FN[base.config.model_type](
        model=base,
        rope=True,
        swiglu=True,
        rms_norm=True,
        cross_entropy=False,
        fused_linear_cross_entropy=fused_loss,
    )
    return True
