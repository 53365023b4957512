"""PagedKVCache: what goes in comes out, gradients start from nothing, and nothing uninitialised is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from oomb_accel.pages import PagedKVCache, PageShape
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from tests.harness.tolerance import assert_same_bits

CPU = torch.device("cpu")
HEADS, DIM, PAGE = 2, 3, 4


@pytest.fixture(autouse=True)
def nan_memory() -> Iterator[None]:
    """Every `torch.empty` is full of NaN, so that reading uninitialised memory shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def shape(*windows: int | None, grad_dtype: torch.dtype = torch.float32) -> PageShape:
    return PageShape(
        num_layers=len(windows),
        num_kv_heads=HEADS,
        head_dim=DIM,
        page_tokens=PAGE,
        grad_dtype=grad_dtype,
        windows=windows,
    )


def schedule(*lengths: int, chunk: int = 16) -> ChunkSchedule:
    targets = list(range(sum(lengths)))
    return ChunkSchedule.build(lengths, targets, chunk_tokens=chunk, page_tokens=PAGE)


def random_kv(chunk: Chunk, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 100 * chunk.index)
    k, v = torch.randn(2, HEADS, chunk.num_tokens, DIM, generator=generator).unbind(0)
    return k, v


def test_stored_pages_come_back_in_token_order() -> None:
    plan = schedule(40)
    cache = PagedKVCache(shape(None, None), plan, CPU)
    stored = [[random_kv(chunk, layer) for chunk in plan.chunks] for layer in range(2)]
    for chunk in plan.chunks:
        for layer in range(2):
            cache.store(layer, chunk, *stored[layer][chunk.index])
    for layer in range(2):
        past = plan.chunks[-1].past_pages
        k, v = cache.load(layer, past)
        assert_same_bits(k, torch.cat([k for k, _ in stored[layer][:-1]], 1))
        assert_same_bits(v, torch.cat([v for _, v in stored[layer][:-1]], 1))
        k, _ = cache.load(layer, PageRange(3, 5))
        assert_same_bits(k, torch.cat([k for k, _ in stored[layer][:-1]], 1)[:, 12:20])


def test_only_the_document_that_goes_on_is_stored() -> None:
    plan = schedule(5, 3, 20)
    cache = PagedKVCache(shape(None), plan, CPU)
    k, v = random_kv(plan.chunks[0])
    cache.store(0, plan.chunks[0], k, v)
    loaded, _ = cache.load(0, plan.chunks[1].past_pages)
    assert_same_bits(loaded, k[:, 8:16])


def test_no_memory_is_taken_before_the_first_page_and_the_first_gradient() -> None:
    plan = schedule(40)
    cache = PagedKVCache(shape(None), plan, CPU)
    assert cache.num_bytes == 0
    cache.store(0, plan.chunks[0], *random_kv(plan.chunks[0]))
    values = 8 * HEADS * 2 * PAGE * DIM * 4
    assert cache.num_bytes == values
    cache.add_gradients(0, PageRange(0, 1), *torch.zeros(2, HEADS, PAGE, DIM).unbind(0), seed=0)
    assert cache.num_bytes == 2 * values


def test_the_first_contribution_stores_and_later_ones_add() -> None:
    plan = schedule(40)
    cache = PagedKVCache(shape(None), plan, CPU)
    one, two = torch.full((HEADS, 8, DIM), 1.0), torch.full((HEADS, 16, DIM), 2.0)
    cache.add_gradients(0, PageRange(1, 3), one, 10 * one, seed=0)  # pages 1, 2: first touch
    cache.add_gradients(0, PageRange(0, 4), two, 10 * two, seed=1)  # 0 and 3 first, 1 and 2 again
    dk, dv = torch.full((2, HEADS, 16, DIM), 0.5).unbind(0)
    cache.collect_gradients(0, plan.chunks[0], dk, dv)
    per_page = torch.tensor([2.0, 3.0, 3.0, 2.0])
    wanted = per_page.repeat_interleave(PAGE)[None, :, None].expand(HEADS, 16, DIM)
    assert_same_bits(dk, wanted + 0.5)
    assert_same_bits(dv, 10 * wanted + 0.5)


def test_a_page_without_a_gradient_counts_as_zero() -> None:
    plan = schedule(40)
    cache = PagedKVCache(shape(None), plan, CPU)
    dk, dv = torch.ones(2, HEADS, 16, DIM).unbind(0)
    cache.collect_gradients(0, plan.chunks[0], dk, dv)
    assert_same_bits(dk, torch.ones_like(dk))
    cache.add_gradients(0, PageRange(2, 3), *torch.ones(2, HEADS, PAGE, DIM).unbind(0), seed=0)
    cache.collect_gradients(0, plan.chunks[0], dk, dv)
    touched = torch.ones(16).index_fill(0, torch.arange(8, 12), 2.0)
    assert_same_bits(dk, touched[None, :, None].expand_as(dk))
    assert_same_bits(dv, touched[None, :, None].expand_as(dv))


