"""Moving whole pages of K and V between token-ordered tensors and page records in a pool.

Suffixes as in `attention_call`; S slots of a pool, n pages of one KV head. A record is [2, P, D]: K, then V.
`slots_GN` names the record of every (KV head, page) in token order; no slot may be named twice. A pool in e4m3 comes
with the scales of these pages, see `page_float8`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomb_kernels.launch import cdiv, next_power_of_2
from oomb_kernels.page_float8 import FLOAT8, launch_quantize_pages, quantize_pages, records_reference

_TILE_ELEMENTS = 8192
_ADDED_ELEMENTS = 4096
"""Of a tile that is added: it has what stands there in registers as well."""


@torch.no_grad()
def store_pages_reference(
    pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor, scales_GN2: Tensor | None = None
) -> None:
    """The definition of `store_pages`, in plain torch."""
    pages = (slots_GN.shape[1], pool.shape[2])
    if scales_GN2 is not None:
        codes, scales = zip(*(quantize_pages(x.unflatten(1, pages)) for x in (k_GTD, v_GTD)), strict=True)
        pool.view(torch.uint8)[slots_GN.long()] = torch.stack(codes, dim=2).view(torch.uint8)
        scales_GN2.copy_(torch.stack(scales, dim=2))
        return
    record_GN2PD = torch.stack([k_GTD.unflatten(1, pages), v_GTD.unflatten(1, pages)], dim=2)
    pool[slots_GN.long()] = record_GN2PD.to(pool.dtype)


@torch.no_grad()
def load_pages_reference(
    pool: Tensor, slots_GN: Tensor, scales_GN2: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The definition of `load_pages`, in plain torch."""
    record_GN2PD = records_reference(pool, slots_GN.long(), scales_GN2, dtype or pool.dtype)
    record_GN2PD[slots_GN < 0] = 0
    k_GNPD, v_GNPD = record_GN2PD.unbind(2)
    return k_GNPD.flatten(1, 2).contiguous(), v_GNPD.flatten(1, 2).contiguous()


@torch.no_grad()
def add_pages_reference_(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor) -> None:
    """The definition of `add_pages_`, in plain torch."""
    for x_GTD, added_GTD in zip((k_GTD, v_GTD), load_pages_reference(pool, slots_GN), strict=True):
        x_GTD += added_GTD


