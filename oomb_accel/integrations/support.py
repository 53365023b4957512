"""Which models chunk recurrence is exact for, and what it must know about them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from oomb_accel.config import OombConfig
from oomb_accel.integrations.float8_base import float8_of
from oomb_accel.integrations.parameters import parameters_in_parts
from oomb_accel.plan.limits import check_float8, check_page_kernels, sparse_layers_of
from oomb_accel.plan.sizes import gathered_numbers
from oomb_accel.setting_text import dtype_name

SUPPORTED_MODEL_TYPES = frozenset(
    {
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
    }
)
"""Model types whose parity with full attention is tested in this repository."""

_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_ATTENDS_TO_EVERYTHING = frozenset({"full_attention"})
_ATTENDS_IN_WINDOW = frozenset({"sliding_attention"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the recurrence needs to know about a model; read from its config."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Sliding window in tokens of each layer; None where the layer attends to everything."""


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT model, or the model itself.

    Raises:
        ValueError: neither of the two.
    """
    inner = getattr(model, "get_base_model", None)
    base = model if inner is None else inner()
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model.\n"
            "  enable() takes a causal language model of transformers, or a PEFT model around one.\n"
            "  Pass the model before it is wrapped by DDP, FSDP or DeepSpeed, or compiled."
        )
    return base


def model_facts(base: PreTrainedModel) -> ModelFacts:
    """Read the facts from the model's config."""
    config = base.config.get_text_config()
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return ModelFacts(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        windows=_windows(config),
    )


def sparse_layers(facts: ModelFacts, config: OombConfig) -> frozenset[int]:
    """Layers that select pages.

    Raises:
        ValueError: as `sparse_layers_of`.
    """
    return sparse_layers_of(facts.windows, config.dense_layers) if config.attention == "sparse" else frozenset()


def compute_dtype(base: PreTrainedModel, device: torch.device) -> torch.dtype:
    """What attention computes in: autocast's type where it is on now, else that of the weights."""
    if torch.is_autocast_enabled(device.type) and base.dtype != torch.float64:  # which autocast leaves as it is
        return torch.get_autocast_dtype(device.type)
    return base.dtype


