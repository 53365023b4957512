"""Dense attention by the flash kernels inside torch (`aten::_flash_attention_*`): masks with windows,
segments, ragged sizes.

Suffixes as in `attention_call`. The kernel's causal mask is bottom-right aligned and its tensors are [B, T,
H, D] ([total, H, D] with cumulative lengths). It marks rows that see no key by an LSE of +inf.
"""

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from oomb_kernels.attention_call import AttentionCall
from oomb_kernels.determinism import deterministic_algorithms
from oomb_kernels.layout import token_major, vector_aligned

_MIN_CAPABILITY = (8, 0)
_MAX_HEAD_DIM = 256


def device_refusal(device: torch.device) -> str | None:
    """Why no call can run on `device`, or None."""
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if torch.version.hip is not None:
        return "it is used with CUDA builds of torch only"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash attention"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"it needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    return None


def refusal(
    device: torch.device, dtype: torch.dtype, head_dim: int, call: AttentionCall, num_q: int, num_k: int
) -> str | None:
    """Why this backend cannot run the call (simplified), or None."""
    if (reason := device_refusal(device)) is not None:
        return reason
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, got {dtype}"
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 8 up to {_MAX_HEAD_DIM}, got {head_dim}"
    if call.softcap is not None:
        return "torch's flash kernel has no softcap"
    if call.segments is not None and max(call.segments) == 1:
        # The kernel folds query heads into rows here and hands the LSE back in another order.
        return "segments of one token each are not supported"
    return None


def forward(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output (dtype of q, memory [T, H, D]) and natural-log LSE in fp32; zeros and -inf where no key is
    seen."""
    num_q, num_k = q_HTD.shape[1], k_GTD.shape[1]
    q_THD, k_THD, v_THD = (vector_aligned(x).transpose(0, 1) for x in (q_HTD, k_GTD, v_GTD))
    causal, left, right = _mask_arguments(call)
    op = torch.ops.aten._flash_attention_forward.default
    window = {"window_size_left": left, "window_size_right": right}
    if call.segments is not None:
        borders, longest = _cumulative_lengths(call.segments, q_HTD.device), max(call.segments)
        out_THD, lse_HT = op(
            q_THD,
            k_THD,
            v_THD,
            borders,
            borders,
            longest,
            longest,
            0.0,
            causal,
            False,
            scale=call.scale,
            **window,
        )[:2]
    else:
        out_1THD, lse_1HT = op(
            q_THD.unsqueeze(0),
            k_THD.unsqueeze(0),
            v_THD.unsqueeze(0),
            None,
            None,
            num_q,
            num_k,
            0.0,
            causal,
            False,
            scale=call.scale,
            **window,
        )[:2]
        out_THD, lse_HT = out_1THD[0], lse_1HT[0]
    # Some releases round the row count of the LSE up.
    lse_HT = lse_HT[:, :num_q]
    assert lse_HT.shape == q_HTD.shape[:2], f"unexpected LSE layout {tuple(lse_HT.shape)}"
    if call.has_empty_rows(num_q, num_k):
        lse_HT = lse_HT.masked_fill(lse_HT == float("inf"), float("-inf"))
    return token_major(out_THD.transpose(0, 1)), lse_HT


def backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (memory [T, H, D]), dk, dv in the inputs' dtypes; `out_HTD` and `lse_HT` may be merged over several
    calls."""
    num_q, num_k = q_HTD.shape[1], k_GTD.shape[1]
    if call.has_empty_rows(num_q, num_k):
        lse_HT = lse_HT.masked_fill(lse_HT == float("-inf"), float("inf"))
    lse_HT = lse_HT.float().contiguous()
    dout_HTD, out_HTD = dout_HTD.to(q_HTD.dtype), out_HTD.to(q_HTD.dtype)
    tensors = tuple(vector_aligned(x).transpose(0, 1) for x in (dout_HTD, q_HTD, k_GTD, v_GTD, out_HTD))
    causal, left, right = _mask_arguments(call)
    borders: Tensor | None = None
    longest_q, longest_k = num_q, num_k
    if call.segments is not None:
        borders, longest_q = _cumulative_lengths(call.segments, q_HTD.device), max(call.segments)
        longest_k = longest_q
    else:
        tensors, lse_HT = tuple(x.unsqueeze(0) for x in tensors), lse_HT.unsqueeze(0)
    with deterministic_algorithms(call.deterministic):
        grads = torch.ops.aten._flash_attention_backward.default(
            *tensors,
            lse_HT,
            borders,
            borders,
            longest_q,
            longest_k,
            0.0,
            causal,
            *_unused_random_state(q_HTD.device),
            scale=call.scale,
            window_size_left=left,
            window_size_right=right,
        )
    dq_HTD, dk_GTD, dv_GTD = ((g[0] if borders is None else g).transpose(0, 1) for g in grads)
    return token_major(dq_HTD), dk_GTD, dv_GTD


def _mask_arguments(call: AttentionCall) -> tuple[bool, int | None, int | None]:
    """is_causal, window_size_left, window_size_right. A left size of w - 1 shows w keys, the query's own
    included."""
    causal = call.causal or call.segments is not None
    if call.window is None:
        return causal, None, None
    return False, call.window - 1, 0 if causal else -1


@lru_cache(maxsize=256)
def _cumulative_lengths(segments: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 borders of the segments on the device; pinned and asynchronous, once per packing instead of once
    per layer."""
    borders = torch.tensor([0, *accumulate(segments)], dtype=torch.int32).pin_memory()
    return borders.to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _unused_random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """The dropout state in the shape that the forward returns it; the kernel does not read it at dropout
    0."""
    return (
        torch.zeros(2, dtype=torch.uint64, device=device),
        torch.zeros((), dtype=torch.uint64, device=device),
    )
