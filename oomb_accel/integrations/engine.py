"""DeepSpeed engines that honour the ``"oomb"`` block: ``deepspeed.initialize`` with checks before and after."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from oomb_accel.config import OombConfig
from oomb_accel.integrations.attachment import STATE, attachment_of
from oomb_accel.integrations.float8_checks import refuse_parts
from oomb_accel.integrations.self_test import self_test
from oomb_accel.integrations.support import base_model_of, check_checkpointing, checkpointed_modules
from oomb_accel.integrations.switch import switch_on
from oomb_accel.integrations.timeout import set_timeout
from oomb_accel.integrations.transformers import disable
from oomb_accel.integrations.versions import check_versions
from oomb_accel.integrations.zero3_layers import gather_whole_layers, keep_adapters_whole
from oomb_accel.reading import refusal
from oomb_accel.sources import BLOCK, Resolved, Source, gather, load_deepspeed_config, resolve

_IN_ARGS = ("deepspeed_config", "deepscale_config")
"""Where a script's arguments name the config."""
_PLAIN = "_oomb_plain"
"""Attribute of our wrapper that holds DeepSpeed's own function."""


def initialize(*args: Any, oomb: OombConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """``deepspeed.initialize`` for a model that trains in chunks.

    Reads the ``"oomb"`` block of the config, environment variables and the preset that ``OOMB_CONFIG`` names,
    switches the model on, and proves under the same ZeRO settings that gradients add up (``self_test``).

    Args:
        args, kwargs: as for ``deepspeed.initialize``.
        oomb: settings in Python; they win over other places, and must not contradict them.

    Returns: engine, optimizer, data loader, learning-rate scheduler.

    Raises:
        ValueError: settings, a model or a DeepSpeed feature that chunks cannot be trained with.
        RuntimeError: another package outside the tested range, or a failed self-test.
    """
    check_versions("deepspeed")
    call = inspect.signature(_plain()).bind(*args, **kwargs)
    config = _config_of(call)
    python = () if oomb is None else (Source.of_python(oomb, "initialize(oomb=...)"),)
    sources = gather(config, *python)
    if not sources:
        raise ValueError(
            f"There is nothing to switch on: no {BLOCK} block.\n"
            f"  Looked for {BLOCK!r} in the DeepSpeed config, for OOMB_ variables, and for oomb=... in the call.\n"
            f'  Add "{BLOCK}": {{"chunk_tokens": 8192}} to the DeepSpeed config, or call deepspeed.initialize.'
        )
    return _initialize(call, config, resolve(*sources))


def install() -> None:
    """Make ``deepspeed.initialize`` honour the block, for code that calls it by itself. Twice is once.

    Accelerate and Trainer look the function up when they need it. A config without a block, where the environment
    has no settings either, is passed on untouched.
    """
    import deepspeed

    keep_shared_memory_clean()
    plain = deepspeed.initialize
    if hasattr(plain, _PLAIN):
        return

    @functools.wraps(plain)
    def honouring(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = inspect.signature(plain).bind(*args, **kwargs)
        config = _config_of(call)
        sources = gather(config)
        if not sources:
            return plain(*args, **kwargs)
        return _initialize(call, config, resolve(*sources))

    setattr(honouring, _PLAIN, plain)
    deepspeed.initialize = honouring


def uninstall() -> None:
    """Undo :func:`install`."""
    import deepspeed

    deepspeed.initialize = _plain()


def is_installed() -> bool:
    """Whether DeepSpeed's own function honours the block."""
    import deepspeed

    return hasattr(deepspeed.initialize, _PLAIN)


def keep_shared_memory_clean() -> None:
    """Without a GPU, let DeepSpeed use gloo. Its shared-memory collectives take 95 s to build and leave 66 MiB in
    /dev/shm per rank and run."""
    import deepspeed

    if deepspeed.get_accelerator().device_name() == "cpu":
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _plain() -> Callable[..., tuple[Any, ...]]:
    import deepspeed

    plain: Callable[..., tuple[Any, ...]] = getattr(deepspeed.initialize, _PLAIN, deepspeed.initialize)
    return plain


def _initialize(call: inspect.BoundArguments, config: dict[str, Any], resolved: Resolved) -> tuple[Any, ...]:
    model: Any = call.arguments.get("model")
    if not resolved.config.enabled:
        switch_on(model, resolved)  # says that it stays off
        return _plain()(*call.args, **call.kwargs)
    check_versions("deepspeed", "transformers", "accelerate", "peft")
    keep_shared_memory_clean()
    _check_auto(config)
    check_setup(config, model, call.arguments.get("mpu"))
    check_checkpointing(checkpointed_modules(base_model_of(model)))
    if resolved.config.base_dtype == "float8" and _stage(config) == 3:
        refuse_parts()
    tested = f"update off by {_self_test(call, config):.1g}" if resolved.config.self_test else "left out"
    was_on = getattr(model, STATE, None) is not None
    switch_on(model, resolved)
    if _stage(config) == 3:
        gather_whole_layers(model)
    _give_config(call, {**keep_adapters_whole(config, model), BLOCK: resolved.block()})
    try:
        engine, *rest = _plain()(*call.args, **call.kwargs)
    except BaseException:
        if not was_on:
            disable(model)
        raise
    timeout = set_timeout(model, resolved.config, micro_steps=engine.gradient_accumulation_steps())
    state = attachment_of(model)
    state.notes.extend(filter(None, (_describe(config), f"self-test  {tested}", timeout)))
    state.optimizer_stands = True
    return (engine, *rest)


def _check_auto(config: Mapping[str, Any], path: str = "") -> None:
    """Refuse "auto" where nobody is left to fill it in: DeepSpeed would fail on it in the middle of a step."""
    for name, value in config.items():
        if isinstance(value, Mapping) and name != BLOCK:
            _check_auto(value, f"{path}{name}.")
        elif value == "auto":
            raise ValueError(
                f'The DeepSpeed config has "auto" for {path}{name}.\n'
                "  Accelerate and Trainer fill that in; deepspeed.initialize by itself does not.\n"
                f"  Write a value, or remove {path}{name}."
            )


def _describe(config: Mapping[str, Any]) -> str:
    """The banner's line about the engine."""
    import deepspeed

    zero = config.get("zero_optimization") or {}
    devices = {name: (zero.get(f"offload_{name}") or {}).get("device", "none") for name in ("optimizer", "param")}
    offloaded = [f"{name} on {device}" for name, device in devices.items() if device != "none"]
    precision = "bf16" if _is_on(config, "bf16") else "fp32"
    return "engine     " + ", ".join(
        [f"DeepSpeed {deepspeed.__version__}", f"ZeRO {_stage(config)}", precision, *offloaded]
    )


def check_setup(config: Mapping[str, Any], model: object, mpu: object = None) -> None:
    """Refuse a DeepSpeed setup that chunks cannot be trained in.

    Args:
        config: the DeepSpeed config.
        model, mpu: as for ``deepspeed.initialize``.

    Raises:
        ValueError: with all reasons.
    """
    if reasons := _refusals(config, model, mpu):
        raise ValueError(refusal("Chunks cannot be trained with this DeepSpeed setup", reasons))


def _refusals(config: Mapping[str, Any], model: object, mpu: object) -> list[str]:
    reasons = []
    if _is_on(config, "fp16") or _is_on(config, "amp"):
        reasons.append(
            "fp16 is on: its loss scale grows until gradients overflow, and page gradients of long documents overflow "
            'first. Set "bf16": {"enabled": true}, or train in fp32.'
        )
    if type(model).__name__ in ("PipelineModule", "DualPipeVModule"):
        reasons.append("Pipeline parallelism cuts the model into stages. Pass the model itself, and use ZeRO 3.")
    elif not isinstance(model, nn.Module):
        reasons.append(f"model is {type(model).__name__}. Pass model=, a causal language model of transformers.")
    sizes = {
        "tensor_parallel.autotp_size": (config.get("tensor_parallel") or {}).get("autotp_size"),
        "sequence_parallel_size": config.get("sequence_parallel_size"),
        "mpu's sequence parallel size": _size(mpu, "get_sequence_parallel_world_size"),
        "mpu's model parallel size": _size(mpu, "get_model_parallel_world_size"),
    }
    for name, size in sizes.items():
        if isinstance(size, int) and size > 1:
            reasons.append(f"{name} is {size}: each rank must see whole documents and all heads. Set it to 1.")
    if _is_on(config, "hybrid_engine"):
        reasons.append("hybrid_engine is on: it swaps modules between steps. Remove it.")
    if (config.get("compile") or {}).get("deepcompile"):
        reasons.append('compile.deepcompile is on: it traces one graph per step. Set "deepcompile": false.')
    return reasons


def _config_of(call: inspect.BoundArguments) -> dict[str, Any]:
    """The DeepSpeed config of a call, from any of the places where DeepSpeed looks."""
    arguments = call.arguments
    script = arguments.get("args")
    for config in (
        arguments.get("config"),
        arguments.get("config_params"),
        *(getattr(script, name, None) for name in _IN_ARGS),
    ):
        if config is not None:
            return load_deepspeed_config(config)
    return {}


def _give_config(call: inspect.BoundArguments, config: dict[str, Any]) -> None:
    """Have a call use this config, and none from any of those places."""
    arguments = call.arguments
    arguments["config"] = config
    arguments.pop("config_params", None)
    script = arguments.get("args")
    if any(getattr(script, name, None) is not None for name in _IN_ARGS):
        script = arguments["args"] = copy.copy(script)  # the caller's own stays as it is
        for name in _IN_ARGS:
            if hasattr(script, name):
                setattr(script, name, None)


def _stage(config: Mapping[str, Any]) -> int:
    return int((config.get("zero_optimization") or {}).get("stage", 0))


def _is_on(config: Mapping[str, Any], name: str) -> bool:
    return (config.get(name) or {}).get("enabled") is True


def _size(mpu: object, method: str) -> object:
    return getattr(mpu, method)() if hasattr(mpu, method) else None


def _self_test(call: inspect.BoundArguments, config: Mapping[str, Any]) -> float:
    import deepspeed

    deepspeed.init_distributed(
        dist_backend=deepspeed.get_accelerator().communication_backend_name(),
        distributed_port=call.arguments.get("distributed_port", deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT),
        dist_init_required=call.arguments.get("dist_init_required"),
    )
    return self_test(config, _plain())  # DeepSpeed's own: the tiny model brings settings of its own
