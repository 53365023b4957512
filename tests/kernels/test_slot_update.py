"""Slots of a table and zeroed records: what is named is changed, nothing else, wherever the numbers lie."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oomb_kernels import clear_records, set_slots
from oomb_kernels.slot_update import (
    clear_records_reference,
    launch_clear_records,
    launch_set_slots,
    set_slots_reference,
)
from tests.kernels.reference import INTERPRETED, ON_GPU

COUNTS = [1, 255, 256, 700]
SHAPES = [(4, 6), (80, 64)]  # page_tokens, head_dim; the second: a block and a ragged one


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in ON_GPU:
        test = mark(test)
    return test


def numbers(values: Tensor, device: str, pin: bool) -> Tensor:
    return values.int().pin_memory() if pin else values.int().to(device)


def check_slots(update: Callable[[Tensor, int, Tensor], None], count: int, device: str, pin: bool = False) -> None:
    torch.manual_seed(count)
    table = torch.full((3, 250, 4), -1, dtype=torch.int32, device=device)
    places, slots = torch.randperm(1000)[:count], torch.randint(-1, 10**6, (count,))
    update(table, 1000, numbers(torch.stack([places, slots]), device, pin))
    expected = torch.full((3000,), -1, dtype=torch.int32)
    expected[1000 + places] = slots.int()
    assert torch.equal(table.cpu().view(-1), expected)


def check_records(
    clear: Callable[[Tensor, Tensor], None],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    pin: bool = False,
) -> None:
    torch.manual_seed(0)
    pool = torch.full((9, 2, *shape), 7.0, dtype=dtype, device=device)
    slots = torch.randperm(9)[:5]
    clear(pool, numbers(slots, device, pin))
    expected = torch.full_like(pool, 7.0)
    expected[slots.to(device)] = 0
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "update",
    [set_slots, set_slots_reference, pytest.param(launch_set_slots, marks=INTERPRETED)],
    ids=["public", "reference", "interpreted"],
)
def test_slots(update: Callable[[Tensor, int, Tensor], None], count: int) -> None:
    check_slots(update, count, "cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "clear",
    [clear_records, clear_records_reference, pytest.param(launch_clear_records, marks=INTERPRETED)],
    ids=["public", "reference", "interpreted"],
)
def test_records(clear: Callable[[Tensor, Tensor], None], dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_records(clear, shape, dtype, "cpu")


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("count", COUNTS)
@on_gpu
def test_slots_on_gpu(count: int, pin: bool) -> None:
    check_slots(set_slots, count, "cuda", pin)


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_gpu
def test_records_on_gpu(dtype: torch.dtype, shape: tuple[int, int], pin: bool) -> None:
    check_records(clear_records, shape, dtype, "cuda", pin)