def test_layers_do_not_share_pages() -> None:
    plan = schedule(40)
    cache = PagedKVCache(shape(None, None), plan, CPU)
    cache.add_gradients(1, PageRange(0, 4), *torch.ones(2, HEADS, 16, DIM).unbind(0), seed=0)
    dk, dv = torch.zeros(2, HEADS, 16, DIM).unbind(0)
    cache.collect_gradients(0, plan.chunks[0], dk, dv)
    assert_same_bits(dk, torch.zeros_like(dk))


def test_gradients_of_a_chunk_with_several_segments_go_to_the_one_that_goes_on() -> None:
    plan = schedule(5, 20)
    cache = PagedKVCache(shape(None), plan, CPU)
    cache.add_gradients(0, plan.chunks[1].past_pages, *torch.ones(2, HEADS, 8, DIM).unbind(0), seed=0)
    dk, dv = torch.zeros(2, HEADS, 13, DIM).unbind(0)
    cache.collect_gradients(0, plan.chunks[0], dk, dv)
    assert dk[:, :5].eq(0).all() and dk[:, 5:].eq(1).all()


@pytest.mark.parametrize(("window", "kept"), [(1, 0), (2, 1), (5, 1), (6, 2), (13, 3), (16, 4), (64, 4)])
def test_a_window_layer_keeps_only_pages_in_reach(window: int, kept: int) -> None:
    plan = schedule(40)
    pages = shape(window)
    assert len(pages.kept_pages(0, plan.chunks[0].own_pages)) == kept
    assert pages.num_slots(plan) == 2 * kept * HEADS
    cache = PagedKVCache(pages, plan, CPU)
    k, v = random_kv(plan.chunks[0])
    cache.store(0, plan.chunks[0], k, v)
    if kept:
        loaded, _ = cache.load(0, plan.chunks[0].own_pages.newest(kept))
        assert_same_bits(loaded, k[:, 16 - kept * PAGE :])
    else:
        assert cache.num_bytes == 0


def test_released_slots_serve_again() -> None:
    """More pages than slots pass through, as long as not all are held at once."""
    plan = schedule(40)
    cache = PagedKVCache(shape(None), plan, CPU)
    for _ in range(3):
        for chunk in plan.chunks[:2]:
            cache.store(0, chunk, *random_kv(chunk))
            cache.add_gradients(0, chunk.own_pages, *random_kv(chunk, 1), seed=0)
        for chunk in plan.chunks[1::-1]:
            cache.release(chunk)
    dk, dv = torch.zeros(2, HEADS, 16, DIM).unbind(0)
    cache.collect_gradients(0, plan.chunks[0], dk, dv)
    assert dk.eq(0).all(), "a released page has no gradient"


def test_storing_a_page_twice_is_an_error() -> None:
    plan = schedule(40)
    cache = PagedKVCache(shape(None), plan, CPU)
    cache.store(0, plan.chunks[0], *random_kv(plan.chunks[0]))
    with pytest.raises(AssertionError):
        cache.store(0, plan.chunks[0], *random_kv(plan.chunks[0]))


def test_bf16_page_gradients_do_not_lose_small_additions() -> None:
    """400 additions of 1/1024 to 1 vanish under round-to-nearest in bf16; stochastic rounding keeps their sum."""
    plan = schedule(400, chunk=200)
    cache = PagedKVCache(shape(None, grad_dtype=torch.bfloat16), plan, CPU)
    whole = plan.chunks[0].own_pages
    size = (2, HEADS, 200, DIM)
    cache.add_gradients(0, whole, *torch.ones(size).unbind(0), seed=0)
    for step in range(1, 401):
        cache.add_gradients(0, whole, *torch.full(size, 1 / 1024).unbind(0), seed=step)
    dk, dv = torch.zeros(size).unbind(0)
    cache.collect_gradients(0, plan.chunks[0], dk, dv)
    mean = torch.stack([dk, dv]).mean().item()
    # 2,400 elements whose rounding errors have a standard deviation of about 2**-8 * sqrt(400) / 4 each.
    assert abs(mean - (1 + 400 / 1024)) < 5 * (2**-8 * 20 / 4) / 2400**0.5, mean


def test_the_same_seeds_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        plan = schedule(40)
        cache = PagedKVCache(shape(None, grad_dtype=torch.bfloat16), plan, CPU)
        for step in range(3):
            cache.add_gradients(0, PageRange(0, 4), *random_kv(plan.chunks[0], step), seed=step)
        dk, dv = torch.zeros(2, HEADS, 16, DIM).unbind(0)
        cache.collect_gradients(0, plan.chunks[0], dk, dv)
        results.append(torch.stack([dk, dv]))
    assert_same_bits(results[0], results[1])
