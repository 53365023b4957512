"""The Accelerator of a run, as `accelerate launch` asked for it, and what a recipe says to DeepSpeed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, GradientAccumulationPlugin, InitProcessGroupKwargs

from oomb_accel.integrations.engine import keep_shared_memory_clean
from oomb_accel.integrations.prepare import refusals
from oomb_accel.integrations.versions import check_versions
from oomb_accel.reading import refusal
from oomb_accel.sources import launched_config, load_deepspeed_config
from oomb_accel.training.recipe import Recipe

START_TIMEOUT = timedelta(minutes=60)
"""Longest wait of one rank for another while models are loaded; afterwards the expected time of a step counts."""


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The Accelerator, with one optimizer step being what the recipe says, whatever was said at launch.

    Raises:
        ValueError: the launch asks for something that chunks cannot work with, or contradicts the recipe.
    """
    ranks = launched_processes()
    plugin = deepspeed_plugin(recipe, ranks)
    precision = asked_precision(recipe, plugin)
    if precision == "auto":
        precision = "bf16" if on_gpu() else "no"
    processes = InitProcessGroupKwargs(timeout=START_TIMEOUT)
    if plugin is not None:
        if clips_itself(plugin.zero_stage, precision):
            plugin.deepspeed_config["gradient_clipping"] = 0.0
        if not torch.cuda.is_available():
            processes.backend = "gloo"  # nobody else chooses one
    accelerator = Accelerator(
        # Without a GPU Accelerate would make several runs of one process each, unless it is told.
        cpu=plugin is None and not torch.cuda.is_available() and ranks > 1,
        mixed_precision=precision,
        deepspeed_plugin=plugin,
        # Losses are shares of the whole step's mean already, so Accelerate must not divide them; it reads the number
        # for DeepSpeed.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1 if plugin is None else recipe.gradient_accumulation_steps
        ),
        kwargs_handlers=[processes],
    )
    if reasons := refusals(accelerator):
        raise ValueError(refusal("This launch does not fit training in chunks", reasons))
    return accelerator


def clips_itself(stage: int | None, precision: str) -> bool:
    """Whether the loop has to measure and clip gradients. DeepSpeed does it, but in fp32 without ZeRO it neither
    tells the norm nor looks whether it is a number."""
    return stage is None or (stage == 0 and precision == "no")


def zero_stage(accelerator: Accelerator) -> int | None:
    """ZeRO stage of a run under DeepSpeed, None without DeepSpeed."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return None
    return int(accelerator.state.deepspeed_plugin.zero_stage)


def strategy(accelerator: Accelerator) -> str:
    """How the state of training is spread over ranks, in a word."""
    stage = zero_stage(accelerator)
    return "replicas" if stage is None else f"ZeRO {stage}"


def on_gpu() -> bool:
    """Whether this launch trains on GPUs of this machine."""
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true"


def launched_processes() -> int:
    """Processes of this launch.

    Raises:
        ValueError: the environment says something that is no number.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not (text.isdecimal() and len(text) < 9 and int(text) > 0):
        raise ValueError(
            f"WORLD_SIZE in the environment is no number of processes.\n  Got {text!r}.\n"
            "  Unset it, or set WORLD_SIZE=1."
        )
    return int(text)


def deepspeed_plugin(recipe: Recipe, ranks: int) -> DeepSpeedPlugin | None:
    """What was launched, with the recipe's numbers in it; None without DeepSpeed.

    Args:
        ranks: that train together.

    Raises:
        ValueError: the recipe and the DeepSpeed config contradict each other, or the latter cannot be read.
        RuntimeError: a DeepSpeed outside the tested range.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    check_versions("deepspeed", "accelerate")
    keep_shared_memory_clean()
    # It calls collectives by names that new releases of torch deprecate, with a warning at every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    file = launched_config()
    written = load_deepspeed_config(file) if file else {}
    plugin = DeepSpeedPlugin()
    config = plugin.deepspeed_config
    place = file or "deepspeed_config of accelerate launch"
    for block in ("optimizer", "scheduler"):
        if block in config:
            raise ValueError(
                f"The recipe sets the {block}, and so does {place}.\n  Got {config[block]!r} there.\n"
                f"  Remove {block} from {place}; learning_rate and the like are settings of the recipe."
            )
    micro, accumulation = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    if config.get("gradient_accumulation_steps") == 1 and written.get("gradient_accumulation_steps") != 1:
        config["gradient_accumulation_steps"] = "auto"  # what Accelerate writes when nobody has said anything
    _agree(config, place, "gradient_accumulation_steps", accumulation, "gradient_accumulation_steps")
    _agree(config, place, "train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size")
    _agree(config, place, "train_batch_size", micro * accumulation * ranks, "batch size x accumulation x ranks")
    _agree(config, place, "gradient_clipping", recipe.max_grad_norm, "max_grad_norm")
    zero = config["zero_optimization"]
    if plugin.zero_stage == 3 and recipe.lora_r == 0:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # how the result gets onto one rank
    if not torch.cuda.is_available():
        config.setdefault("zero_force_ds_cpu_optimizer", False)  # its own AdamW would have to be compiled first
    return plugin


def _agree(config: dict[str, Any], place: str, key: str, value: float, setting: str) -> None:
    """Put the recipe's value in, unless somebody has written another one.

    Raises:
        ValueError: naming both places.
    """
    said = config.get(key, "auto")
    if said not in ("auto", value):
        raise ValueError(
            f"The recipe and {place} contradict each other.\n"
            f"  Got {setting}={value} in the recipe, {key}={said} in {place}.\n"
            f'  Set {key} to {value} or to "auto" there, or change the recipe.'
        )
    config[key] = value


def asked_precision(recipe: Recipe, plugin: DeepSpeedPlugin | None) -> str:
    """``mixed_precision`` as the recipe and the launch say it together. DeepSpeed casts the model by a setting of its
    own.

    Raises:
        ValueError: they contradict each other, or ask for fp16 or fp8.
    """
    config: Mapping[str, Any] = {} if plugin is None else plugin.deepspeed_config
    if config.get("fp16", {}).get("enabled") is True:
        raise ValueError(
            "Training in fp16 is not supported: its loss scaling does not fit a loss made of chunks.\n"
            "  Got fp16.enabled=true in the DeepSpeed config.\n  Set bf16.enabled to true and fp16.enabled to false."
        )
    said = config.get("bf16", {}).get("enabled", "auto")
    if said == "auto":
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
        if launched in ("fp16", "fp8"):
            raise ValueError(
                f"Training in {launched} is not supported.\n"
                "  Got it from mixed_precision of accelerate launch.\n  Set mixed_precision: bf16 there."
            )
        return recipe.mixed_precision
    written = "bf16" if said else "no"
    if recipe.mixed_precision not in ("auto", written):
        raise ValueError(
            "The recipe and the DeepSpeed config contradict each other.\n"
            f"  Got mixed_precision={recipe.mixed_precision} in the recipe, bf16.enabled={str(said).lower()} there.\n"
            f'  Set mixed_precision: {written}, or bf16.enabled to "auto".'
        )
    return written
