"""Dense attention by cuDNN inside torch (`aten::_scaled_dot_product_cudnn_attention*`): the fastest on
Hopper, the fewest masks.

Suffixes as in `attention_call`. Its tensors are [B, H, T, D], its causal mask is top-left aligned (so only
square calls are causal), its LSE is [B, H, T, 1]. It plans for 0.05 s per new shape, so query counts are
padded to multiples of 256.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from oomb_kernels.attention_call import AttentionCall
from oomb_kernels.layout import token_major, vector_aligned, with_batch

_MIN_CAPABILITY = (9, 0)
_MAX_HEAD_DIM = 128
_ROW_MULTIPLE = 256


def device_refusal(device: torch.device) -> str | None:
    """Why no call can run on `device`, or None."""
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if torch.version.hip is not None or not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"it needs compute capability 9.0, the device has {capability[0]}.{capability[1]}"
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
    if call.deterministic:
        return "its backward is not deterministic"
    if call.segments is not None:
        return "it has no segments"
    if call.window is not None:
        return "it has no window"
    if call.softcap is not None:
        return "it has no softcap"
    if num_k < 2 and not call.causal:
        return "a single key is not supported"
    if call.causal and num_q != num_k:
        return f"its causal mask needs as many queries as keys, got {num_q} and {num_k}"
    return None


def forward(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output (dtype of q, memory [T, H, D]) and natural-log LSE in fp32."""
    num_q = q_HTD.shape[1]
    q, k, v = _padded(q_HTD, k_GTD, v_GTD, call)
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        with_batch(q),
        with_batch(k),
        with_batch(v),
        None,  # attn_bias
        True,  # compute_log_sumexp
        0.0,
        call.causal,
        False,
        scale=call.scale,
    )[:2]
    return _unpadded(token_major(out[0]), num_q), _unpadded(lse.reshape(q.shape[:2]), num_q)


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
    calls.

    Padded rows have dout = out = 0 and LSE 0, so that their probabilities stay finite and contribute nothing.
    """
    num_q, num_k = q_HTD.shape[1], k_GTD.shape[1]
    q, k, v = _padded(q_HTD, k_GTD, v_GTD, call)
    missing = q.shape[1] - num_q
    dout, out = (_pad_tokens(vector_aligned(token_major(x.to(q.dtype))), missing) for x in (dout_HTD, out_HTD))
    lse_HT = lse_HT.float()
    lse_HT = (pad(lse_HT, (0, missing)) if missing else lse_HT).contiguous()
    unused_seed = _unused_seed(q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        with_batch(dout),
        with_batch(q),
        with_batch(k),
        with_batch(v),
        with_batch(out),
        lse_HT.view(1, *lse_HT.shape, 1),
        unused_seed,
        unused_seed,
        None,  # attn_bias
        None,  # cum_seq_q, cum_seq_k: not a nested tensor
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        call.causal,
        scale=call.scale,
    )
    return _unpadded(token_major(dq[0]), num_q), _unpadded(dk[0], num_k), _unpadded(dv[0], num_k)


@lru_cache(maxsize=16)
def _unused_seed(device: torch.device) -> Tensor:
    """What the forward returns at dropout 0, where nothing reads it."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _padded(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """q padded at its end to a multiple of 256 rows; k and v as well where the mask is causal and hides what
    is added."""
    missing = -q_HTD.shape[1] % _ROW_MULTIPLE
    missing_keys = missing if call.causal else 0
    return (
        _pad_tokens(vector_aligned(q_HTD), missing),
        _pad_tokens(vector_aligned(k_GTD), missing_keys),
        _pad_tokens(vector_aligned(v_GTD), missing_keys),
    )


def _unpadded(x: Tensor, num_tokens: int) -> Tensor:
    """The first tokens of ``[H, T, ...]``."""
    return x if x.shape[1] == num_tokens else x[:, :num_tokens]


def _pad_tokens(x_HTD: Tensor, missing: int) -> Tensor:
    """Zeros behind the last token; the result is token-major when anything is added."""
    if missing == 0:
        return x_HTD
    return pad(x_HTD.transpose(0, 1), (0, 0, 0, 0, 0, missing)).transpose(0, 1)
