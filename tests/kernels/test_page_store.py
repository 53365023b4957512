"""Whole pages between token-ordered tensors and pool records: bit-equal, and nothing else is touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oomb_kernels import add_pages_, load_pages, store_pages
from oomb_kernels.page_store import (
    add_pages_reference_,
    launch_add_pages_,
    launch_load_pages,
    launch_store_pages,
    load_pages_reference,
    store_pages_reference,
)
from tests.kernels.reference import TRITON_PLACES, token_major

SHAPES = [(4, 8, 3), (5, 12, 2), (1, 16, 4), (16, 80, 1), (3, 8, 0)]  # page_tokens, head_dim, pages


def slots_for(groups: int, pages: int, spare: int, device: str) -> Tensor:
    torch.manual_seed(7)
    shuffled = torch.randperm(groups * pages + spare)[: groups * pages]
    return shuffled.to(torch.int32).reshape(groups, pages).to(device)


def check(
    store: Callable[..., None],
    load: Callable[..., tuple[Tensor, Tensor]],
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
) -> None:
    page, dim, pages = shape
    groups = 2
    slots = slots_for(groups, pages, 3, device)
    k, v = (token_major(groups, pages * page, dim, dtype, device) for _ in range(2))
    pool = torch.full((groups * pages + 3, 2, page, dim), 7.0, dtype=dtype, device=device)
    store(pool, slots, k, v)
    for group in range(groups):
        for number in range(pages):
            tokens = slice(number * page, (number + 1) * page)
            record = pool[int(slots[group, number])]
            assert torch.equal(record[0], k[group, tokens]) and torch.equal(record[1], v[group, tokens])
    unused = sorted(set(range(len(pool))) - set(slots.flatten().tolist()))
    assert len(unused) == 3 and (pool[unused] == 7.0).all()
    loaded = load(pool, slots)
    for ours, expected in zip(loaded, (k, v), strict=True):
        assert ours.is_contiguous() and ours.dtype == dtype and torch.equal(ours, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("functions", [(store_pages, load_pages), (store_pages_reference, load_pages_reference)])
def test_reference(functions: tuple[Any, Any], dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    check(*functions, "cpu", dtype, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    check(launch_store_pages, launch_load_pages, device, dtype, shape)


def check_missing(load: Callable[..., tuple[Tensor, Tensor]], device: str, dtype: torch.dtype) -> None:
    """A slot of -1 is a page of zeros, and nothing is read for it."""
    page, dim = 4, 12
    pool = torch.full((4, 2, page, dim), float("nan"), dtype=dtype, device=device)
    pool[1] = torch.arange(2 * page * dim).reshape(2, page, dim).to(pool)
    slots = torch.tensor([[-1, 1, -1], [1, -1, -1]], dtype=torch.int32, device=device)
    for number, loaded in enumerate(load(pool, slots)):
        for group, row in enumerate(slots.tolist()):
            for index, slot in enumerate(row):
                tokens = loaded[group, index * page : (index + 1) * page]
                assert torch.equal(tokens, pool[1, number] if slot == 1 else torch.zeros_like(tokens))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("load", [load_pages, load_pages_reference])
def test_missing_pages_are_zeros(load: Any, dtype: torch.dtype) -> None:
    check_missing(load, "cpu", dtype)


@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel_with_missing_pages(device: str, dtype: torch.dtype) -> None:
    check_missing(launch_load_pages, device, dtype)


@pytest.mark.parametrize(("device", "dtype"), [p for p in TRITON_PLACES if p.values[0] == "cuda"])
def test_kernel_at_full_size(device: str, dtype: torch.dtype) -> None:
    check(launch_store_pages, launch_load_pages, device, dtype, (128, 128, 16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slots_beyond_two_gi_elements() -> None:
    """32-bit offsets would wrap: slot 70,000 of 32,768 elements lies at 2.29e9."""
    pool = torch.empty(70_001, 2, 128, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([[70_000]], dtype=torch.int32, device="cuda")
    k, v = (torch.randn(1, 128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    store_pages(pool, slots, k, v)
    assert torch.equal(pool[70_000, 0], k[0]) and torch.equal(pool[70_000, 1], v[0])
    assert torch.equal(load_pages(pool, slots)[1], v)


def check_added(add: Callable[..., None], device: str, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """The same bits as loading and adding; a slot of -1 adds nothing."""
    page, dim, pages, groups = 4, 12, 3, 2
    torch.manual_seed(11)
    pool = torch.randn(groups * pages + 3, 2, page, dim, device=device).to(pool_dtype)
    slots = slots_for(groups, pages, 3, device)
    slots[1, 2] = -1
    before = [token_major(groups, pages * page, dim, dtype, device) for _ in range(2)]
    after = [x.clone() for x in before]
    add(pool, slots, *after)
    for ours, old, added in zip(after, before, load_pages_reference(pool, slots), strict=True):
        assert torch.equal(ours, old.add_(added))
        assert not torch.equal(ours[1, :page], torch.zeros_like(ours[1, :page]))


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("add", [add_pages_, add_pages_reference_])
def test_added_reference(add: Callable[..., None], dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    check_added(add, "cpu", dtype, pool_dtype)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_added_kernel(device: str, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    check_added(launch_add_pages_, device, dtype, pool_dtype)
