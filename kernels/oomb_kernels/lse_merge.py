"""Merging two attention results over disjoint key sets into the result of one softmax over both.

Suffixes as in `attention_call`. LSE is the natural-log sum of exponentials; -inf stands for "no key seen".
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2

_TILE_ELEMENTS = 4096


@torch.no_grad()
def merge_attention_reference_(out_acc_HTD: Tensor, lse_acc_HT: Tensor, out_HTD: Tensor, lse_HT: Tensor) -> None:
    """The definition, in plain torch."""
    lse_other = lse_HT.to(lse_acc_HT.dtype)
    total_HT = torch.logaddexp(lse_acc_HT, lse_other)
    # Where neither side saw a key all three are -inf; measured from 0 instead, both weights become the wanted
    # 0.
    base_HT = torch.where(total_HT == float("-inf"), 0.0, total_HT)
    weight_acc, weight_other = (torch.exp(lse - base_HT).unsqueeze(-1) for lse in (lse_acc_HT, lse_other))
    out_acc_HTD.mul_(weight_acc).addcmul_(out_HTD.to(out_acc_HTD.dtype), weight_other)
    lse_acc_HT.copy_(total_HT)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_acc, lse_acc, out, lse, num_tokens,
    acc_stride_h, acc_stride_t, lse_acc_stride_h, lse_acc_stride_t,
    out_stride_h, out_stride_t, lse_stride_h, lse_stride_t,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (token blocks, heads)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK_D)
    valid = token < num_tokens
    tile = valid[:, None] & (col[None, :] < D)

    lse_acc_at = lse_acc + head * lse_acc_stride_h + token * lse_acc_stride_t
    a = tl.load(lse_acc_at, mask=valid, other=float("-inf"))
    b = tl.load(lse + head * lse_stride_h + token * lse_stride_t, mask=valid, other=float("-inf")).to(tl.float32)
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(a - base)
    weight_b = tl.exp(b - base)
    total = weight_a + weight_b
    safe = tl.where(total > 0, total, 1.0)

    acc_at = out_acc + head * acc_stride_h + token[:, None] * acc_stride_t + col[None, :]
    x = tl.load(acc_at, mask=tile, other=0.0)
    y = tl.load(out + head * out_stride_h + token[:, None] * out_stride_t + col[None, :], mask=tile, other=0.0)
    merged = x * (weight_a / safe)[:, None] + y.to(tl.float32) * (weight_b / safe)[:, None]
    tl.store(acc_at, merged, mask=tile)
    # Every warp holds all rows of this block, and the compiler may load an LSE again where it needs another
    # layout: nobody may see the new one before all have read the old.
    tl.debug_barrier()
    tl.store(lse_acc_at, tl.where(total > 0, base + tl.log(safe), float("-inf")), mask=valid)


def launch_merge_attention_(out_acc_HTD: Tensor, lse_acc_HT: Tensor, out_HTD: Tensor, lse_HT: Tensor) -> None:
    """The Triton kernel: fp32 accumulators, any floating `out_HTD`; strides are free but for the last of the
    outputs."""
    num_heads, num_tokens, head_dim = out_acc_HTD.shape
    assert out_acc_HTD.stride(-1) == out_HTD.stride(-1) == 1
    if num_tokens == 0:
        return
    block_d = next_power_of_2(head_dim)
    block_t = max(1, _TILE_ELEMENTS // block_d)
    with torch.cuda.device_of(out_acc_HTD):
        _merge_kernel[(cdiv(num_tokens, block_t), num_heads)](
            out_acc_HTD, lse_acc_HT, out_HTD, lse_HT, num_tokens,
            *out_acc_HTD.stride()[:2], *lse_acc_HT.stride(), *out_HTD.stride()[:2], *lse_HT.stride(),
            D=head_dim, BLOCK_T=block_t, BLOCK_D=block_d,
        )  # fmt: skip


def merge_attention_(out_acc_HTD: Tensor, lse_acc_HT: Tensor, out_HTD: Tensor, lse_HT: Tensor) -> None:
    """Folds (`out_HTD`, `lse_HT`) into (`out_acc_HTD`, `lse_acc_HT`) in place: one softmax over both key
    sets.

    Accumulators are fp32 (or fp64); the other side may have any floating dtype. A side with LSE -inf counts
    as absent; its output must be finite (zero by convention). With -inf on both sides the LSE stays -inf and
    the output is zero.
    """
    assert out_acc_HTD.shape == out_HTD.shape and lse_acc_HT.shape == lse_HT.shape == out_HTD.shape[:2]
    if out_acc_HTD.is_cuda and out_acc_HTD.dtype == lse_acc_HT.dtype == torch.float32:
        launch_merge_attention_(out_acc_HTD, lse_acc_HT, out_HTD, lse_HT)
    else:
        merge_attention_reference_(out_acc_HTD, lse_acc_HT, out_HTD, lse_HT)
