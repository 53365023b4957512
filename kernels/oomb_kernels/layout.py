"""Memory layouts of attention tensors. Suffixes as in `attention_call`."""

import torch
from torch import Tensor

_VECTOR_BYTES = 16  # library kernels load rows in words of this size


def token_major(x_HTD: Tensor) -> Tensor:
    """`x_HTD` with memory ordered [T, H, D], as the projections around attention read and write it; copies
    only if needed."""
    num_heads, _, head_dim = x_HTD.shape
    if x_HTD.stride() == (head_dim, num_heads * head_dim, 1):  # no view where numbers tell as much
        return x_HTD
    return x_HTD.transpose(0, 1).contiguous().transpose(0, 1)


def of_rows(x: Tensor, rows: slice) -> Tensor:
    """``x[:, rows]``, for rows that exist; ``x`` where that is all of it, since views cost the host time, too."""
    return x if rows.stop - rows.start == x.shape[1] else x[:, rows]


def with_batch(x_HTD: Tensor) -> Tensor:
    """[1, H, T, D] with the outermost stride on the batch, whichever of H and T comes next; no copy."""
    shape, stride = x_HTD.shape, x_HTD.stride()
    return x_HTD.as_strided((1, *shape), (max(shape[0] * stride[0], shape[1] * stride[1]), *stride))


def vector_aligned(x_HTD: Tensor) -> Tensor:
    """`x_HTD` itself when every row starts on a 16-byte border and is contiguous, else a token-major copy."""
    words = _VECTOR_BYTES // x_HTD.element_size()
    (num_heads, num_tokens, _), (stride_h, stride_t, stride_d) = x_HTD.shape, x_HTD.stride()
    heads_aligned, tokens_aligned = num_heads <= 1 or stride_h % words == 0, num_tokens <= 1 or stride_t % words == 0
    if stride_d == 1 and heads_aligned and tokens_aligned and x_HTD.data_ptr() % _VECTOR_BYTES == 0:
        return x_HTD
    return x_HTD.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
