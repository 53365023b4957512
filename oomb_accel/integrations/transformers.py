"""Switching chunk recurrence on and off for a transformers model.

``enable`` replaces the *instance's* forward. Called with labels, it makes a stream of the batch and runs the
recurrence; from outside that is one forward and one backward. Any other call passes through.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from oomb_accel.config import OombConfig
from oomb_accel.integrations import attention_interface
from oomb_accel.integrations.agreement import is_partitioned, refuse_passes
from oomb_accel.integrations.attachment import STATE, Attachment
from oomb_accel.integrations.banner import describe, say
from oomb_accel.integrations.step import chunked_step
from oomb_accel.integrations.support import SUPPORTED_MODEL_TYPES, base_model_of, model_facts, refusals
from oomb_accel.integrations.versions import check_versions
from oomb_accel.integrations.wrapped import chunk_forward_of, step_context_of
from oomb_accel.plan.limits import check_page_kernels
from oomb_accel.progress import ChunkEvent, ProgressLine
from oomb_accel.reading import refusal
from oomb_accel.setting_text import dtype_name
from oomb_accel.sources import Source, resolve, surroundings

logger = logging.getLogger("oomb_accel")
Model = TypeVar("Model", bound=nn.Module)


def enable(
    model: Model, config: OombConfig | None = None, *, on_progress: Callable[[ChunkEvent], None] | None = None
) -> Model:
    """Switch chunk recurrence on for a model, in place.

    Args:
        model: a transformers causal language model, or a PEFT model around one, not yet wrapped by DDP and the like.
        config: the settings; defaults if left out. ``OOMB_`` variables and the preset of ``OOMB_CONFIG`` add to them.
        on_progress: called after every chunk of every step; replaces the progress line.

    Returns:
        The same model.

    Raises:
        ValueError: the model, or something switched on in it, is not supported; the reason names it. Or settings in the
            environment contradict the config.
    """
    config = OombConfig() if config is None else config
    if not isinstance(config, OombConfig):
        raise ValueError(
            f"enable() takes an OombConfig.\n  Got {type(config).__name__}.\n"
            "  Use OombConfig.from_dict(...) for a mapping."
        )
    if around := surroundings(os.environ):
        config = resolve(Source.of_python(config, "enable(model, ...)"), *around).config
    return enable_resolved(model, config, on_progress=on_progress)


def enable_resolved(
    model: Model, config: OombConfig, *, on_progress: Callable[[ChunkEvent], None] | None = None
) -> Model:
    """As `enable`, with settings in which those of the environment have their place already."""
    if not config.enabled:
        logger.warning("oomb_accel stays off: enabled=False.")
        return model
    if getattr(model, STATE, None) is not None:
        raise ValueError(
            "oomb_accel is already on for this model.\n  enable() was called for it before, or by a callback.\n"
            "  Call oomb_accel.disable(model) first."
        )
    check_versions("transformers", "peft")
    base = base_model_of(model)
    reasons = refusals(model, base)
    if reasons:
        raise ValueError(refusal(f"oomb_accel does not support this model ({type(base).__name__})", reasons))
    _check_determinism(config)
    if config.attention == "sparse" and next(base.parameters()).is_cuda:  # else before the first step
        check_page_kernels(dtype_name(base.dtype), model_facts(base).head_dim, config.page_tokens, config.q_block)
    if base.config.model_type not in SUPPORTED_MODEL_TYPES:  # a wrapper for images has a type of its own
        _prove_unlisted(base)
    attach(model, config, on_progress=on_progress)
    return model


def attach(model: nn.Module, config: OombConfig, *, on_progress: Callable[[ChunkEvent], None] | None = None) -> None:
    """Switch on without asking whether the model is supported: for ``enable`` and for the parity check."""
    base = base_model_of(model)
    if on_progress is None and config.progress is not False:
        on_progress = ProgressLine(force=config.progress is True)
    state = Attachment(
        model=model,
        base=base,
        config=config,
        facts=model_facts(base),
        forward=model.forward,
        chunk_forward=chunk_forward_of(model),
        step_context=step_context_of(model),
        on_chunk=on_progress,
        own_forward="forward" in vars(model),
    )
    name = attention_interface.register(base.config._attn_implementation)
    base.set_attn_implementation(name)
    for layer_config in state.configs:  # a module that PEFT copied has a config of its own
        layer_config._attn_implementation_internal = name
    attention_interface.CHUNKED.update(module for module in state.modules if hasattr(module, "layer_idx"))
    setattr(model, STATE, state)
    model.forward = _replacement(state)


def disable(model: nn.Module) -> None:
    """Undo ``enable``. A model that is not switched on stays as it is."""
    state: Attachment | None = getattr(model, STATE, None)
    if state is None:
        return
    own_forward, forward = state.own_forward, state.forward
    state.active = False  # whoever wrapped our forward meanwhile gets a plain one
    state.offload.close()
    if state.float8_base is not None:
        state.float8_base.release()
    state.rope.remove()
    attention_interface.CHUNKED.difference_update(state.modules)
    name = attention_interface.original_of(state.base.config._attn_implementation)
    state.base.set_attn_implementation(name)
    for layer_config in state.configs:
        layer_config._attn_implementation_internal = name
    if getattr(vars(model).get("forward"), STATE, None) is state:  # nobody has wrapped our forward
        if own_forward:
            model.forward = forward
        else:
            del model.forward
    delattr(model, STATE)


def _replacement(state: Attachment) -> Callable[..., Any]:
    original = state.forward
    names = _positional_names(original) or _positional_names(state.base.forward)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args, strict=False))
        if attention_interface.PASS_KEYWORD in kwargs:  # one chunk, by way of the root module's hooks
            return state.chunk_forward(**kwargs)
        has_labels = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        if not state.active:
            return original(**kwargs)
        if not has_labels:
            _refuse_training_without_labels(state)
            return original(**kwargs)
        with state.step_context():
            output = chunked_step(state, kwargs)
        announce(state)  # after the first forward: the model is where it will be trained, and it works
        return output

    setattr(forward, STATE, state)
    return forward


def announce(state: Attachment) -> None:
    """Say once what is on."""
    if state.announced:
        return
    state.announced = True
    say(state, describe(state))


def _positional_names(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that can be given by position; none for ``*args``, as in PEFT's generic model."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]


def _refuse_training_without_labels(state: Attachment) -> None:
    if state.model.training and torch.is_grad_enabled():
        if is_partitioned(state.model):
            refuse_passes(next(state.model.parameters()).device)
        raise ValueError(
            "Full logits were asked for in training: a forward without labels.\n"
            "  A compute_loss override, label smoothing or a preference loss needs logits of the whole document, "
            "which do not fit in memory at this length.\n"
            "  Pass labels and use outputs.loss or outputs.log_probs, wrap inference in torch.no_grad(), or call "
            "oomb_accel.disable(model)."
        )


def _check_determinism(config: OombConfig) -> None:
    """Matrix products on a GPU are deterministic only with a fixed workspace, which is set from outside."""
    fixed = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
    if config.deterministic and torch.cuda.is_available() and not fixed:
        raise ValueError(
            "deterministic=True needs a fixed workspace for matrix products, set before the program starts.\n"
            f"  Got CUBLAS_WORKSPACE_CONFIG={os.environ.get('CUBLAS_WORKSPACE_CONFIG')!r}.\n"
            "  Start with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment."
        )


def _prove_unlisted(base: PreTrainedModel) -> None:
    """A model type that is not on the list is let in if a small copy passes the parity check."""
    from oomb_accel.integrations.parity import prove_small_copy

    problem = prove_small_copy(base)
    if problem is None:
        logger.warning(
            "%s is not on the list of tested models; a small copy of it passed the built-in parity check.",
            base.config.model_type,
        )
        return
    raise ValueError(
        f"oomb_accel does not support model type {base.config.model_type!r} ({type(base).__name__}).\n"
        f"  The built-in check against full attention said: {problem}\n"
        f"  Supported: {', '.join(sorted(SUPPORTED_MODEL_TYPES))}."
    )
