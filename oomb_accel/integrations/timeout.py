"""How long ranks wait for each other: derived from the time that a step on the longest document may take.

A rank with a short document waits in a collective until the longest one is done. The usual ten minutes of NCCL
would end a healthy step on a document of a million tokens.
"""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from oomb_accel.config import OombConfig
from oomb_accel.integrations.rope import trained_tokens
from oomb_accel.integrations.support import base_model_of, model_facts, whole_numel

logger = logging.getLogger("oomb_accel")

MIN_MINUTES = 30
_SLOW_GPU, _SLOW_CPU = 50e12, 20e9
"""Floating-point operations per second that any machine in use reaches: a tenth of what an H200 does."""
_LINEAR_PASSES, _ATTENTION_PASSES = 4, 4.5
"""In forward passes: forward sweep, recompute, and a backward of two (of two and a half in attention)."""


def step_minutes(model: nn.Module, *, document_tokens: int | None = None, micro_steps: int = 1) -> int:
    """Minutes that one optimizer step may take on a slow machine; generous on purpose.

    Args:
        model: a model that oomb_accel supports.
        document_tokens: length of the longest document; the range that the model's positions are made for, if None.
        micro_steps: micro-batches between two reductions of gradients.
    """
    base = base_model_of(model)
    facts = model_facts(base)
    tokens = document_tokens or trained_tokens(base.config.get_text_config())
    parameters = sum(map(whole_numel, model.parameters()))
    linear = 2 * parameters * tokens * _LINEAR_PASSES
    seen = sum(tokens / 2 if window is None else min(window, tokens / 2) for window in facts.windows)
    attention = 4 * seen * tokens * facts.num_heads * facts.head_dim * _ATTENTION_PASSES
    speed = _SLOW_GPU if torch.cuda.is_available() else _SLOW_CPU
    return max(MIN_MINUTES, math.ceil(micro_steps * (linear + attention) / speed / 60))


def timeout_minutes(
    model: nn.Module, config: OombConfig, *, document_tokens: int | None = None, micro_steps: int = 1
) -> int:
    """What ``config.timeout_minutes`` comes to for this model."""
    if config.timeout_minutes != "auto":
        return config.timeout_minutes
    return step_minutes(model, document_tokens=document_tokens, micro_steps=micro_steps)


def set_timeout(
    model: nn.Module, config: OombConfig, *, document_tokens: int | None = None, micro_steps: int = 1
) -> str | None:
    """Give every process group that exists the timeout of this model; nothing to do in a single process.

    With ``timeout_minutes="auto"`` a group that waits longer already keeps its timeout.

    Args:
        document_tokens: length of the longest document, where it is known.

    Returns: a line for the banner, or None where there are no groups.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    minutes = timeout_minutes(model, config, document_tokens=document_tokens, micro_steps=micro_steps)
    longest = timedelta(minutes=minutes)
    for group, backends in _groups():
        now = max((backend.options._timeout for backend in backends), default=timedelta())
        if config.timeout_minutes != "auto" or now < timedelta(minutes=minutes):
            dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)
        else:
            longest = max(longest, now)
    return f"timeout    ranks wait up to {longest // timedelta(minutes=1):,} minutes for each other"


def _groups() -> list[tuple[Any, list[Any]]]:
    """Process groups of this rank, each with those of its backends that have a timeout."""
    found = []
    for group in list(dist.distributed_c10d._world.pg_map):
        backends = {id(b): b for b in (group._get_backend(device) for device in group._device_types)}
        found.append((group, [b for b in backends.values() if hasattr(b.options, "_timeout")]))
    return found
