"""Dense attention: picks a backend for a call and runs it. Suffixes as in `attention_call`."""

from functools import lru_cache

import torch
from torch import Tensor

from oomb_kernels import attention_cudnn, attention_flash, attention_torch
from oomb_kernels.attention_call import AttentionCall

# Fastest first.
_BACKENDS = {"cudnn": attention_cudnn, "flash": attention_flash, "torch": attention_torch}


def available_backends(device: torch.device) -> dict[str, str]:
    """For each backend "" when `device` can run it, or the reason why not."""
    return {name: backend.device_refusal(device) or "" for name, backend in _BACKENDS.items()}


@lru_cache(maxsize=4096)
def choose_backend(
    requested: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    call: AttentionCall,
    num_q: int,
    num_k: int,
) -> str:
    """The backend that will run the call: `requested`, or the fastest possible one for "auto". Cached, cheap
    to call per layer.

    Raises:
        ValueError: no such backend, or the requested one cannot run this call; says why and what can.
    """
    if requested != "auto" and requested not in _BACKENDS:
        raise ValueError(f"unknown attention backend {requested!r}; use one of auto, {', '.join(_BACKENDS)}.")
    simple = call.simplified(num_q, num_k)
    reasons = {
        name: backend.refusal(device, dtype, head_dim, simple, num_q, num_k) for name, backend in _BACKENDS.items()
    }
    possible = [name for name, reason in reasons.items() if reason is None]
    if requested == "auto" and possible:
        return possible[0]
    if requested in possible:
        return requested
    refused = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    remedy = f"Use backend='auto' or '{possible[0]}'." if possible else "Use a floating-point dtype, e.g. bfloat16."
    raise ValueError(
        f"attention backend {requested!r} cannot run this call.\n"
        f"{refused} (dtype {dtype}, head_dim {head_dim}, {num_q} queries, {num_k} keys).\n{remedy}"
    )


@torch.no_grad()
def dense_attention_forward(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, call: AttentionCall, backend: str
) -> tuple[Tensor, Tensor]:
    """Attention of `q_HTD` over `k_GTD`, `v_GTD` (strided views are fine). Records no autograd graph.

    Returns:
        out_HTD in q's dtype with memory ordered [T, H, D], and lse_HT, the natural-log sum of exponentials of
        the scores, in fp32 (fp64 for fp64 inputs). A query that sees no key has zeros and -inf.

    Raises:
        ValueError: `backend` cannot run this call.
    """
    chosen, simple = _prepare(q_HTD, k_GTD, v_GTD, call, backend)
    if q_HTD.shape[1] == 0 or k_GTD.shape[1] == 0:
        chosen = "torch"  # library kernels reject empty tensors
    return _BACKENDS[chosen].forward(q_HTD, k_GTD, v_GTD, simple)


@torch.no_grad()
def dense_attention_backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    call: AttentionCall,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one attention call, given the output and LSE of the whole softmax.

    When keys are split over several calls, pass the *merged* `out_HTD` and `lse_HT` to each of them: the
    probabilities are exp(scores - lse), so that every part is exact, dk and dv belong to the call's own keys
    and dq is summed by the caller.

    Returns:
        dq_HTD (memory [T, H, D]), dk_GTD, dv_GTD in the inputs' dtypes.

    Raises:
        ValueError: `backend` cannot run this call.
    """
    chosen, simple = _prepare(q_HTD, k_GTD, v_GTD, call, backend)
    if q_HTD.shape[1] == 0 or k_GTD.shape[1] == 0:
        chosen = "torch"
    return _BACKENDS[chosen].backward(dout_HTD, q_HTD, k_GTD, v_GTD, out_HTD, lse_HT, simple)


def _prepare(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, call: AttentionCall, backend: str
) -> tuple[str, AttentionCall]:
    """Checks shapes; the chosen backend and the simplified call."""
    num_q, num_k = q_HTD.shape[1], k_GTD.shape[1]
    assert k_GTD.shape == v_GTD.shape, f"k and v differ: {tuple(k_GTD.shape)}, {tuple(v_GTD.shape)}"
    assert q_HTD.shape[0] % k_GTD.shape[0] == 0, f"{q_HTD.shape[0]} query heads over {k_GTD.shape[0]} KV heads"
    assert call.segments is None or sum(call.segments) == num_q == num_k, (
        f"segments {call.segments} of {num_q} queries and {num_k} keys"
    )
    chosen = choose_backend(
        backend,
        device=q_HTD.device,
        dtype=q_HTD.dtype,
        head_dim=q_HTD.shape[2],
        call=call,
        num_q=num_q,
        num_k=num_k,
    )
    return chosen, call.simplified(num_q, num_k)
