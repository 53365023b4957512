"""Tiny models with random weights: 3 layers, hidden size 64, 4 query and 2 KV heads.

Weights are much larger than at a usual initialisation, so that attention is far from uniform and an error in a
single key shows in the loss.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
Model = TypeVar("Model", bound=nn.Module)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {
        "logits_scaling": 1.7,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "embedding_multiplier": 1.4,
    },
    "gemma2": {
        "sliding_window": 8,
        "layer_types": _MIXED,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3_text": {"sliding_window": 8, "layer_types": _MIXED, "query_pre_attn_scalar": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tiny_model(model_type: str = "qwen2", *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A model of a transformers type in fp32 on the CPU, in training mode, with eager attention.

    Args:
        settings: config values that replace the defaults of this file.
    """
    config = AutoConfig.for_model(model_type, **{**_COMMON, **_SPECIAL.get(model_type, {}), **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    _randomise(model, seed)
    return model.train()


def with_lora(model: PreTrainedModel, *, seed: int = 1, **settings: Any) -> PeftModel:
    """The model with LoRA on all linear layers of its blocks; B is random, or A would get no gradient."""
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": list(ALL_LINEAR), "task_type": "CAUSAL_LM", **settings}
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            with torch.no_grad():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    assert isinstance(adapted, PeftModel)
    return adapted


def twin(model: Model) -> Model:
    """An independent copy: one side runs the reference, the other is switched on."""
    return copy.deepcopy(model)


def sgd_step(model: nn.Module, rate: float = 0.05) -> None:
    """Plain gradient descent on what has a gradient; clears the gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
    model.zero_grad(set_to_none=True)


def _randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name or "lm_head" in name:
                parameter.copy_(0.25 * noise)
            elif parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:  # norms keep their own centre, biases theirs at zero
                parameter.add_(0.1 * noise)
