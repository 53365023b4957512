"""PagedKVCache of sparse layers: mean keys, several ranges at once, slots for kernels, and gradients of sinks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from oomb_accel.pages import PagedKVCache, PageShape, WantedLater
from oomb_accel.plan.sizes import parts_of
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from tests.harness.tolerance import assert_same_bits

CPU = torch.device("cpu")
HEADS, DIM, PAGE = 2, 3, 4
SPARSE, DENSE = 1, 0
"""The sparse layer and the dense one."""


@pytest.fixture(autouse=True)
def nan_memory() -> Iterator[None]:
    """Every `torch.empty` is full of NaN, so that reading uninitialised memory shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def shape(sinks: int = 1, grad_dtype: torch.dtype = torch.float32) -> PageShape:
    return PageShape(
        num_layers=2,
        num_kv_heads=HEADS,
        head_dim=DIM,
        page_tokens=PAGE,
        grad_dtype=grad_dtype,
        windows=(None, None),
        sparse_layers=frozenset({SPARSE}),
        sink_pages=sinks,
    )


def schedule(*lengths: int, chunk: int = 16) -> ChunkSchedule:
    return ChunkSchedule.build(lengths, list(range(sum(lengths))), chunk_tokens=chunk, page_tokens=PAGE)


def random_kv(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, HEADS, num_tokens, DIM, generator=torch.Generator().manual_seed(seed)).unbind(0)
    return k, v


def filled(plan: ChunkSchedule, dtype: torch.dtype = torch.float32) -> tuple[PagedKVCache, Tensor, Tensor]:
    """A cache with every chunk stored, and K and V of the stream."""
    cache = PagedKVCache(shape(), plan, CPU)
    k, v = (x.to(dtype) for x in random_kv(plan.num_tokens))
    for chunk in plan.chunks:
        for layer in (DENSE, SPARSE):
            cache.store(layer, chunk, k[:, chunk.start : chunk.end], v[:, chunk.start : chunk.end])
    return cache, k, v


