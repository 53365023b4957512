"""What the page attention kernels and their references share: scores, checks, the numerics of a launch."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from oomb_kernels.launch import next_power_of_2
from oomb_kernels.layout import vector_aligned
from oomb_kernels.page_float8 import records_reference
from oomb_kernels.page_lists import PageLists
from oomb_kernels.page_tiles import Tiles

LOG2_E = 1.4426950408889634
_SMALLEST_TILE = 16  # of a matrix product in Triton


def scores_of(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores before the softmax, ``[..., rows, keys]``."""
    scores = q @ k.transpose(-1, -2) * scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def each_list(lists: PageLists, slots_GN: Tensor, q_HTD: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Heads, query rows, page numbers and slots (int64) of every list, for the references."""
    num_groups, num_blocks = lists.counts_GB.shape
    group = q_HTD.shape[0] // num_groups
    for g in range(num_groups):
        for b in range(num_blocks):
            pages = lists.pages_GBK[g, b, : int(lists.counts_GB[g, b])].long()
            rows = slice(b * lists.block_tokens, min((b + 1) * lists.block_tokens, q_HTD.shape[1]))
            yield slice(g * group, (g + 1) * group), rows, pages, slots_GN[g].long()[pages]


def list_values(
    pool: Tensor, slots: Tensor, scales_GN2: Tensor | None, group: int, pages: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of a list's pages ``[n * P, D]``, for the references; numbers and slots of the pages are int64."""
    scales_n2 = None if scales_GN2 is None else scales_GN2[group, pages]
    k_nPD, v_nPD = records_reference(pool, slots, scales_n2, dtype).unbind(1)
    return k_nPD.flatten(0, 1), v_nPD.flatten(0, 1)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What a kernel multiplies products by, and the cap that multiplies their tanh; scores come out in base 2."""
    return (scale * LOG2_E, 1.0) if softcap is None else (scale / softcap, softcap * LOG2_E)


def numeric_mode(x: Tensor) -> dict[str, Any]:
    """How a launch multiplies: fp32 as written, 16 bits as fp32 in the interpreter."""
    return {
        "UP": knobs.runtime.interpret and x.dtype.itemsize == 2,
        "PRECISION": "ieee" if x.dtype == torch.float32 or knobs.runtime.interpret else "tf32",
    }


@cache
def copies_tiles(device: torch.device) -> bool:
    """Whether the device copies tiles by itself: Hopper and later. Elsewhere Triton makes loads of single numbers of a
    descriptor, so there kernels are given the tensor."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def tile_mode(x: Tensor) -> dict[str, Any]:
    """How a launch multiplies, and how its kernel reads tiles."""
    return {**numeric_mode(x), "TMA": copies_tiles(x.device)}


def records_of(pool: Tensor, block_n: int) -> TensorDescriptor | Tensor:
    """The rows of all records, for tiles of ``[block_n, head_dim]``; what lies beyond head_dim is read as zeros."""
    head_dim = pool.shape[3]
    rows = pool.view(-1, head_dim)
    assert rows.shape[0] < 2**31, "rows are counted in 32 bits"
    if not copies_tiles(pool.device):
        return rows
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block_n, next_power_of_2(head_dim)])


def rows_of(x_HTD: Tensor, block_m: int) -> tuple[TensorDescriptor | Tensor, int, int]:
    """Rows of a head, for tiles of ``[1, block_m, head_dim]``; rows behind the last token are read as zeros. And the
    strides of heads and tokens, where the first does not know them."""
    x_HTD = vector_aligned(x_HTD)
    if not copies_tiles(x_HTD.device):
        return x_HTD, x_HTD.stride(0), x_HTD.stride(1)
    block = [1, block_m, next_power_of_2(x_HTD.shape[2])]
    return TensorDescriptor(x_HTD, list(x_HTD.shape), list(x_HTD.stride()), block), 0, 0


def ds_tiles_of(ds: Tensor, tiles: Tiles) -> TensorDescriptor | Tensor:
    """dS in its workspace, for tiles of keys x query rows."""
    if not copies_tiles(ds.device):
        return ds
    return TensorDescriptor(ds, list(ds.shape), list(ds.stride()), [tiles.block_n, tiles.block_m])


def check_kernel_inputs(pool: Tensor, lists: PageLists, *tensors: Tensor) -> None:
    """Check sizes and layouts of a launch: pages and query blocks in whole tiles, rows that the copy engine can step
    over. What a user may have set is refused before (`oomb_accel.plan.limits`)."""
    page_tokens, head_dim = pool.shape[2:]
    assert head_dim * pool.dtype.itemsize % 16 == 0, "the rows of a page must be whole 16 bytes"
    assert page_tokens % _SMALLEST_TILE == 0, "pages must be whole tiles"
    assert lists.block_tokens % _SMALLEST_TILE == 0, "query blocks must be whole tiles"
    assert pool.is_contiguous() and lists.pages_GBK.is_contiguous() and lists.counts_GB.is_contiguous()
    assert all(x.stride(-1) == 1 for x in tensors), "the last dimension must be contiguous"


@triton.jit
def upcast(x, UP: tl.constexpr):  # type: ignore[no-untyped-def]
    """16-bit operands as fp32 in the interpreter, which multiplies bit patterns of bf16."""
    return x.to(tl.float32) if UP else x


@triton.jit
def as_read(tile, page_scale, SCALED: tl.constexpr, UP: tl.constexpr, LIKE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of records; SCALED for e4m3, whose products with the page's scale are numbers of type LIKE."""
    if SCALED:
        tile = (tile.to(tl.float32) * page_scale).to(LIKE)
    return upcast(tile, UP)


@triton.jit
def record_rows(records, row, TMA: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of records from one on, as they are stored; of a record that is nowhere any others."""
    if TMA:
        tile = records.load([row, 0])
    else:
        col = tl.arange(0, BLOCK_D)
        at = records + (tl.maximum(row, 0).to(tl.int64) + tl.arange(0, ROWS))[:, None] * D + col[None, :]
        tile = tl.load(at) if BLOCK_D == D else tl.load(at, mask=(col < D)[None, :], other=0.0)
    return tile


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    records, row, scale_at, SCALED: tl.constexpr, UP: tl.constexpr, LIKE: tl.constexpr,
    TMA: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of records from one on, as they are read."""
    page_scale = 1.0
    if SCALED:
        page_scale = tl.load(scale_at)
    return as_read(record_rows(records, row, TMA, ROWS, D, BLOCK_D), page_scale, SCALED, UP, LIKE)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """By the logistic function, which saturates without overflow."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0
