"""Dense attention in plain torch: any device, any dtype, deterministic. It is also the definition the others
are tested against.

Suffixes as in `attention_call`; R is H/G, the query heads of one KV head; B is a block of query rows, K the
keys it can see. Scores exist for one block of query rows at a time, in fp32 (fp64 for fp64 inputs).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from oomb_kernels.attention_call import AttentionCall

# Score elements alive at a time. A GPU wants large blocks; a CPU wants them to stay in its cache.
_MAX_SCORES = 2**26
_MAX_SCORES_CPU = 2**21


def device_refusal(device: torch.device) -> str | None:
    """None: this backend runs everywhere."""
    return None


def refusal(
    device: torch.device, dtype: torch.dtype, head_dim: int, call: AttentionCall, num_q: int, num_k: int
) -> str | None:
    """Why this backend cannot run the call, or None."""
    return None if dtype.is_floating_point else f"it needs a floating-point dtype, got {dtype}"


def forward(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output (dtype of q, memory [T, H, D]) and natural-log LSE (fp32, fp64 for fp64); zeros and -inf where
    no key is seen."""
    num_heads, num_q, head_dim = q_HTD.shape
    out_HTD = q_HTD.new_empty(num_q, num_heads, head_dim).transpose(0, 1)
    lse_HT = q_HTD.new_empty(num_heads, num_q, dtype=_compute_dtype(q_HTD))
    # Autocast would round the fp32 matmuls of this file to 16 bits.
    with torch.autocast(q_HTD.device.type, enabled=False):
        for rows, part in _segments(call, num_q):
            keys = rows if call.segments is not None else slice(None)
            _forward_segment(q_HTD[:, rows], k_GTD[:, keys], v_GTD[:, keys], part, out_HTD[:, rows], lse_HT[:, rows])
    return out_HTD, lse_HT


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
    num_heads, num_q, head_dim = q_HTD.shape
    dtype = _compute_dtype(q_HTD)
    dq_HTD = q_HTD.new_empty(num_q, num_heads, head_dim).transpose(0, 1)
    dk_GTD = k_GTD.new_zeros(k_GTD.shape, dtype=dtype)
    dv_GTD = v_GTD.new_zeros(v_GTD.shape, dtype=dtype)
    with torch.autocast(q_HTD.device.type, enabled=False):
        for rows, part in _segments(call, num_q):
            keys = rows if call.segments is not None else slice(None)
            _backward_segment(
                dout_HTD[:, rows],
                q_HTD[:, rows],
                k_GTD[:, keys],
                v_GTD[:, keys],
                out_HTD[:, rows],
                lse_HT[:, rows],
                part,
                dq_HTD[:, rows],
                dk_GTD[:, keys],
                dv_GTD[:, keys],
            )
    return dq_HTD, dk_GTD.to(k_GTD.dtype), dv_GTD.to(v_GTD.dtype)


def _forward_segment(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, call: AttentionCall, out_HTD: Tensor, lse_HT: Tensor
) -> None:
    """One block-free mask; writes `out_HTD` and `lse_HT`."""
    num_groups = k_GTD.shape[0]
    k, v = k_GTD.to(lse_HT.dtype), v_GTD.to(lse_HT.dtype)
    for rows, keys in _row_blocks(q_HTD, k_GTD.shape[1], call):
        q_GND = _fold_group(q_HTD[:, rows], num_groups, lse_HT.dtype)
        scores_GNK, _ = _scores(q_GND, k[:, keys], rows, keys, q_HTD.shape[1], k_GTD.shape[1], call)
        lse_GN = torch.logsumexp(scores_GNK, dim=-1)
        probs_GNK = scores_GNK.sub_(_finite(lse_GN).unsqueeze(-1)).exp_()
        out_HTD[:, rows] = _unfold_group(torch.bmm(probs_GNK, v[:, keys]), q_HTD.shape[0])
        lse_HT[:, rows] = lse_GN.reshape(q_HTD.shape[0], -1)


