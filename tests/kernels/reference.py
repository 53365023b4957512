"""Plain formulas in any dtype with autograd gradients, two tolerance rules, and where kernels are tested.

Suffixes: H query heads, G KV heads, T tokens, D head_dim, Q and K tokens of queries and keys.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from oomb_kernels import AttentionCall

_HAS_CUDA = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not _HAS_CUDA, reason="needs a CUDA device")]
INTERPRETED = pytest.mark.skipif(_HAS_CUDA, reason="Triton compiles for the GPU here; nothing is interpreted")

# The interpreter multiplies bit patterns of bfloat16 in places, so bfloat16 kernels are tested on a GPU only.
TRITON_PLACES = [
    *(pytest.param("cpu", d, marks=INTERPRETED, id=f"interpreted-{d}") for d in (torch.float32, torch.float16)),
    *(pytest.param("cuda", d, marks=ON_GPU, id=f"gpu-{d}") for d in (torch.float32, torch.float16, torch.bfloat16)),
]


class Attention(NamedTuple):
    """Results of one attention call."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def visible(call: AttentionCall, num_q: int, num_k: int, device: torch.device) -> Tensor:
    """[Q, K], True where a query sees a key, written out from the definition."""
    query = torch.arange(num_q, device=device)[:, None] + (num_k - num_q)
    key = torch.arange(num_k, device=device)[None, :]
    seen = torch.ones(num_q, num_k, dtype=torch.bool, device=device)
    if call.causal or call.segments is not None:
        seen &= key <= query
    if call.window is not None:
        seen &= key > query - call.window
    if call.segments is not None:
        lengths = torch.tensor(call.segments, device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        seen &= document[:, None] == document[None, :]
    return seen


def plain_attention(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, dout_HTD: Tensor, call: AttentionCall, dtype: torch.dtype
) -> Attention:
    """Attention by the textbook formula in `dtype`, gradients by autograd; zeros and -inf without keys."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q_HTD, k_GTD, v_GTD))
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    seen = visible(call, q.shape[1], k.shape[1], q.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores.detach().to(torch.promote_types(dtype, torch.float32)), dim=-1)
    if k.shape[1] == 0:
        zeros = (torch.zeros_like(x) for x in (q, k, v))
        return Attention(torch.zeros_like(q), lse, *zeros)
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == float("-inf"), 0.0, top))
    total = weights.sum(-1, keepdim=True)
    out = (weights / torch.where(total > 0, total, 1.0)) @ v.repeat_interleave(group, 0)
    out.backward(dout_HTD.to(dtype))
    grads = [x.grad for x in (q, k, v)]
    assert grads[0] is not None and grads[1] is not None and grads[2] is not None
    return Attention(out.detach(), lse, grads[0], grads[1], grads[2])


def assert_equal_by_definition(ours: Tensor, truth: Tensor, what: str = "") -> None:
    """fp32 or fp64: equal up to rounding, measured against the largest element."""
    limit = {torch.float32: 2e-5, torch.float64: 1e-11}[ours.dtype]
    _assert_same_infinities(ours, truth, what)
    finite = truth.isfinite()
    error = _largest(ours.double()[finite] - truth.double()[finite])
    allowed = limit * max(1.0, _largest(truth.double()[finite]))
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}"


def assert_twice_plain(ours: Tensor, plain: Tensor, truth: Tensor, what: str = "") -> None:
    """16 bits: error at most twice that of the plain formula in the dtype, plus the rounding of the data."""
    _assert_same_infinities(ours, truth, what)
    finite = truth.isfinite()
    truth = truth.double()[finite]
    error = _largest(ours.double()[finite] - truth)
    rounding = _largest(truth.to(ours.dtype).double() - truth)
    noise = 1e-5  # of fp32 sums; matters where the truth is zero by cancellation and plain happens to be exact
    allowed = 2 * _largest(plain.double()[finite] - truth) + 2 * rounding + noise
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}"


def assert_close_in(dtype: torch.dtype, ours: Tensor, plain: Tensor, truth: Tensor, what: str = "") -> None:
    """The rule that belongs to the dtype of the data."""
    if dtype.itemsize == 2:
        assert_twice_plain(ours, plain, truth, what)
    else:
        assert_equal_by_definition(ours, truth, what)


def token_major(num_heads: int, num_tokens: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Random [H, T, D] with memory [T, H, D], as a projection gives it to attention."""
    return torch.randn(num_tokens, num_heads, head_dim, device=device).to(dtype).transpose(0, 1)


def _assert_same_infinities(ours: Tensor, truth: Tensor, what: str) -> None:
    assert ours.shape == truth.shape, f"{what}: {tuple(ours.shape)} instead of {tuple(truth.shape)}"
    assert not ours.isnan().any(), f"{what}: NaN"
    assert torch.equal(ours == float("-inf"), truth == float("-inf")), f"{what}: infinities differ"


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
