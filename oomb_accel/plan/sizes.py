"""Sizes in bytes of what a stream keeps, in whole numbers: the one place for engine and estimate. No torch."""

from __future__ import annotations

import math

GIB = 1024**3
_MOST_MARGIN_BYTES = 4 * GIB
_MARGIN_SHARE = 16

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Bytes of one number of a page, by name of its storage."""

SCALE_BYTES = 8
"""Beside each float8 record: one fp32 scale for K, one for V."""

PART_TOKENS = 16
"""Tokens with one mean key. Longer runs hide short passages, shorter ones draw selection to single odd keys, see
docs/sparsity.md."""


def host_margin(total_bytes: int) -> int:
    """Bytes of a host's memory that are left to everybody else: a part of it, up to a few GiB."""
    return min(total_bytes // _MARGIN_SHARE, _MOST_MARGIN_BYTES)


def record_bytes(page_tokens: int, head_dim: int, dtype: str) -> int:
    """Bytes of K and V, or of their gradients, of one page of one KV head.

    Args:
        dtype: a key of `DTYPE_BYTES`.
    """
    return 2 * page_tokens * head_dim * DTYPE_BYTES[dtype] + (SCALE_BYTES if dtype == "float8" else 0)


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