def _backward_segment(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    call: AttentionCall,
    dq_HTD: Tensor,
    dk_GTD: Tensor,
    dv_GTD: Tensor,
) -> None:
    """One block-free mask; writes `dq_HTD`, adds to `dk_GTD` and `dv_GTD` (compute dtype)."""
    num_heads, num_groups, dtype = q_HTD.shape[0], k_GTD.shape[0], dk_GTD.dtype
    k, v = k_GTD.to(dtype), v_GTD.to(dtype)
    for rows, keys in _row_blocks(q_HTD, k_GTD.shape[1], call):
        q_GND = _fold_group(q_HTD[:, rows], num_groups, dtype)
        dout_GND = _fold_group(dout_HTD[:, rows], num_groups, dtype)
        delta_GN = (dout_GND * _fold_group(out_HTD[:, rows], num_groups, dtype)).sum(-1)
        lse_GN = lse_HT[:, rows].to(dtype).reshape(num_groups, -1)
        scores_GNK, tanh_GNK = _scores(q_GND, k[:, keys], rows, keys, q_HTD.shape[1], k_GTD.shape[1], call)
        probs_GNK = scores_GNK.sub_(_finite(lse_GN).unsqueeze(-1)).exp_()
        dv_GTD[:, keys] += torch.bmm(probs_GNK.transpose(1, 2), dout_GND)
        dscores_GNK = torch.bmm(dout_GND, v[:, keys].transpose(1, 2))
        dscores_GNK.sub_(delta_GN.unsqueeze(-1)).mul_(probs_GNK)
        if tanh_GNK is not None:
            dscores_GNK.mul_(tanh_GNK.square_().neg_().add_(1.0))
        dscores_GNK.mul_(call.scale)
        dq_HTD[:, rows] = _unfold_group(torch.bmm(dscores_GNK, k[:, keys]), num_heads)
        dk_GTD[:, keys] += torch.bmm(dscores_GNK.transpose(1, 2), q_GND)


def _scores(
    q_GND: Tensor, k_GKD: Tensor, rows: slice, keys: slice, num_q: int, num_k: int, call: AttentionCall
) -> tuple[Tensor, Tensor | None]:
    """Masked scores [G, R*B, K], and the tanh of the soft cap where there is one."""
    scores_GNK = torch.bmm(q_GND, k_GKD.transpose(1, 2)).mul_(call.scale)
    tanh_GNK = None
    if call.softcap is not None:
        tanh_GNK = scores_GNK.div_(call.softcap).tanh_()
        scores_GNK = tanh_GNK * call.softcap
    hidden_BK = _hidden(rows, keys, num_k - num_q, call, q_GND.device)
    if hidden_BK is not None:
        num_groups, folded_rows, _ = scores_GNK.shape
        per_head = (num_groups, folded_rows // hidden_BK.shape[0], *hidden_BK.shape)
        scores_GNK.view(per_head).masked_fill_(hidden_BK, float("-inf"))
    return scores_GNK, tanh_GNK


def _hidden(rows: slice, keys: slice, shift: int, call: AttentionCall, device: torch.device) -> Tensor | None:
    """True where query `rows` must not see key `keys`; None when everything is seen."""
    if not call.causal and call.window is None:
        return None
    last_B1 = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1) + shift
    key_K = torch.arange(keys.start, keys.stop, device=device)
    hidden_BK = key_K > last_B1 if call.causal else torch.zeros_like(key_K > last_B1)
    return hidden_BK if call.window is None else hidden_BK | (key_K <= last_B1 - call.window)


def _segments(call: AttentionCall, num_q: int) -> Iterator[tuple[slice, AttentionCall]]:
    """Token ranges that attend among themselves only, each with a call that has no segments."""
    if call.segments is None:
        yield slice(0, num_q), call
        return
    part = replace(call, segments=None, causal=True)
    start = 0
    for length in call.segments:
        yield slice(start, start + length), part
        start += length


def _row_blocks(q_HTD: Tensor, num_k: int, call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Blocks of query rows, each with the range of keys that any of its rows may see."""
    num_heads, num_q, _ = q_HTD.shape
    budget = _MAX_SCORES_CPU if q_HTD.device.type == "cpu" else _MAX_SCORES
    step = max(1, budget // max(1, num_heads * num_k))
    shift = num_k - num_q
    for start in range(0, num_q, step):
        stop = min(num_q, start + step)
        last = min(num_k, max(0, stop + shift)) if call.causal else num_k
        first = 0 if call.window is None else min(last, max(0, start + shift + 1 - call.window))
        yield slice(start, stop), slice(first, last)


def _fold_group(x_HTD: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """[H, B, D] -> [G, R*B, D] in `dtype`: the query heads of a group share its keys without copying
    these."""
    return x_HTD.to(dtype).reshape(num_groups, -1, x_HTD.shape[-1])


def _unfold_group(x_GND: Tensor, num_heads: int) -> Tensor:
    """[G, R*B, D] -> [H, B, D]."""
    return x_GND.reshape(num_heads, -1, x_GND.shape[-1])


def _finite(lse: Tensor) -> Tensor:
    """0 for -inf: a row that sees no key has only -inf scores, and exp(-inf - 0) is the wanted 0 where -inf -
    -inf is NaN."""
    return torch.where(lse == float("-inf"), 0.0, lse)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
