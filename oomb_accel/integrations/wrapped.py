"""Wrappers around a model's forward that belong to a whole step, not to a chunk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def chunk_forward_of(model: nn.Module) -> Callable[..., Any]:
    """The forward for chunks: below Accelerate's wrapper, which would turn the logits of each chunk into fp32."""
    original: Callable[..., Any] = vars(model).get("_original_forward", model.forward)
    return original


def step_context_of(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast that Accelerate's wrapper holds, to be entered around the step instead."""
    if "_original_forward" not in vars(model) or not AcceleratorState._shared_state:
        return nullcontext
    state = AcceleratorState()
    dtype = _AUTOCAST_DTYPES.get(state.mixed_precision)
    if dtype is None:
        return nullcontext
    return partial(torch.autocast, state.device.type, dtype=dtype)
