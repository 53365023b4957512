"""FlexAttention with a block mask made of the same page lists: the library that comes closest to the own kernels.

Legend: H query heads, G KV heads, T tokens, D head_dim, B query blocks, K pages of a list, N candidate pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from oomb_accel.bench.timing import Task
from oomb_kernels import PageLists, load_pages

_AGREEMENT = 0.03
"""Relative L2 distance between two bf16 results of the same attention; wrong lists differ by about 1."""


def block_mask(lists: PageLists, *, num_heads: int, num_queries: int, page_tokens: int) -> BlockMask:
    """The lists as a block mask; every listed block is a full one, so no mask function runs."""
    pages_GBK, counts_GB = lists.pages_GBK, lists.counts_GB
    num_groups, num_blocks, room = pages_GBK.shape
    # The mask is turned over through a dense one, whose width is that of the index tensor.
    indices_GBN = pages_GBK.new_zeros(num_groups, num_blocks, lists.num_pages)
    indices_GBN[..., :room] = pages_GBK
    group = num_heads // num_groups
    indices_1HBN = indices_GBN.repeat_interleave(group, 0)[None]
    counts_1HB = counts_GB.repeat_interleave(group, 0)[None]
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts_1HB),
        torch.zeros_like(indices_1HBN),
        counts_1HB,
        indices_1HBN,
        BLOCK_SIZE=(lists.block_tokens, page_tokens),
        seq_lengths=(num_queries, lists.num_pages * page_tokens),
    )


def flex_tasks(
    q_HTD: Tensor,
    dout_HTD: Tensor,
    pool: Tensor,
    slots_GN: Tensor,
    lists: PageLists,
    *,
    scale: float,
    expected_HTD: Tensor,
    compiled: Callable[..., Any],
) -> dict[str, Task]:
    """Forward and backward of FlexAttention, warm.

    Its keys and values are contiguous copies of all candidate pages, made here and not timed.

    Args:
        expected_HTD: what comes out, by the own kernels.
        compiled: ``torch.compile(flex_attention, dynamic=False)``, or flex_attention itself.

    Raises:
        RuntimeError: it computes something else. Whatever torch.compile raises comes through as well.
    """
    num_heads, num_queries, _ = q_HTD.shape
    mask = block_mask(lists, num_heads=num_heads, num_queries=num_queries, page_tokens=pool.shape[2])
    q, k, v = (x[None].detach().requires_grad_() for x in (q_HTD, *load_pages(pool, slots_GN)))

    def forward() -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        return out

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout_HTD[None])

    out = forward()
    distance = (out[0].float() - expected_HTD.float()).norm() / expected_HTD.float().norm()
    if not distance <= _AGREEMENT:
        raise RuntimeError(
            f"FlexAttention computes something else than the own kernels.\n  Relative distance {distance:.2g}, "
            f"allowed {_AGREEMENT}.\n  Leave it out: --no-flex."
        )
    backward(out)
    return {"flex forward": Task(lambda _: forward()), "flex backward": Task(backward, prepare=forward)}


def compiled_flex() -> Callable[..., Any]:
    """FlexAttention compiled anew: a cache of earlier shapes would soon be full, and then it runs uncompiled."""
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled
