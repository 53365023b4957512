"""Adding gradients of K and V to page records: the page gradient, what later chunks owe to a page.

Suffixes as in `page_store`. Sums are formed in fp32 (fp64 for an fp64 pool). A bf16 pool is rounded
stochastically: up with the probability that makes the expected value exact, so that hundreds of small
additions do not vanish as they would under round-to-nearest. The random bits depend on the seed and on the
element's place in the call, not on where its slot lies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2

_TILE_ELEMENTS = 4096


@torch.no_grad()
def accumulate_pages_reference(
    pool: Tensor, slots_GN: Tensor, dk_GTD: Tensor, dv_GTD: Tensor, *, first: bool, seed: int
) -> None:
    """The definition of `accumulate_pages`, in plain torch. It draws other random bits than the kernel."""
    pages = (slots_GN.shape[1], pool.shape[2])
    dtype = torch.float64 if pool.dtype == torch.float64 else torch.float32
    total_GN2PD = torch.stack([d.to(dtype).unflatten(1, pages) for d in (dk_GTD, dv_GTD)], dim=2)
    slots = slots_GN.long()
    if not first:
        total_GN2PD += pool[slots].to(dtype)
    pool[slots] = _round_stochastically(total_GN2PD, seed) if pool.dtype == torch.bfloat16 else total_GN2PD


def _round_stochastically(x: Tensor, seed: int) -> Tensor:
    """fp32 to bf16. The 16 bits that bf16 drops carry into those it keeps with the probability they stand
    for."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    noise = torch.randint(0, 2**16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    bits = (x.contiguous().view(torch.int32) + noise) & ~0xFFFF
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


@triton.jit
def round_to_bfloat16(x, noise):  # type: ignore[no-untyped-def]
    """fp32 to bf16 by 16 random bits; infinities and NaN stay what they are."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(finite, bits + noise, bits)
    bits = tl.where(x == x, bits, 0x7FC00000)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def rounding_noise(seed, place):  # type: ignore[no-untyped-def]
    """32 random bits for every place, by a multiply-xor hash: a counter-based generator takes ten times as long."""
    x = place.to(tl.uint32) + seed.to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["seed"])
def _accumulate_kernel(  # type: ignore[no-untyped-def]
    pool, slots, dk, dv, seed,
    slots_stride_g, slots_stride_n, dk_stride_g, dk_stride_t, dv_stride_g, dv_stride_t,
    FIRST: tl.constexpr, STOCHASTIC: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (pages, KV heads, row blocks of a page); every element has one owner, so no atomics and the same
    # bits each time
    page = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    col = tl.arange(0, BLOCK_D)
    valid = (row[:, None] < P) & (col[None, :] < D)
    slot = tl.load(slots + group * slots_stride_g + page * slots_stride_n).to(tl.int64)
    record_k = pool + slot * (2 * P * D) + row[:, None] * D + col[None, :]
    record_v = record_k + P * D
    token = (page * P + row)[:, None]
    dk_at = dk + group * dk_stride_g + token * dk_stride_t + col[None, :]
    dv_at = dv + group * dv_stride_g + token * dv_stride_t + col[None, :]
    sum_k = tl.load(dk_at, mask=valid, other=0.0).to(tl.float32)
    sum_v = tl.load(dv_at, mask=valid, other=0.0).to(tl.float32)
    if not FIRST:
        sum_k += tl.load(record_k, mask=valid, other=0.0).to(tl.float32)
        sum_v += tl.load(record_v, mask=valid, other=0.0).to(tl.float32)
    if STOCHASTIC:
        # One 32-bit draw serves both: its low half rounds K, its high half V.
        place = (group * tl.num_programs(0) + page) * (P * D) + row[:, None] * D + col[None, :]
        draw = rounding_noise(seed, place)
        tl.store(record_k, round_to_bfloat16(sum_k, draw & 0xFFFF), mask=valid)
        tl.store(record_v, round_to_bfloat16(sum_v, (draw >> 16) & 0xFFFF), mask=valid)
    else:
        tl.store(record_k, sum_k, mask=valid)
        tl.store(record_v, sum_v, mask=valid)


def launch_accumulate_pages(
    pool: Tensor, slots_GN: Tensor, dk_GTD: Tensor, dv_GTD: Tensor, *, first: bool, seed: int
) -> None:
    """The Triton kernel of `accumulate_pages`, for fp32 and bf16 pools."""
    num_groups, num_pages = slots_GN.shape
    page_tokens, head_dim = pool.shape[2:]
    assert pool.is_contiguous() and dk_GTD.stride(-1) == dv_GTD.stride(-1) == 1
    if num_pages == 0:
        return
    block_d = next_power_of_2(head_dim)
    block_p = min(next_power_of_2(page_tokens), max(1, _TILE_ELEMENTS // block_d))
    with torch.cuda.device_of(pool):
        _accumulate_kernel[(num_pages, num_groups, cdiv(page_tokens, block_p))](
            pool, slots_GN, dk_GTD, dv_GTD, seed,
            *slots_GN.stride(), *dk_GTD.stride()[:2], *dv_GTD.stride()[:2],
            FIRST=first, STOCHASTIC=pool.dtype == torch.bfloat16,
            P=page_tokens, D=head_dim, BLOCK_P=block_p, BLOCK_D=block_d,
        )  # fmt: skip


def accumulate_pages(pool: Tensor, slots_GN: Tensor, dk_GTD: Tensor, dv_GTD: Tensor, *, first: bool, seed: int) -> None:
    """Adds dK and dV of whole pages to their records, or with `first` stores them without reading what lies
    there.

    Args:
        pool: [S, 2, P, D], contiguous; fp32, bf16 or fp64.
        slots_GN: int32 [G, n], distinct, on the pool's device.
        dk_GTD, dv_GTD: [G, n*P, D], any floating dtype, last dimension contiguous.
        first: the slots hold no gradient yet, maybe uninitialised memory.
        seed: of the stochastic rounding of a bf16 pool, at least 0; unused otherwise.
    """
    num_groups, num_pages = slots_GN.shape
    expected = (num_groups, num_pages * pool.shape[2], pool.shape[3])
    assert dk_GTD.shape == dv_GTD.shape == expected, f"{tuple(dk_GTD.shape)}, {tuple(dv_GTD.shape)} for {expected}"
    assert pool.dtype in (torch.float32, torch.bfloat16, torch.float64), f"page gradients in {pool.dtype}"
    if pool.is_cuda and pool.dtype != torch.float64:
        launch_accumulate_pages(pool, slots_GN, dk_GTD, dv_GTD, first=first, seed=seed)
    else:
        accumulate_pages_reference(pool, slots_GN, dk_GTD, dv_GTD, first=first, seed=seed)
