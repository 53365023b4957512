"""Matrices in 8 bits, and their products: e4m3 numbers, and a scale for every row.

Suffixes: M rows of the first matrix, N of the second, K numbers of a row. Scales are those of `page_float8`: the
smallest power of two that brings the largest number of the row to at most 448; NaN where the row holds an infinity or
NaN, so that its products are NaN too. Multiplying by a power of two is exact, so numbers times scales are the same in
any dtype that a product is made in.
"""

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import next_power_of_2
from oomb_kernels.page_float8 import FLOAT8, encode, quantize, scale_of

_MULTIPLE = 16
"""Of both sizes of the second matrix: what scaled products of 8-bit floats ask for."""
_NUMBERS_PER_WARP = 2048


def quantize_rows_reference(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """By definition, in plain torch: e4m3 ``[M, K]``, and scales, fp32 ``[M, 1]``."""
    return quantize(x_MK, (1,))


def product_reference(
    a_MK: Tensor, a_scales_M1: Tensor, b_NK: Tensor, b_scales_N1: Tensor, bias_N: Tensor | None, out_MN: Tensor
) -> None:
    """By definition: ``out = a b^T + bias`` with the numbers that codes and scales stand for, in the dtype of
    ``out``."""
    a, b = ((codes.float() * scales).to(out_MN.dtype) for codes, scales in ((a_MK, a_scales_M1), (b_NK, b_scales_N1)))
    if bias_N is None:
        torch.mm(a, b.t(), out=out_MN)
    else:
        torch.addmm(bias_N, a, b.t(), out=out_MN)


@triton.jit
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x, codes, scales, stride_m, K, BLOCK_K: tl.constexpr, NATIVE: tl.constexpr
):
    # grid: (rows,). A row stays in registers between its largest number and its codes.
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_K)
    numbers = tl.load(x + row * stride_m + col, mask=col < K, other=0.0).to(tl.float32)
    # As whole numbers, magnitudes are ordered as the floats are, with infinity and then NaN behind the largest.
    top = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    scale, inverse = scale_of(top)
    tl.store(scales + row, scale)
    numbers = tl.where(top < 0x7F800000, numbers * inverse, 0.0)
    # The interpreter's own conversion is not to nearest.
    code = numbers.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else encode(numbers)
    tl.store(codes + row * K + col, code, mask=col < K)


def launch_quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """The Triton kernel of `quantize_rows`; reads the matrix once."""
    (num_rows, size), device = x_MK.shape, x_MK.device
    assert x_MK.stride(1) == 1 or size == 1
    codes = torch.empty(num_rows, size, dtype=torch.uint8, device=device)
    scales = torch.empty(num_rows, 1, device=device)
    if num_rows:
        block = next_power_of_2(size)
        warps = min(32, max(1, block // _NUMBERS_PER_WARP))
        with torch.cuda.device_of(x_MK):
            _quantize_rows_kernel[(num_rows,)](
                x_MK, codes, scales, x_MK.stride(0), size, BLOCK_K=block, NATIVE=x_MK.is_cuda, num_warps=warps
            )
    return codes.view(FLOAT8), scales


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits: e4m3 ``[M, K]`` row by row, and scales, fp32 ``[M, 1]``."""
    if x_MK.is_cuda and x_MK.dtype != torch.float64:
        return launch_quantize_rows(x_MK if x_MK.stride(1) == 1 else x_MK.contiguous())
    return quantize_rows_reference(x_MK)


def float8_product(
    a_MK: Tensor,
    a_scales_M1: Tensor,
    b_NK: Tensor,
    b_scales_N1: Tensor,
    bias_N: Tensor | None,
    out_MN: Tensor,
    *,
    fast: bool,
) -> None:
    """``out = a b^T + bias`` of two matrices in 8 bits: on the GPU by torch's scaled product into bf16, anywhere else
    by the definition.

    Args:
        a_MK, b_NK: e4m3, contiguous, with scales as `quantize_rows` makes them.
        bias_N: in the dtype of ``out``.
        fast: let the tensor cores keep sums in their own narrower accumulators.
    """
    if out_MN.is_cuda and out_MN.dtype == torch.bfloat16:
        missing = max(0, _MULTIPLE - len(a_MK))  # a single row is not supported: the last chunk may have no more
        if missing:
            a_MK = F.pad(a_MK.view(torch.uint8), (0, 0, 0, missing)).view(FLOAT8)
            a_scales_M1 = F.pad(a_scales_M1, (0, 0, 0, missing))
        made_MN = out_MN.new_empty(len(a_MK), len(b_NK)) if missing else out_MN
        torch._scaled_mm(
            a_MK, b_NK.t(), a_scales_M1, b_scales_N1.t(), bias_N, out_dtype=torch.bfloat16, use_fast_accum=fast,
            out=made_MN,
        )  # fmt: skip
        if missing:
            out_MN.copy_(made_MN[: len(out_MN)])
    else:
        product_reference(a_MK, a_scales_M1, b_NK, b_scales_N1, bias_N, out_MN)


def has_float8_product(num_rows: int, size: int) -> bool:
    """Whether products with a second matrix of this shape can be made in 8 bits."""
    return num_rows % _MULTIPLE == 0 and size % _MULTIPLE == 0


@cache
def float8_product_fault(device: torch.device) -> str | None:
    """What is wrong with `float8_product` on a device, found once by a product of 32 x 32 in each way of summing; None
    where nothing is. A GPU with 8-bit floats is not enough: some builds of torch have no product with a scale for every
    row there (pytorch/ao#2904)."""
    size = 2 * _MULTIPLE
    index = torch.arange(size, device=device)
    a_MK = (index[:, None] * index % 5 - 2).to(torch.bfloat16)  # small whole numbers: all sums are exact
    rows, bias_N = quantize_rows(a_MK), index.to(torch.bfloat16)
    wanted_MN = a_MK.float() @ a_MK.float().t() + bias_N.float()
    for fast in (True, False):
        made_MN = torch.empty(size, size, dtype=torch.bfloat16, device=device)
        try:
            float8_product(*rows, *rows, bias_N, made_MN, fast=fast)
            right = torch.equal(made_MN.float(), wanted_MN)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if not right:
            return "wrong numbers"
    return None
