"""Pages of K and V in 8 bits: e4m3 numbers, and beside the pool a scale for K and one for V of every (KV head, page).

Suffixes as in `page_store`. A scale is the smallest power of two that brings the largest number of K (or V) of the page
to at most 448. e4m3 has an exponent of its own, so another factor would round no better; and a product with this one is
exact, so that everybody who reads a page sees the same numbers, in whatever dtype.

A page that holds an infinity or NaN has NaN for a scale, and so reads as NaN throughout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import next_power_of_2

FLOAT8 = torch.float8_e4m3fn
_TILE_ELEMENTS = 4096


def quantize_pages(x_GNPD: Tensor) -> tuple[Tensor, Tensor]:
    """By definition, in plain torch: numbers of pages in e4m3 ``[G, n, P, D]``, and their scales, fp32 ``[G, n]``."""
    codes_GNPD, scales_GN11 = quantize(x_GNPD, (2, 3))
    return codes_GNPD, scales_GN11[..., 0, 0]


def quantize(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Numbers in e4m3, and scales, fp32, with one entry along these dimensions."""
    top = x.abs().amax(dims, keepdim=True).float()
    mantissa, exponent = torch.frexp(top)  # 448 is 0.875 * 2^9
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126) + 127
    scales = torch.where(top > 0, (exponent.int() << 23).view(torch.float32), 1.0)
    wide = torch.promote_types(x.dtype, torch.float32)
    codes = torch.where(top.isfinite(), x.to(wide) / scales.to(wide), 0.0).to(FLOAT8)
    return codes, torch.where(top.isfinite(), scales, torch.nan)


def records_reference(pool: Tensor, slots: Tensor, scales_2: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Records by slot in a wider dtype, ``[..., 2, P, D]``.

    Args:
        slots: int64 ``[...]``.
        scales_2: ``[..., 2]`` for a pool in e4m3, None for others.
    """
    if scales_2 is None:
        return pool[slots].to(dtype)
    records_2PD = pool.view(torch.uint8)[slots].view(FLOAT8)  # not every torch can index 8-bit floats
    wide = torch.promote_types(dtype, torch.float32)
    return (records_2PD.to(wide) * scales_2[..., None, None].to(wide)).to(dtype)


@triton.jit
def scale_of(top):  # type: ignore[no-untyped-def]
    """From the largest magnitude, as bits of an fp32: the scale, NaN where it is not finite, and one over the scale."""
    finite = top < 0x7F800000
    top = tl.minimum(top, 0x7F7FFFFF)
    exponent = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 1)  # carries where the mantissa is beyond that of 448
    exponent = tl.where(top == 0, 127, exponent)
    scale = tl.where(finite, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(x):  # type: ignore[no-untyped-def]
    """fp32 of at most 448 to the 8 bits of e4m3, to nearest even: the same bits on every device."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of the mantissa stay; the exponent counts from 2^-7 instead of 2^-127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9, as fp32 numbers above 2^14 are.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (((bits >> 24) & 0x80) | tl.where(magnitude < 0x3C800000, small, normal)).to(tl.uint8)


@triton.jit
def _quantize_pages_kernel(  # type: ignore[no-untyped-def]
    pool, slots, k, v, scales,
    slots_stride_g, slots_stride_n, k_stride_g, k_stride_t, v_stride_g, v_stride_t, scales_stride_g, scales_stride_n,
    P: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (pages, KV heads, K or V)
    page = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    row = tl.arange(0, BLOCK_P)
    col = tl.arange(0, BLOCK_D)
    stride_t = tl.where(part == 0, k_stride_t, v_stride_t).to(tl.int64)
    if part == 0:
        tokens = k + group * k_stride_g + page * P * k_stride_t
    else:
        tokens = v + group * v_stride_g + page * P * v_stride_t
    slot = tl.load(slots + group * slots_stride_g + page * slots_stride_n).to(tl.int64)
    record = pool + slot * (2 * P * D) + part * (P * D)

    # As whole numbers, magnitudes are ordered as the floats are, with infinity and then NaN behind the largest.
    top = tl.zeros([BLOCK_P, BLOCK_D], tl.int32)
    for start in range(0, P, BLOCK_P):
        valid = (start + row[:, None] < P) & (col[None, :] < D)
        x = tl.load(tokens + (start + row[:, None]) * stride_t + col[None, :], mask=valid, other=0.0).to(tl.float32)
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.max(tl.max(top, 1), 0)
    scale, inverse = scale_of(top)
    finite = top < 0x7F800000
    tl.store(scales + group * scales_stride_g + page * scales_stride_n + part, scale)

    for start in range(0, P, BLOCK_P):
        valid = (start + row[:, None] < P) & (col[None, :] < D)
        x = tl.load(tokens + (start + row[:, None]) * stride_t + col[None, :], mask=valid, other=0.0).to(tl.float32)
        code = encode(tl.where(finite, x * inverse, 0.0))
        tl.store(record + (start + row[:, None]) * D + col[None, :], code, mask=valid)


def launch_quantize_pages(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor, scales_GN2: Tensor) -> None:
    """The Triton kernel of `store_pages` for e4m3."""
    num_groups, num_pages = slots_GN.shape
    page_tokens, head_dim = pool.shape[2:]
    assert pool.is_contiguous() and k_GTD.stride(-1) == v_GTD.stride(-1) == scales_GN2.stride(-1) == 1
    if num_pages == 0:
        return
    block_d = next_power_of_2(head_dim)
    block_p = min(next_power_of_2(page_tokens), max(1, _TILE_ELEMENTS // block_d))
    with torch.cuda.device_of(pool):
        _quantize_pages_kernel[(num_pages, num_groups, 2)](
            pool.view(torch.uint8), slots_GN, k_GTD, v_GTD, scales_GN2,
            *slots_GN.stride(), *k_GTD.stride()[:2], *v_GTD.stride()[:2], *scales_GN2.stride()[:2],
            P=page_tokens, D=head_dim, BLOCK_P=block_p, BLOCK_D=block_d,
        )  # fmt: skip
