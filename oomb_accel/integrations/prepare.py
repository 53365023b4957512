"""``accelerator.prepare`` for a model that trains in chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.utils import extract_model_from_parallel
from torch import nn

from oomb_accel.config import OombConfig
from oomb_accel.integrations import engine
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.support import base_model_of, check_checkpointing, checkpointed_modules
from oomb_accel.integrations.switch import switch_on
from oomb_accel.integrations.timeout import set_timeout
from oomb_accel.integrations.versions import check_versions
from oomb_accel.reading import refusal
from oomb_accel.sources import BLOCK, Resolved, Source, gather, resolve

_REFUSED_TYPES = {
    "FSDP": "FSDP shards the parameters that chunks need whole; its gradients would be lost. Use DeepSpeed ZeRO 3 "
    "(accelerate launch --use_deepspeed --zero_stage 3), or DDP (accelerate launch --multi_gpu).",
    "MEGATRON_LM": "Megatron-LM brings its own model and loop. Use DeepSpeed ZeRO 3 with a transformers model.",
    "XLA": "Its compiler traces whole steps. Use GPUs.",
}
_REFUSED_SIZES = ("tp_size", "cp_size", "sp_size", "dp_shard_size")


def prepare(accelerator: Accelerator, *objects: Any, config: OombConfig | Mapping[str, Any] | None = None) -> Any:
    """Switch the model on and hand everything to ``accelerator.prepare``.

    Works in one process, under DDP and under DeepSpeed. Settings come from ``config``, from ``OOMB_`` variables, from
    a preset and from the block of the DeepSpeed config; without any, the defaults hold.

    Args:
        accelerator: any Accelerator; one with an :class:`OombPlugin` too.
        objects: as for ``accelerator.prepare``; one model among them, wrapped by Accelerate already or not.
        config: settings in Python.

    Returns: the prepared objects in the same order; a single one is not in a tuple.

    Raises:
        ValueError: no model or several, a model or a kind of parallelism that chunks cannot be trained with, or
            settings that contradict each other.
    """
    resolved = settings_of(accelerator, config, place="prepare(config=...)")
    return prepare_with(accelerator, accelerator.prepare, objects, _model_among(objects), resolved)


def settings_of(accelerator: Accelerator, config: OombConfig | Mapping[str, Any] | None, *, place: str) -> Resolved:
    """The settings for a model of this accelerator, from everywhere."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return resolve(*gather(None if plugin is None else plugin.deepspeed_config, Source.of_python(config, place)))


def prepare_with(
    accelerator: Accelerator, plain: Callable[..., Any], objects: tuple[Any, ...], model: nn.Module, resolved: Resolved
) -> Any:
    """:func:`prepare` for one model among the objects, by a given ``accelerator.prepare``."""
    check_versions("accelerate", "transformers", "peft")
    reasons = refusals(accelerator)
    if reasons:
        raise ValueError(refusal("Chunks cannot be trained with this Accelerator", reasons))
    if not resolved.config.enabled:
        switch_on(model, resolved)  # says that it stays off
        return plain(*objects)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if _is_wrapped(model):
            raise ValueError(
                "The model is a DeepSpeed engine already; its parameters have been dealt out.\n"
                f"  Got {type(model).__name__}.\n"
                "  Pass the model itself to oomb_accel.prepare, instead of to accelerator.prepare."
            )
        return _under_deepspeed(accelerator, plain, objects, resolved)
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=True)
    check_checkpointing(checkpointed_modules(base_model_of(inner)))
    switch_on(inner, resolved)
    prepared = plain(*objects)
    timeout = set_timeout(inner, resolved.config, micro_steps=accelerator.gradient_accumulation_steps)
    attachment_of(inner).notes.extend(filter(None, (timeout,)))
    return prepared


def refusals(accelerator: Accelerator) -> list[str]:
    """Reasons in an Accelerator why chunks could not be trained with it; empty when there is none."""
    kind = str(accelerator.distributed_type).rsplit(".", 1)[-1]
    reasons = [f"It uses {kind}. {_REFUSED_TYPES[kind]}"] if kind in _REFUSED_TYPES else []
    started = os.environ.get("WORLD_SIZE", "1")
    if accelerator.num_processes == 1 and started not in ("", "1"):
        reasons.append(
            f"It knows one process, and {started} were started: every rank would train on the same documents. "
            "Without a GPU Accelerate has to be told: accelerate.PartialState(backend='gloo') before the Accelerator."
        )
    if accelerator.mixed_precision in ("fp16", "fp8"):
        reasons.append(
            f"mixed_precision is {accelerator.mixed_precision!r}: page gradients of long documents overflow in it. "
            "Use mixed_precision='bf16' (accelerate launch --mixed_precision bf16)."
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in _REFUSED_SIZES:
        size = getattr(parallelism, name, 1) or 1
        if kind != "FSDP" and size > 1:
            reasons.append(
                f"{name} is {size} in its ParallelismConfig: each rank must see whole documents and whole parameters. "
                f"Set {name}=1; several GPUs share the documents (data parallel) or, with ZeRO 3, the parameters."
            )
    return reasons


def _under_deepspeed(
    accelerator: Accelerator, plain: Callable[..., Any], objects: tuple[Any, ...], resolved: Resolved
) -> Any:
    """Let ``deepspeed.initialize`` do it, which Accelerate calls with the whole config."""
    accelerator.state.deepspeed_plugin.deepspeed_config[BLOCK] = resolved.block()
    was_installed = engine.is_installed()
    engine.install()
    try:
        return plain(*objects)
    finally:
        if not was_installed:
            engine.uninstall()


def _model_among(objects: tuple[Any, ...]) -> nn.Module:
    models = [item for item in objects if isinstance(item, nn.Module)]
    if len(models) != 1:
        raise ValueError(
            "prepare() takes the one model that is trained.\n"
            f"  Got {len(models)} models among {len(objects)} objects: "
            f"{', '.join(type(item).__name__ for item in objects)}.\n"
            "  Use oomb_accel.prepare(accelerator, model, optimizer, loader); prepare others by accelerator.prepare."
        )
    return models[0]


def _is_wrapped(model: nn.Module) -> bool:
    return extract_model_from_parallel(model, keep_fp32_wrapper=True) is not model