def refusals(model: nn.Module, base: PreTrainedModel) -> list[str]:
    """Reasons why chunk recurrence would not be exact for this model; empty when there is none.

    Each names the layer or feature and what to do about it.
    """
    config = base.config.get_text_config()
    reasons = []
    if "logits_to_keep" not in inspect.signature(base.forward).parameters or base.get_output_embeddings() is None:
        reasons.append(
            f"{type(base).__name__} is not a causal language model with a head (no logits_to_keep in its forward). "
            "Load it with AutoModelForCausalLM."
        )
    if not getattr(base, "_supports_attention_backend", False):
        reasons.append(
            f"{type(base).__name__} does not call attention through transformers' AttentionInterface. "
            "Use a model class that does, or a newer transformers."
        )
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind not in _ATTENDS_TO_EVERYTHING | _ATTENDS_IN_WINDOW:
            reasons.append(
                f"Layer {index} is of type {kind!r}; only full and sliding attention are supported. Use another model."
            )
            break
    for name in _ATTENTION_DROPOUTS:
        if getattr(config, name, 0.0):
            reasons.append(
                f"{name} is {getattr(config, name)}. Set config.{name} = 0.0; "
                "dropout elsewhere (LoRA, residual) is supported."
            )
    reasons += switched_on_outputs(base)
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        reasons.append(
            "The model attends in both directions; chunk recurrence needs causal attention. "
            "Use a causal language model."
        )
    devices = {str(device) for device in (getattr(base, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        reasons.append(
            f"The model is spread over {', '.join(sorted(devices))}. Load it onto one device, "
            "for instance with device_map={'': 0}."
        )
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        if getattr(adapter, "is_prompt_learning", False):
            reasons.append(
                f"Adapter {name!r} is of type {adapter.peft_type}, which changes the sequence. Use LoRA instead."
            )
    return reasons


def switched_on_outputs(base: PreTrainedModel) -> list[str]:
    """Reasons in the config, as it is now, why a step would have to return more than a loss."""
    config = base.config.get_text_config()
    reasons = []
    if getattr(config, "output_router_logits", False):
        reasons.append(
            "output_router_logits is on: its auxiliary loss is not a sum over chunks. "
            "Set config.output_router_logits = False."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            reasons.append(f"{name} is on in the config: it costs memory in the length. Set config.{name} = False.")
    return reasons


def check_device(base: PreTrainedModel, tokens: Tensor) -> None:
    """Refuse inputs on another device than the model, as replicas of DataParallel get them.

    Raises:
        ValueError: naming both devices.
    """
    # Not by .weight: within a forward under ZeRO 3 that would gather it, on this rank alone perhaps.
    home = next(base.get_input_embeddings().parameters()).device
    if tokens.device != home:
        raise ValueError(
            f"The batch is on {tokens.device}, the model on {home}.\n"
            "  Under torch's DataParallel (several visible GPUs, no launcher) chunks cannot work.\n"
            f"  Move the batch with .to({str(home)!r}), start with accelerate launch, or set CUDA_VISIBLE_DEVICES=0."
        )


def check_kernels(facts: ModelFacts, config: OombConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse pages that the device's kernels cannot read.

    Args:
        dtype: that attention computes in.

    Raises:
        ValueError: naming the setting to change.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return  # runs in plain torch
    if config.page_dtype == "float8":
        check_float8_device("page_dtype", device)
    if sparse_layers(facts, config):
        pages = "float8" if config.page_dtype == "float8" else dtype_name(dtype)
        check_page_kernels(pages, facts.head_dim, config.page_tokens, config.q_block)


def check_float8_device(setting: str, device: torch.device) -> None:
    """Refuse a GPU without 8-bit floats.

    Raises:
        ValueError: as `check_float8`.
    """
    if device.type == "cuda":  # elsewhere it runs by the definition, in plain torch
        check_float8(setting, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def decoder_layers(base: PreTrainedModel) -> list[nn.Module]:
    """The blocks of the language model."""
    num_layers = base.config.get_text_config().num_hidden_layers
    stacks = (m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers)
    return [layer for stack in stacks for layer in stack]


def is_plain_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer that nobody watches, as ZeRO 3 does that gathers module by module, with a weight
    that is no more than a tensor."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    everywhere = _has_any_global_hook()
    changed = "forward" in vars(module) and float8_of(module) is None
    if type(module) is not nn.Linear or any(hooks) or everywhere or changed:
        return False
    return type(module.weight) is nn.Parameter  # looked at last: where ZeRO 3 watches, looking gathers it


def linear_places(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every linear layer inside, as the module that owns it and its name there, without those that adapters bring and
    those that PEFT keeps beside the copies that run in their stead (``modules_to_save``)."""
    aside: set[nn.Module] = set()
    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            brought = (getattr(part, name, None) for name in part.adapter_layer_names)
            aside.update(inner for one in brought if isinstance(one, nn.Module) for inner in one.modules())
        elif isinstance(part, ModulesToSaveWrapper):
            copies = dict(part.modules_to_save.items())
            idle = [copy for name, copy in copies.items() if name not in part.active_adapters]
            if len(idle) < len(copies):
                idle.append(part.original_module)
            aside.update(inner for one in idle for inner in one.modules())
    return [
        (owner, name)
        for owner in module.modules()
        if owner not in aside
        for name, child in owner.named_children()
        if isinstance(child, nn.Linear) and child not in aside
    ]


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    """The layers of `linear_places`."""
    return [layer for owner, name in linear_places(module) if isinstance(layer := owner._modules[name], nn.Linear)]


def whole_numel(parameter: Any) -> int:
    """Elements of a parameter, also where ZeRO 3 holds only a part of it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def gathered_bytes(model: nn.Module) -> int:
    """Device bytes that gathered parameters may take at once under ZeRO 3; 0 otherwise."""
    partitioned: list[Any] = parameters_in_parts(model)
    units: Counter[int] = Counter()  # those of a leaf come together, see `zero3_layers`
    for parameter in partitioned:
        units[id(getattr(parameter, "ds_z3_leaf_module", parameter))] += whole_numel(parameter)
    numbers = gathered_numbers(units.total(), max(units.values(), default=0))
    return numbers * max((p.element_size() for p in partitioned), default=0)


def checkpointed_modules(base: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Modules that gradient checkpointing can be switched on for, now or later."""
    return tuple(module for module in base.modules() if hasattr(module, "gradient_checkpointing"))


def check_checkpointing(modules: Iterable[nn.Module]) -> None:
    """Refuse reentrant gradient checkpointing, which trains silently wrong inside nested passes.

    Raises:
        ValueError: reentrant checkpointing is switched on.
    """
    for module in modules:
        function = getattr(module, "_gradient_checkpointing_func", None)
        if module.gradient_checkpointing and getattr(function, "keywords", {}).get("use_reentrant", False):
            raise ValueError(
                f"Reentrant gradient checkpointing is on ({type(module).__name__}); its gradients would be wrong "
                "here.\n  Chunks already bound the activations, so checkpointing is rarely needed.\n"
                "  Turn it off, or pass gradient_checkpointing_kwargs={'use_reentrant': False}."
            )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind in _ATTENDS_IN_WINDOW else None for kind in kinds)
