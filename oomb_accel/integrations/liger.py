"""Liger's kernels for norms, RoPE and MLP, where they can run."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from oomb_accel.integrations.support import base_model_of
from oomb_accel.reading import in_a_line


def use_liger(model: nn.Module, device: torch.device, *, fused_loss: bool) -> str | None:
    """Use them in a model.

    Args:
        model: of transformers, or a PEFT model around one.
        device: on which it will run.
        fused_loss: take Liger's loss from hidden states as well; chunks have their own.

    Returns: None, or why they cannot run there; the model is as it was then.
    """
    if device.type != "cuda":
        return f"Training runs on {device.type}; its kernels need a GPU."
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        if importlib.util.find_spec("liger_kernel") is None:
            return "The package liger-kernel is not installed."
        return f"The package liger-kernel cannot be imported: {in_a_line(error)}."
    base = base_model_of(model)
    if base.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"It has no kernels for {base.config.model_type}."
    _apply_liger_kernel_to_instance(base, cross_entropy=False, fused_linear_cross_entropy=fused_loss)
    return None
