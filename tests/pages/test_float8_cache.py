"""PagedKVCache with K and V in 8 bits: what is stored is read everywhere, and what it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from oomb_accel.pages import PagedKVCache, PageShape, PassNeeds, divide, working_bytes
from oomb_accel.schedule import ChunkSchedule, PageRange
from oomb_kernels import FLOAT8
from tests.harness.float8 import as_stored
from tests.harness.tolerance import assert_same_bits

CPU = torch.device("cpu")
HEADS, DIM, PAGE = 2, 3, 4
SHAPE = PageShape(
    2, HEADS, DIM, PAGE, torch.float32, (None, None), sparse_layers=frozenset({1}), sink_pages=1, float8=True
)


@pytest.fixture
def plan() -> ChunkSchedule:
    return ChunkSchedule.build([50], list(range(50)), chunk_tokens=16, page_tokens=PAGE)


def filled(plan: ChunkSchedule, dtype: torch.dtype) -> tuple[PagedKVCache, Tensor, Tensor]:
    """A cache with every chunk stored in both layers, and K and V as they are to be read."""
    cache = PagedKVCache(SHAPE, plan, CPU)
    k, v = torch.randn(2, HEADS, 50, DIM, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(0)
    for chunk in plan.chunks:
        for layer in range(2):
            cache.store(layer, chunk, k[:, chunk.start : chunk.end], v[:, chunk.start : chunk.end])
    return cache, as_stored(k, PAGE), as_stored(v, PAGE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_pages_are_read_as_they_were_stored(plan: ChunkSchedule, dtype: torch.dtype) -> None:
    cache, k, v = filled(plan, dtype)
    for layer in range(2):
        for ranges in ([(0, 4)], [(0, 1), (9, 12)], [(2, 4), (2, 3)]):
            rows = torch.cat([torch.arange(first * PAGE, end * PAGE) for first, end in ranges])
            loaded_k, loaded_v = cache.load(layer, *(PageRange(first, end) for first, end in ranges))
            assert loaded_k.dtype == dtype
            assert_same_bits(loaded_k, k[:, rows])
            assert_same_bits(loaded_v, v[:, rows])


def test_kernels_find_the_same_numbers_and_their_scales(plan: ChunkSchedule) -> None:
    cache, k, v = filled(plan, torch.bfloat16)
    pages = PageRange(2, 9)
    slots = cache.value_slots(1, pages, lambda: np.ones((7, HEADS), bool))
    scales = cache.value_scales(1, pages)
    assert scales is not None and scales.shape == (HEADS, 7, 2) and cache.value_pool.dtype == FLOAT8
    read = cache.value_pool[slots.long()].float() * scales[..., None, None]
    for part, x in enumerate((k, v)):
        assert_same_bits(read[:, :, part].flatten(1, 2), x[:, 8:36].float())


def test_mean_keys_are_those_of_unrounded_keys(plan: ChunkSchedule) -> None:
    k = torch.randn(HEADS, 16, DIM)
    cache = PagedKVCache(SHAPE, plan, CPU)
    cache.store(1, plan.chunks[0], k, k)
    assert_same_bits(cache.centroids(1, PageRange(0, 4)), k.unflatten(1, (4, PAGE)).mean(2))


def test_gradients_have_no_scales(plan: ChunkSchedule) -> None:
    cache, _, _ = filled(plan, torch.float32)
    dk, dv = torch.randn(2, HEADS, 16, DIM).unbind(0)
    cache.add_gradients(0, PageRange(0, 4), dk, dv, seed=0)
    both = torch.zeros(2, HEADS, 16, DIM)
    cache.collect_gradients(0, plan.chunks[0], both[0], both[1])
    assert_same_bits(both, torch.stack([dk, dv]))


def test_bytes_are_as_planned(plan: ChunkSchedule) -> None:
    cache, _, _ = filled(plan, torch.bfloat16)
    zeros = torch.zeros(HEADS, 48, DIM)
    for layer in range(2):
        cache.add_gradients(layer, PageRange(0, 12), zeros, zeros, seed=0)
    cache.drop_centroids()
    assert cache.num_bytes == SHAPE.num_bytes(plan, torch.bfloat16)
    plain = replace(SHAPE, float8=False)
    saved = plain.num_bytes(plan, torch.bfloat16) - SHAPE.num_bytes(plan, torch.bfloat16)
    assert saved == 2 * HEADS * 12 * (2 * PAGE * DIM - 8)  # a byte each of K and V, less two scales


def test_a_small_device_holds_more_of_them(plan: ChunkSchedule) -> None:
    needs = PassNeeds(chunk_pages=4, span_pages=4, listed_pages=4)
    plain = replace(SHAPE, float8=False)
    room = working_bytes(plain, plan, torch.bfloat16, needs)
    assert working_bytes(SHAPE, plan, torch.bfloat16, needs) < room
    rooms = [divide(shape, plan, torch.bfloat16, needs, room // 2) for shape in (plain, SHAPE)]
    assert rooms[0] is not None and rooms[1] is not None and rooms[1].host_bytes < rooms[0].host_bytes