def places(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(mask)


def all_of(pages: PageRange) -> WantedLater:
    """Every record of these pages."""
    return lambda: np.arange(len(pages) * HEADS)


def gradient_slots(cache: PagedKVCache, pages: PageRange) -> Tensor:
    return cache.gradient_slots(SPARSE, pages, all_of(pages))


def collected(cache: PagedKVCache, layer: int, chunk: Chunk) -> Tensor:
    """What later chunks left in the chunk's pages: dK and dV, ``[2, G, T, D]``."""
    both = torch.zeros(2, HEADS, chunk.num_tokens, DIM)
    cache.collect_gradients(layer, chunk, both[0], both[1])
    return both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_centroids_are_the_mean_keys_of_pages(dtype: torch.dtype) -> None:
    plan = schedule(50)
    cache, k, _ = filled(plan, dtype)
    past = plan.chunks[-1].past_pages
    means = k[:, :48].unflatten(1, (12, PAGE)).mean(2)
    assert_same_bits(cache.centroids(SPARSE, past), means)
    assert_same_bits(cache.centroids(SPARSE, PageRange(3, 7)), means[:, 3:7])
    assert cache.centroids(SPARSE, past).dtype == dtype


def test_centroids_of_a_document_that_starts_inside_a_chunk() -> None:
    plan = schedule(5, 3, 20)
    cache, k, _ = filled(plan)
    assert_same_bits(cache.centroids(SPARSE, plan.chunks[1].past_pages), k[:, 8:16].unflatten(1, (2, PAGE)).mean(2))


@pytest.mark.parametrize(
    ("page_tokens", "parts"), [(4, 1), (16, 1), (32, 2), (48, 1), (80, 1), (96, 2), (128, 8), (256, 16)]
)
def test_parts_of_a_page(page_tokens: int, parts: int) -> None:
    assert parts_of(page_tokens) == parts


def test_a_page_has_a_mean_key_for_every_16_tokens() -> None:
    plan = ChunkSchedule.build([200], [199], chunk_tokens=64, page_tokens=32)
    cache = PagedKVCache(replace(shape(), page_tokens=32), plan, CPU)
    k, v = random_kv(200)
    for chunk in plan.chunks:
        cache.store(SPARSE, chunk, k[:, chunk.start : chunk.end], v[:, chunk.start : chunk.end])
    means = k[:, :192].unflatten(1, (12, 16)).mean(2)
    assert_same_bits(cache.centroids(SPARSE, PageRange(0, 6)), means)
    assert_same_bits(cache.centroids(SPARSE, PageRange(2, 5)), means[:, 4:10])


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_shape_tells_all_bytes_beforehand(grad_dtype: torch.dtype) -> None:
    plan, like = schedule(50, 30), shape(grad_dtype=grad_dtype)
    cache = PagedKVCache(like, plan, CPU)
    k, v = random_kv(plan.num_tokens)
    for chunk in plan.chunks:
        for layer in (DENSE, SPARSE):
            cache.store(layer, chunk, k[:, chunk.start : chunk.end], v[:, chunk.start : chunk.end])
    for chunk in plan.chunks:
        for layer in (DENSE, SPARSE):
            past = chunk.past_pages
            if past:
                zeros = torch.zeros(HEADS, len(past) * PAGE, DIM)
                cache.add_gradients(layer, past, zeros, zeros, seed=0)
    means = cache.device_bytes()["mean_keys"]
    assert means == like.mean_key_bytes(plan, torch.float32) > 0
    cache.drop_centroids()  # as the backward sweep does before gradients come
    assert cache.num_bytes == like.num_bytes(plan, torch.float32)


def test_dense_layers_have_no_centroids() -> None:
    plan = schedule(50)
    cache, _, _ = filled(plan)
    with pytest.raises(KeyError):
        cache.centroids(DENSE, PageRange(0, 2))
    slots = shape().num_slots(plan) * shape().slot_bytes(torch.float32)
    assert cache.num_bytes == slots + 12 * HEADS * DIM * 4  # one layer's


def test_a_dense_shape_costs_nothing_more() -> None:
    plan = schedule(50)
    dense = PageShape(2, HEADS, DIM, PAGE, torch.bfloat16, (None, None))
    cache = PagedKVCache(dense, plan, CPU)
    for layer in (DENSE, SPARSE):
        cache.store(layer, plan.chunks[0], *random_kv(16))
        cache.add_gradients(layer, PageRange(0, 4), *random_kv(16), seed=0)
    num_slots = dense.num_slots(plan)
    assert cache.num_bytes == num_slots * (dense.slot_bytes(torch.float32) + dense.slot_bytes(torch.bfloat16))
    assert cache.gradient_pool.shape[0] == num_slots


def test_several_ranges_come_side_by_side() -> None:
    cache, k, v = filled(schedule(50))
    for ranges in ([(0, 1), (9, 12)], [(0, 0), (9, 12)], [(2, 4), (2, 3), (0, 1)]):
        rows = torch.cat([torch.arange(first * PAGE, end * PAGE) for first, end in ranges])
        loaded_k, loaded_v = cache.load(SPARSE, *(PageRange(first, end) for first, end in ranges))
        assert_same_bits(loaded_k, k[:, rows])
        assert_same_bits(loaded_v, v[:, rows])
        assert loaded_k.is_contiguous() and loaded_v.is_contiguous()


def test_slots_say_where_values_lie() -> None:
    cache, k, v = filled(schedule(50))
    slots = cache.value_slots(SPARSE, PageRange(2, 9), all_of(PageRange(2, 9)))
    assert slots.dtype == torch.int32 and slots.shape == (HEADS, 7)
    records = cache.value_pool[slots.long()]
    assert_same_bits(records[:, :, 0].flatten(1, 2), k[:, 8:36])
    assert_same_bits(records[:, :, 1].flatten(1, 2), v[:, 8:36])


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_new_gradient_slot_holds_zero_and_a_used_one_keeps_its_gradient(grad_dtype: torch.dtype) -> None:
    plan = schedule(50)
    cache = PagedKVCache(shape(grad_dtype=grad_dtype), plan, CPU)
    cache.add_gradients(SPARSE, PageRange(2, 3), *torch.full((2, HEADS, PAGE, DIM), 2.0).unbind(0), seed=0)
    for _ in range(2):  # asked again, nothing is lost
        slots = gradient_slots(cache, PageRange(1, 4))
        assert slots.dtype == torch.int32 and slots.shape == (HEADS, 3)
        per_page = cache.gradient_pool[slots.long()].float()
        assert_same_bits(per_page, torch.tensor([0.0, 2.0, 0.0])[None, :, None, None, None].expand_as(per_page))
    cache.gradient_pool[slots.long()] += 1  # as a kernel does
    cache.add_gradients(SPARSE, PageRange(3, 4), *torch.full((2, HEADS, PAGE, DIM), 4.0).unbind(0), seed=1)
    wanted = torch.tensor([0.0, 1.0, 3.0, 5.0]).repeat_interleave(PAGE)[None, None, :, None]
    assert_same_bits(collected(cache, SPARSE, plan.chunks[0]), wanted.expand(2, HEADS, 16, DIM))


def test_only_what_is_wanted_gets_a_gradient() -> None:
    plan = schedule(50)
    cache = PagedKVCache(shape(), plan, CPU)
    pages, wanted = PageRange(1, 4), np.array([[True, False], [False, False], [True, True]])
    slots = cache.gradient_slots(SPARSE, pages, lambda: places(wanted))
    assert (slots.T.numpy()[wanted] >= 0).all() and len(set(slots.T.numpy()[wanted].tolist())) == 3
    gradients = cache._gradients
    assert gradients is not None and (gradients.exists(SPARSE, pages) == wanted).all()
    cache.gradient_pool[slots.T[torch.from_numpy(wanted)].long()] += 1  # as a kernel does
    again = cache.gradient_slots(SPARSE, PageRange(1, 3), lambda: places(~wanted[:2]))
    cache.gradient_pool[again.T[torch.from_numpy(~wanted[:2])].long()] += 2
    per_page = torch.tensor([[0, 1, 2, 1], [0, 2, 2, 1]], dtype=torch.float32)
    assert_same_bits(
        collected(cache, SPARSE, plan.chunks[0]),
        per_page.repeat_interleave(PAGE, 1)[None, :, :, None].expand(2, HEADS, 16, DIM),
    )


def test_where_nobody_says_what_is_wanted_all_have_a_gradient() -> None:
    plan = schedule(50)
    cache = PagedKVCache(shape(), plan, CPU)
    cache.gradient_slots(SPARSE, PageRange(2, 3), lambda: places(np.array([[True, False]])))
    slots = cache.gradient_slots(SPARSE, PageRange(1, 4), None)
    assert (slots >= 0).all() and len(set(slots.flatten().tolist())) == 3 * HEADS
    assert not cache.gradient_pool[slots.long()].any()


def test_adding_to_pages_of_which_some_heads_have_gradients() -> None:
    plan = schedule(50)
    cache = PagedKVCache(shape(), plan, CPU)
    wanted = np.array([[False, True], [False, False]])
    slots = cache.gradient_slots(SPARSE, PageRange(1, 3), lambda: places(wanted))
    cache.gradient_pool[slots[1, 0].long()] += 1
    cache.add_gradients(SPARSE, PageRange(0, 3), *torch.full((2, HEADS, 3 * PAGE, DIM), 4.0).unbind(0), seed=0)
    per_page = torch.tensor([[4, 4, 4, 0], [4, 5, 4, 0]], dtype=torch.float32)
    assert_same_bits(
        collected(cache, SPARSE, plan.chunks[0]),
        per_page.repeat_interleave(PAGE, 1)[None, :, :, None].expand(2, HEADS, 16, DIM),
    )


def test_gradient_slots_return_after_release() -> None:
    plan = schedule(50)
    cache = PagedKVCache(shape(grad_dtype=torch.bfloat16), plan, CPU)
    for _ in range(3):
        for chunk in plan.chunks[:3]:
            pages = PageRange(max(1, chunk.own_pages.first), chunk.own_pages.end)
            cache.gradient_pool[gradient_slots(cache, pages).long()] += 1
            cache.add_gradients(SPARSE, chunk.own_pages, *random_kv(16), seed=0)
            cache.add_gradients(DENSE, chunk.own_pages, *random_kv(16), seed=0)
        for chunk in plan.chunks[:3]:
            cache.release(chunk)
    assert not collected(cache, SPARSE, plan.chunks[0]).any()


def documents(*lengths: int, sinks: int, chunk: int = 16) -> list[tuple[int, int]]:
    return [(r.first, r.end) for r in shape(sinks).sinks(schedule(*lengths, chunk=chunk))]


def test_sinks_are_the_first_pages_of_each_document_that_goes_on() -> None:
    assert documents(50, sinks=1) == [(0, 1)]
    assert documents(50, sinks=0) == [(0, 0)]
    assert documents(50, sinks=6) == [(0, 6)], "sinks may reach into the next chunk"
    assert documents(50, sinks=100) == [(0, 12)]
    # 5 ends in the first chunk; 40 starts there with two pages, goes on with four and ends; 30 has four and ends.
    assert schedule(5, 40, 30).num_pages == 10
    assert documents(5, 40, 30, sinks=2) == [(0, 2), (6, 8)]
    assert documents(7, 9, sinks=2) == []


def test_many_chunks_add_to_a_sink_without_rounding() -> None:
    """Elsewhere bf16 rounds after every addition; the sink of a sparse layer does not."""
    plan = schedule(50)
    cache = PagedKVCache(shape(grad_dtype=torch.bfloat16), plan, CPU)
    total = torch.zeros(2, HEADS, 2 * PAGE, DIM)
    for step in range(40):
        added = torch.stack(random_kv(2 * PAGE, step)) / 100
        for layer in (DENSE, SPARSE):
            cache.add_gradients(layer, PageRange(0, 2), added[0], added[1], seed=step)
        total += added
    sparse, dense = (collected(cache, layer, plan.chunks[0])[:, :, : 2 * PAGE] for layer in (SPARSE, DENSE))
    assert_same_bits(sparse[:, :, :PAGE], total[:, :, :PAGE])
    for rounded in (sparse[:, :, PAGE:], dense):
        assert_same_bits(rounded, rounded.bfloat16().float())
    assert not torch.equal(dense[:, :, :PAGE], total[:, :, :PAGE])


def test_sinks_in_the_middle_of_a_span_and_of_the_stream() -> None:
    """Every page gets its own gradient, whichever pool it lies in; the second document's sinks are its own."""
    plan = schedule(5, 40, 30)
    cache = PagedKVCache(shape(sinks=3, grad_dtype=torch.bfloat16), plan, CPU)
    third = 1 + 2.0**-20  # bf16 cannot hold it
    past = plan.chunks[2].past_pages
    assert past == PageRange(0, 6)
    for pages in (PageRange(0, 2), PageRange(2, 6)):  # the sinks 0, 1, 2 are cut by the spans
        value = torch.full((HEADS, len(pages) * PAGE, DIM), third)
        cache.add_gradients(SPARSE, pages, value, value, seed=0)
    own = plan.chunks[0].own_pages
    assert own == PageRange(0, 2)
    assert collected(cache, SPARSE, plan.chunks[0])[:, :, 5:13].eq(third).all()
    second = collected(cache, SPARSE, plan.chunks[1])
    assert second[:, :, :PAGE].eq(third).all() and not second[:, :, PAGE:].eq(third).any()
    assert (second[:, :, PAGE:] - 1).abs().max() < 2**-6
    assert gradient_slots(cache, PageRange(3, 6)).shape == (HEADS, 3)
    with pytest.raises(AssertionError, match="sinks"):
        gradient_slots(cache, PageRange(2, 6))


def test_sinks_need_no_second_pool_where_gradients_are_fp32() -> None:
    plan = schedule(50)
    cache = PagedKVCache(shape(), plan, CPU)
    cache.add_gradients(SPARSE, PageRange(0, 4), *random_kv(16), seed=0)
    assert cache.num_bytes == shape().num_slots(plan) * shape().slot_bytes(torch.float32)


def test_the_pools_of_gradients_fit_all_pages_of_all_layers() -> None:
    plan = schedule(50, 40)
    half = shape(sinks=2, grad_dtype=torch.bfloat16)
    cache = PagedKVCache(half, plan, CPU)
    for chunk in plan.chunks:
        for layer in (DENSE, SPARSE):
            if chunk.past_pages:
                size = len(chunk.past_pages) * PAGE
                cache.add_gradients(layer, chunk.past_pages, *torch.ones(2, HEADS, size, DIM).unbind(0), seed=0)
    sinks = 2 * 2 * HEADS  # of two documents, in one layer
    others = half.num_slots(plan) - sinks
    assert cache.num_bytes == others * half.slot_bytes(torch.bfloat16) + sinks * half.slot_bytes(torch.float32)