@triton.jit
def _move_pages_kernel(  # type: ignore[no-untyped-def]
    pool, slots, k, v, scales,
    slots_stride_g, slots_stride_n, k_stride_g, k_stride_t, v_stride_g, v_stride_t, scales_stride_g, scales_stride_n,
    STORE: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # grid: (pages, KV heads, row blocks of a page)
    page = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    col = tl.arange(0, BLOCK_D)
    valid = (row[:, None] < P) & (col[None, :] < D)
    slot = tl.load(slots + group * slots_stride_g + page * slots_stride_n).to(tl.int64)
    there = valid & (slot >= 0)
    record_k = pool + slot * (2 * P * D) + row[:, None] * D + col[None, :]
    record_v = record_k + P * D
    token = (page * P + row)[:, None]
    k_at = k + group * k_stride_g + token * k_stride_t + col[None, :]
    v_at = v + group * v_stride_g + token * v_stride_t + col[None, :]
    if STORE:
        tl.store(record_k, tl.load(k_at, mask=valid), mask=valid)
        tl.store(record_v, tl.load(v_at, mask=valid), mask=valid)
    else:
        k_tile = tl.load(record_k, mask=there, other=0.0)
        v_tile = tl.load(record_v, mask=there, other=0.0)
        if SCALED:
            scale_at = scales + group * scales_stride_g + page * scales_stride_n
            k_tile = tl.where(there, k_tile.to(tl.float32) * tl.load(scale_at), 0.0)
            v_tile = tl.where(there, v_tile.to(tl.float32) * tl.load(scale_at + 1), 0.0)
        if ADD:
            k_tile = tl.load(k_at, mask=valid, other=0.0).to(tl.float32) + k_tile.to(tl.float32)
            v_tile = tl.load(v_at, mask=valid, other=0.0).to(tl.float32) + v_tile.to(tl.float32)
        tl.store(k_at, k_tile, mask=valid)
        tl.store(v_at, v_tile, mask=valid)


def _launch_move_pages(
    pool: Tensor,
    slots_GN: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    scales_GN2: Tensor | None = None,
    *,
    store: bool = False,
    add: bool = False,
) -> None:
    num_groups, num_pages = slots_GN.shape
    page_tokens, head_dim = pool.shape[2:]
    assert pool.is_contiguous() and k_GTD.stride(-1) == v_GTD.stride(-1) == 1
    if num_pages == 0:
        return
    block_d = next_power_of_2(head_dim)
    block_p = min(next_power_of_2(page_tokens), max(1, (_ADDED_ELEMENTS if add else _TILE_ELEMENTS) // block_d))
    with torch.cuda.device_of(pool):
        _move_pages_kernel[(num_pages, num_groups, cdiv(page_tokens, block_p))](
            pool, slots_GN, k_GTD, v_GTD, pool if scales_GN2 is None else scales_GN2,
            *slots_GN.stride(), *k_GTD.stride()[:2], *v_GTD.stride()[:2],
            *((0, 0) if scales_GN2 is None else scales_GN2.stride()[:2]),
            STORE=store, ADD=add, SCALED=scales_GN2 is not None,
            P=page_tokens, D=head_dim, BLOCK_P=block_p, BLOCK_D=block_d,
        )  # fmt: skip


def launch_store_pages(
    pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor, scales_GN2: Tensor | None = None
) -> None:
    """The Triton kernels of `store_pages`."""
    if scales_GN2 is None:
        _launch_move_pages(pool, slots_GN, k_GTD, v_GTD, store=True)
    else:
        launch_quantize_pages(pool, slots_GN, k_GTD, v_GTD, scales_GN2)


def launch_load_pages(
    pool: Tensor, slots_GN: Tensor, scales_GN2: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The Triton kernel of `load_pages`."""
    num_groups, num_pages = slots_GN.shape
    size = (2, num_groups, num_pages * pool.shape[2], pool.shape[3])
    k_GTD, v_GTD = pool.new_empty(size, dtype=dtype or pool.dtype).unbind(0)
    _launch_move_pages(pool, slots_GN, k_GTD, v_GTD, scales_GN2)
    return k_GTD, v_GTD


def launch_add_pages_(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor) -> None:
    """The Triton kernel of `add_pages_`, for 16 and 32 bits."""
    _launch_move_pages(pool, slots_GN, k_GTD, v_GTD, add=True)


def store_pages(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor, scales_GN2: Tensor | None = None) -> None:
    """Writes whole pages: tokens i*P to (i+1)*P of KV head g go to record `slots_GN[g, i]`.

    Args:
        pool: [S, 2, P, D], contiguous.
        slots_GN: int32, distinct, on the pool's device.
        k_GTD, v_GTD: [G, n*P, D], last dimension contiguous; rounded to the pool's dtype.
        scales_GN2: for a pool in e4m3, and only there: fp32, where the scales of K and V go; last dimension contiguous.
    """
    _check_pages(pool, slots_GN, k_GTD, v_GTD, scales_GN2)
    if pool.is_cuda and (scales_GN2 is None or k_GTD.dtype != torch.float64):
        launch_store_pages(pool, slots_GN, k_GTD, v_GTD, scales_GN2)
    else:
        with torch.autocast(pool.device.type, enabled=False):  # it stacks nothing in e4m3
            store_pages_reference(pool, slots_GN, k_GTD, v_GTD, scales_GN2)


def load_pages(
    pool: Tensor, slots_GN: Tensor, scales_GN2: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The inverse of `store_pages`: k_GTD and v_GTD, [G, n*P, D], contiguous. A slot of -1 is a page of zeros.

    Args:
        scales_GN2: as they were stored, with a pool in e4m3.
        dtype: of what is returned; None is the pool's, which e4m3 cannot be.
    """
    assert (pool.dtype == FLOAT8) == (scales_GN2 is not None) == (dtype is not None), f"{pool.dtype} as {dtype}"
    run = launch_load_pages if pool.is_cuda and dtype != torch.float64 else load_pages_reference
    return run(pool, slots_GN, scales_GN2, dtype)


def add_pages_(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor) -> None:
    """Add whole pages to what stands in `k_GTD` and `v_GTD`, in fp32 at least. A slot of -1 adds nothing.

    Args:
        pool: [S, 2, P, D], contiguous, not in 8 bits.
        slots_GN: int32, on the pool's device.
        k_GTD, v_GTD: [G, n*P, D], any floating dtype, last dimension contiguous.
    """
    _check_pages(pool, slots_GN, k_GTD, v_GTD, None)
    if pool.is_cuda and torch.float64 not in (pool.dtype, k_GTD.dtype):
        launch_add_pages_(pool, slots_GN, k_GTD, v_GTD)
    else:
        add_pages_reference_(pool, slots_GN, k_GTD, v_GTD)


def _check_pages(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor, scales_GN2: Tensor | None) -> None:
    num_groups, num_pages = slots_GN.shape
    expected = (num_groups, num_pages * pool.shape[2], pool.shape[3])
    assert k_GTD.shape == v_GTD.shape == expected, f"{tuple(k_GTD.shape)}, {tuple(v_GTD.shape)} for {expected}"
    assert (pool.dtype == FLOAT8) == (scales_GN2 is not None), f"{pool.dtype} pages, scales {scales_GN2 is not None}"
    assert scales_GN2 is None or scales_GN2.shape == (num_groups, num_pages, 2), "scales of K and V of each page"
