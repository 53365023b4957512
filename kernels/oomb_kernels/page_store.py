"""Moving whole pages of K and V between token-ordered tensors and page records in a pool.

Suffixes as in `attention_call`; S slots of a pool, n pages of one KV head. A record is [2, P, D]: K, then V.
`slots_GN` names the record of every (KV head, page) in token order; no slot may be named twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ELEMENTS = 8192


def store_pages_reference(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor) -> None:
    """The definition of `store_pages`, in plain torch."""
    pages = (slots_GN.shape[1], pool.shape[2])
    record_GN2PD = torch.stack([k_GTD.unflatten(1, pages), v_GTD.unflatten(1, pages)], dim=2)
    pool[slots_GN.long()] = record_GN2PD.to(pool.dtype)


def load_pages_reference(pool: Tensor, slots_GN: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `load_pages`, in plain torch."""
    record_GN2PD = pool[slots_GN.long()]
    record_GN2PD[slots_GN < 0] = 0
    k_GNPD, v_GNPD = record_GN2PD.unbind(2)
    return k_GNPD.flatten(1, 2).contiguous(), v_GNPD.flatten(1, 2).contiguous()


@triton.jit
def _move_pages_kernel(  # type: ignore[no-untyped-def]
    pool, slots, k, v,
    slots_stride_g, slots_stride_n, k_stride_g, k_stride_t, v_stride_g, v_stride_t,
    STORE: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
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
        tl.store(k_at, tl.load(record_k, mask=there, other=0.0), mask=valid)
        tl.store(v_at, tl.load(record_v, mask=there, other=0.0), mask=valid)


def _launch_move_pages(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor, *, store: bool) -> None:
    num_groups, num_pages = slots_GN.shape
    page_tokens, head_dim = pool.shape[2:]
    assert pool.is_contiguous() and k_GTD.stride(-1) == v_GTD.stride(-1) == 1
    if num_pages == 0:
        return
    block_d = triton.next_power_of_2(head_dim)
    block_p = min(triton.next_power_of_2(page_tokens), max(1, _TILE_ELEMENTS // block_d))
    with torch.cuda.device_of(pool):
        _move_pages_kernel[(num_pages, num_groups, triton.cdiv(page_tokens, block_p))](
            pool, slots_GN, k_GTD, v_GTD,
            *slots_GN.stride(), *k_GTD.stride()[:2], *v_GTD.stride()[:2],
            STORE=store, P=page_tokens, D=head_dim, BLOCK_P=block_p, BLOCK_D=block_d,
        )  # fmt: skip


def launch_store_pages(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor) -> None:
    """The Triton kernel of `store_pages`."""
    _launch_move_pages(pool, slots_GN, k_GTD, v_GTD, store=True)


def launch_load_pages(pool: Tensor, slots_GN: Tensor) -> tuple[Tensor, Tensor]:
    """The Triton kernel of `load_pages`."""
    num_groups, num_pages = slots_GN.shape
    k_GTD, v_GTD = pool.new_empty(2, num_groups, num_pages * pool.shape[2], pool.shape[3]).unbind(0)
    _launch_move_pages(pool, slots_GN, k_GTD, v_GTD, store=False)
    return k_GTD, v_GTD


@torch.no_grad()
def store_pages(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor) -> None:
    """Writes whole pages: tokens i*P to (i+1)*P of KV head g go to record `slots_GN[g, i]`.

    Args:
        pool: [S, 2, P, D], contiguous.
        slots_GN: int32, distinct, on the pool's device.
        k_GTD, v_GTD: [G, n*P, D], last dimension contiguous; rounded to the pool's dtype.
    """
    _check_pages(pool, slots_GN, k_GTD, v_GTD)
    if pool.is_cuda:
        launch_store_pages(pool, slots_GN, k_GTD, v_GTD)
    else:
        store_pages_reference(pool, slots_GN, k_GTD, v_GTD)


@torch.no_grad()
def load_pages(pool: Tensor, slots_GN: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `store_pages`: k_GTD and v_GTD, [G, n*P, D], contiguous, in the pool's dtype. A slot of -1 is a page
    of zeros."""
    return launch_load_pages(pool, slots_GN) if pool.is_cuda else load_pages_reference(pool, slots_GN)


def _check_pages(pool: Tensor, slots_GN: Tensor, k_GTD: Tensor, v_GTD: Tensor) -> None:
    num_groups, num_pages = slots_GN.shape
    expected = (num_groups, num_pages * pool.shape[2], pool.shape[3])
    assert k_GTD.shape == v_GTD.shape == expected, f"{tuple(k_GTD.shape)}, {tuple(v_GTD.shape)} for {expected}"
