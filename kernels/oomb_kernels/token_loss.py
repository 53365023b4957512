"""Log-probabilities of target tokens and their gradient, without a copy of the logits in fp32.

Shapes: N rows (tokens), V vocabulary. logp = logits[target] - lse with lse = log sum exp(logits), both in
    fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import next_power_of_2

_MAX_ELEMENTS = 2**26  # of the reference's fp32 copy of a block of rows
_BLOCK_V = 4096


def token_log_probs_reference(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `token_log_probs`, in plain torch, a block of rows at a time."""
    dtype = _compute_dtype(logits_NV)
    logp_N, lse_N = logits_NV.new_empty(2, logits_NV.shape[0], dtype=dtype).unbind(0)
    for rows in _row_blocks(logits_NV):
        block = logits_NV[rows].to(dtype)
        lse_N[rows] = torch.logsumexp(block, dim=-1)
        logp_N[rows] = block.gather(1, targets_N[rows].unsqueeze(1)).squeeze(1) - lse_N[rows]
    return logp_N, lse_N


def token_log_probs_backward_reference_(logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, grad_N: Tensor) -> Tensor:
    """The definition of `token_log_probs_backward_`, in plain torch, a block of rows at a time."""
    dtype = _compute_dtype(logits_NV)
    for rows in _row_blocks(logits_NV):
        grad_N1 = grad_N[rows].to(dtype).unsqueeze(1)
        block = logits_NV[rows].to(dtype, copy=True)
        block.sub_(lse_N[rows].to(dtype).unsqueeze(1)).exp_().mul_(grad_N1.neg())
        block.scatter_add_(1, targets_N[rows].unsqueeze(1), grad_N1)
        logits_NV[rows] = block.to(logits_NV.dtype)
    return logits_NV


@triton.jit
def _forward_kernel(logits, targets, logp, lse, num_cols, row_stride, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def]
    # grid: rows
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * row_stride
    col = tl.arange(0, BLOCK_V)
    top = float("-inf")
    total = 0.0
    for start in range(0, num_cols, BLOCK_V):
        x = tl.load(start_of_row + start + col, mask=start + col < num_cols, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = new_top
    row_lse = top + tl.log(total)
    at_target = tl.load(start_of_row + tl.load(targets + row)).to(tl.float32)
    tl.store(lse + row, row_lse)
    tl.store(logp + row, at_target - row_lse)


@triton.jit
def _backward_kernel(logits, targets, lse, grad, num_cols, row_stride, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def]
    # grid: rows
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * row_stride
    col = tl.arange(0, BLOCK_V)
    target = tl.load(targets + row)
    row_lse = tl.load(lse + row)
    row_grad = tl.load(grad + row)
    for start in range(0, num_cols, BLOCK_V):
        valid = start + col < num_cols
        x = tl.load(start_of_row + start + col, mask=valid, other=float("-inf")).to(tl.float32)
        onehot = tl.where(start + col == target, 1.0, 0.0)
        tl.store(start_of_row + start + col, row_grad * (onehot - tl.exp(x - row_lse)), mask=valid)


def launch_token_log_probs(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """The Triton kernel of `token_log_probs`, for logits of 16 or 32 bits."""
    num_rows, num_cols = logits_NV.shape
    assert logits_NV.stride(1) == 1
    logp_N, lse_N = logits_NV.new_empty(2, num_rows, dtype=torch.float32).unbind(0)
    if num_rows:
        with torch.cuda.device_of(logits_NV):
            _forward_kernel[(num_rows,)](
                logits_NV, targets_N.contiguous(), logp_N, lse_N, num_cols, logits_NV.stride(0),
                BLOCK_V=min(_BLOCK_V, next_power_of_2(num_cols)), num_warps=8,
            )  # fmt: skip
    return logp_N, lse_N


def launch_token_log_probs_backward_(logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, grad_N: Tensor) -> Tensor:
    """The Triton kernel of `token_log_probs_backward_`, for logits of 16 or 32 bits."""
    num_rows, num_cols = logits_NV.shape
    assert logits_NV.stride(1) == 1
    if num_rows:
        with torch.cuda.device_of(logits_NV):
            _backward_kernel[(num_rows,)](
                logits_NV, targets_N.contiguous(), lse_N.float().contiguous(), grad_N.float().contiguous(),
                num_cols, logits_NV.stride(0),
                BLOCK_V=min(_BLOCK_V, next_power_of_2(num_cols)), num_warps=8,
            )  # fmt: skip
    # Autograd does not see the kernel's write; without this it would not notice that a saved tensor has
    # changed.
    torch.autograd.graph.increment_version(logits_NV)
    return logits_NV


@torch.no_grad()
def token_log_probs(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """logp_N, the natural-log probability of each row's target, and lse_N; fp32, fp64 for fp64 logits. No
    autograd graph.

    Args:
        logits_NV: floating, last dimension contiguous.
        targets_N: int64, each in [0, V); the caller has checked that.
    """
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        return launch_token_log_probs(logits_NV, targets_N)
    return token_log_probs_reference(logits_NV, targets_N)


@torch.no_grad()
def token_log_probs_backward_(logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, grad_N: Tensor) -> Tensor:
    """Overwrites `logits_NV` with the gradient of sum(grad_N * logp_N) to it, grad * (onehot - softmax), and
    returns it.

    Args:
        logits_NV: as given to `token_log_probs`; its dtype is that of the result.
        targets_N: as given to `token_log_probs`.
        lse_N: as returned by `token_log_probs`.
        grad_N: gradient of each log-probability, fp32 (fp64 for fp64 logits).
    """
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        return launch_token_log_probs_backward_(logits_NV, targets_N, lse_N, grad_N)
    return token_log_probs_backward_reference_(logits_NV, targets_N, lse_N, grad_N)


def _row_blocks(logits_NV: Tensor) -> list[slice]:
    num_rows, num_cols = logits_NV.shape
    step = max(1, _MAX_ELEMENTS // max(1, num_cols))
    return [slice(start, min(num_rows, start + step)) for start in range(0, num_rows, step)]


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
