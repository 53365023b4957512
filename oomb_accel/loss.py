"""Log-probabilities of targets from logits, without a full-size fp32 copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oomb_accel.kept_results import HeadGradient
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


def head_gradient(
    head: Callable[[Tensor], Tensor], h_ND: Tensor, targets_N: Tensor, on_logits: Callable[[Tensor], None] | None
) -> HeadGradient:
    """What `target_log_probs` of the head's logits gives, and its gradient for ones.

    Args:
        head: makes logits ``[N, V]``.
        h_ND: without graph.
        on_logits: is shown the logits before they are gone.
    """
    with torch.enable_grad():
        leaf_ND = h_ND.requires_grad_()
        logits_NV = head(leaf_ND)
        if on_logits is not None:
            on_logits(logits_NV.detach())
        dtype = logits_NV.dtype
        log_probs_N = target_log_probs(logits_NV, targets_N)
    del logits_NV
    # A backward has the precision of its forward: autograd's own threads know that autocast is on, but not its dtype.
    with torch.autocast(h_ND.device.type, enabled=False):
        (gradient_ND,) = torch.autograd.grad(log_probs_N, leaf_ND, torch.ones_like(log_probs_N))
    return HeadGradient(log_probs_N.detach(), gradient_ND.to(dtype))


def known_log_probs(h_ND: Tensor, known: HeadGradient) -> Tensor:
    """Log-probabilities of targets that were worked out for this ``h_ND``: ``[N]``, differentiable once in it."""
    log_probs_N: Tensor = _KnownLogProbs.apply(h_ND, *known)
    return log_probs_N


class _KnownLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_ND: Tensor, log_probs_N: Tensor, gradient_ND: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_ND)
        ctx.dtype = h_ND.dtype
        return log_probs_N.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (gradient_ND,) = ctx.saved_tensors
        # In fp32: rounded to 16 bits, a factor that many targets have in common would be off for all of them.
        dh_ND = torch.empty_like(gradient_ND, dtype=ctx.dtype)
        return torch.mul(gradient_ND, grads[0].unsqueeze(1), out=dh_ND), None, None
