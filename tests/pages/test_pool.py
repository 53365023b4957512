"""PagePool: sizes."""

from __future__ import annotations

import torch

from oomb_accel.pages import PagePool


def test_a_page_of_128_tokens_and_128_channels_in_bf16_is_64_kib() -> None:
    pool = PagePool(3, 128, 128, torch.bfloat16, torch.device("cpu"))
    assert pool.num_slots == 3
    assert pool.num_bytes == 3 * 64 * 1024
    assert pool.storage.shape == (3, 2, 128, 128) and pool.storage.is_contiguous()


def test_a_pool_may_be_empty() -> None:
    assert PagePool(0, 4, 8, torch.float32, torch.device("cpu")).num_bytes == 0
