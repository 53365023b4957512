"""Sizes in bytes of what a stream keeps, in whole numbers: the one place for engine and estimate. No torch."""

from __future__ import annotations

import math

GIB = 1024**3
_MOST_MARGIN_BYTES = 4 * GIB
_MARGIN_SHARE = 16

_MIB = 1024**2

LARGEST_SLAB_BYTES = GIB
_SMALLEST_SLAB_BYTES = 2 << 20
_LEAST_SLABS = 8

_PAGE_BACKWARD_BYTES, _PARTIAL_SUMS_BYTES = GIB, GIB // 4
"""Most that the backward of attention to selected pages takes for its scores, and about the most for partial sums."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Bytes of one number, by name of its type or storage."""

SCALE_BYTES = 8
"""For each float8 record, in a place of their own: one fp32 scale for K, one for V."""

PART_TOKENS = 16
"""Tokens with one mean key. Longer runs hide short passages, shorter ones draw selection to single odd keys, see
docs/sparsity.md."""

_ZERO3_LIVE_NUMBERS = 10**9
"""DeepSpeed's default of ``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``."""


def gathered_numbers(total: int, largest: int) -> int:
    """Most numbers of gathered weights that ZeRO 3 holds at once: twice the largest unit, which arrives in one buffer
    and is copied out of it; or what DeepSpeed keeps because it is wanted again soon.

    Args:
        total: numbers in all weights.
        largest: in the largest of what is gathered at once: a decoder layer, the embeddings, the head.
    """
    return min(2 * total, max(2 * largest, _ZERO3_LIVE_NUMBERS))


def host_margin(total_bytes: int) -> int:
    """Bytes of a host's memory that are left to everybody else: a part of it, up to a few GiB."""
    return min(total_bytes // _MARGIN_SHARE, _MOST_MARGIN_BYTES)


def with_host_margin(num_bytes: int) -> int:
    """Memory of a host that leaves so many bytes beside its margin."""
    return num_bytes + min(-(-num_bytes // (_MARGIN_SHARE - 1)), _MOST_MARGIN_BYTES)


def gib_text(num_bytes: int) -> str:
    """GiB with one decimal, or with three below 1 GiB; rounded down, so that what is offered as a setting fits."""
    scale = 10 if num_bytes >= GIB else 1000
    return f"{math.floor(num_bytes / GIB * scale) / scale:.10g}"


def gib_above(num_bytes: int) -> str:
    """GiB with up to three decimals, rounded up: a setting of at least so many bytes."""
    return f"{math.ceil(num_bytes / GIB * 1000) / 1000:.10g}"


def slab_bytes_for(num_bytes: int, record_bytes: int) -> int:
    """Slab size of host memory that will hold about so many bytes: a power of two from 2 MiB to 1 GiB, at least eight
    slabs, so that the last one wastes little; larger where a record would not fit, which never straddles slabs."""
    size = _SMALLEST_SLAB_BYTES
    while size < record_bytes or (size < LARGEST_SLAB_BYTES and 2 * size * _LEAST_SLABS <= num_bytes):
        size *= 2
    return size


def in_slabs(num_bytes: int, slab_bytes: int) -> int:
    """Bytes of host memory that is made for so many: whole slabs, and one more for the gaps that records of two sizes
    leave."""
    return (-(-num_bytes // slab_bytes) + 1) * slab_bytes


def record_bytes(page_tokens: int, head_dim: int, dtype: str) -> int:
    """Bytes of K and V, or of their gradients, of one page of one KV head.

    Args:
        dtype: a key of `DTYPE_BYTES`.
    """
    return 2 * page_tokens * head_dim * DTYPE_BYTES[dtype]


def kept_pages(own_pages: int, window: int | None, page_tokens: int) -> int:
    """Of a chunk's own pages, those that a token right behind them can still attend to."""
    return own_pages if window is None else min(own_pages, -(-(window - 1) // page_tokens))


def parts_of(page_tokens: int) -> int:
    """Mean keys of a page: one for each run of 16 tokens, or fewer, so that it is a power of two."""
    runs = page_tokens // math.gcd(page_tokens, PART_TOKENS)
    return runs & -runs


def output_bytes(num_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of the attention output and its fp32 LSE of one token in one layer."""
    return num_heads * (head_dim * itemsize + 4)


def kept_product_bytes(hidden: int, rank: int, itemsize: int) -> int:
    """Bytes of the output of an MLP's last product, or attention's, and of its ``x A^T`` of one token in one layer.

    Args:
        rank: of the adapters.
    """
    return itemsize * (hidden + rank)


def head_gradient_bytes(hidden: int, itemsize: int) -> int:
    """Bytes of a target's log-probability, and of its gradient with respect to what the head reads."""
    return hidden * itemsize + 4


def float8_input_bytes(num_tokens: int, *widths: int) -> int:
    """Bytes of the largest input or output gradient in 8 bits, of which there is one at a time, with its scales.

    Args:
        widths: of linear layers.
    """
    return num_tokens * (max(widths) + 4)


def scores_are_formed_twice(
    *, num_heads: int, num_kv_heads: int, num_blocks: int, q_block: int, top_k: int, page_tokens: int
) -> bool:
    """Whether the backward of attention to selected pages has no room for the scores of one KV head: for 7 query heads
    with top_k 64 from chunks of 16,384 tokens on."""
    return _scores_bytes(num_heads, num_kv_heads, num_blocks, q_block, top_k, page_tokens) > _PAGE_BACKWARD_BYTES


def _scores_bytes(
    num_heads: int, num_kv_heads: int, num_blocks: int, q_block: int, top_k: int, page_tokens: int
) -> int:
    """Of one KV head."""
    return num_blocks * top_k * (num_heads // num_kv_heads) * page_tokens * q_block * 2


def page_backward_bytes(
    *, num_heads: int, num_kv_heads: int, num_blocks: int, q_block: int, top_k: int, page_tokens: int, head_dim: int
) -> int:
    """Bytes that the backward of attention to selected pages works in, in 16-bit numbers. The same as
    `oomb_kernels.backward_workspace_bytes`, which needs torch.

    Args:
        num_blocks: query blocks of the chunk.
    """
    of_a_head = _scores_bytes(num_heads, num_kv_heads, num_blocks, q_block, top_k, page_tokens)
    heads_at_once = min(num_kv_heads, _PAGE_BACKWARD_BYTES // max(1, of_a_head))
    entries, partial_bytes = num_kv_heads * num_blocks * top_k, 4 * 2 * page_tokens * head_dim
    longest = max(8, top_k // 4, 2 * entries // (_PARTIAL_SUMS_BYTES // partial_bytes))
    partials = 2 * entries // (longest + 1)
    return heads_at_once * of_a_head + partials * partial_bytes + 8 * num_heads * num_blocks * q_block


def size_text(num_bytes: int) -> str:
    """A size for messages: GiB with one decimal, whole MiB where that would be hardly a digit; nothing is ``0 GiB``."""
    if num_bytes <= 0:
        return "0 GiB"
    if num_bytes < _MIB:
        return "less than 1 MiB"
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / _MIB:,.0f} MiB"
