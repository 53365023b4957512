"""Log-probabilities of targets from logits, without a full-size fp32 copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oomb_kernels import token_log_probs, token_log_probs_backward_


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        log_probs_N, lse_N = token_log_probs(logits_NV, targets_N)
        ctx.save_for_backward(logits_NV, targets_N, lse_N)
        return log_probs_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        logits_NV, targets_N, lse_N = ctx.saved_tensors
        # The gradient overwrites the logits: with 152K words they are the largest tensor of the step.
        # Autograd's version counter turns any other use of the old values into an error.
        return token_log_probs_backward_(logits_NV, targets_N, lse_N, grads[0]), None


def target_log_probs(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Log-probability of each target; differentiable once, and the backward overwrites ``logits_NV``.

    Args:
        logits_NV: ``[num_targets, vocabulary]``, any floating dtype.
        targets_N: int64 token ids in ``[0, vocabulary)``.

    Returns:
        ``[num_targets]`` in fp32 (fp64 for fp64 logits), natural log.
    """
    log_probs_N: Tensor = _TargetLogProbs.apply(logits_NV, targets_N)
    return log_probs_N
