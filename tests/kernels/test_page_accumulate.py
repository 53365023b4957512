"""Page gradients: fp32 sums are exact, bf16 sums are unbiased, a first contribution never reads its slot."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oomb_kernels import accumulate_pages
from oomb_kernels.page_accumulate import accumulate_pages_reference, launch_accumulate_pages
from tests.kernels.reference import INTERPRETED, ON_GPU, TRITON_PLACES, token_major

Accumulate = Callable[..., None]
GROUPS, PAGES, PAGE, DIM, SPARE = 2, 3, 5, 12, 2

# Without a GPU the kernel runs in the interpreter; stochastic rounding works on integers there and is exact.
KERNEL_PLACES = [
    pytest.param(
        launch_accumulate_pages,
        "cpu",
        marks=INTERPRETED,
        id="interpreted",
    ),
    pytest.param(launch_accumulate_pages, "cuda", marks=ON_GPU, id="gpu"),
]
PLACES = [
    pytest.param(accumulate_pages, "cpu", id="public"),
    pytest.param(accumulate_pages_reference, "cpu", id="reference"),
    *KERNEL_PLACES,
]


def slots_on(device: str) -> Tensor:
    torch.manual_seed(5)
    shuffled = torch.randperm(GROUPS * PAGES + SPARE)[: GROUPS * PAGES]
    return shuffled.to(torch.int32).reshape(GROUPS, PAGES).to(device)


def as_records(dk: Tensor, dv: Tensor) -> Tensor:
    """[G, n*P, D] twice -> [G, n, 2, P, D]."""
    return torch.stack([dk.unflatten(1, (-1, PAGE)), dv.unflatten(1, (-1, PAGE))], 2)


def check_exact(accumulate: Accumulate, device: str, grad_dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    slots = slots_on(device)
    first, second = ([token_major(GROUPS, PAGES * PAGE, DIM, grad_dtype, device) for _ in range(2)] for _ in range(2))
    pool = torch.full((GROUPS * PAGES + SPARE, 2, PAGE, DIM), float("nan"), dtype=pool_dtype, device=device)
    accumulate(pool, slots, *first, first=True, seed=0)
    assert torch.equal(pool[slots.long()], as_records(*first).to(pool_dtype))
    accumulate(pool, slots, *second, first=False, seed=1)
    expected = as_records(*first).to(pool_dtype) + as_records(*second).to(pool_dtype)
    assert torch.equal(pool[slots.long()], expected)
    assert pool.isnan().sum() == SPARE * 2 * PAGE * DIM


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("accumulate", [accumulate_pages, accumulate_pages_reference])
def test_reference_is_exact(accumulate: Accumulate, grad_dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    check_exact(accumulate, "cpu", grad_dtype, pool_dtype)


@pytest.mark.parametrize(("device", "grad_dtype"), TRITON_PLACES)
def test_kernel_is_exact(device: str, grad_dtype: torch.dtype) -> None:
    check_exact(launch_accumulate_pages, device, grad_dtype, torch.float32)


@pytest.mark.parametrize(("accumulate", "device"), PLACES)
def test_no_pages(accumulate: Accumulate, device: str) -> None:
    pool = torch.ones(2, 2, PAGE, DIM, device=device)
    nothing = torch.empty(GROUPS, 0, DIM, device=device)
    accumulate(pool, torch.empty(GROUPS, 0, dtype=torch.int32, device=device), nothing, nothing, first=True, seed=0)
    assert (pool == 1).all()


@pytest.mark.parametrize(("accumulate", "device"), PLACES)
def test_bfloat16_rounds_to_a_neighbour_and_repeats(accumulate: Accumulate, device: str) -> None:
    slots = slots_on(device)
    dk, dv = (token_major(GROUPS, PAGES * PAGE, DIM, torch.float32, device) for _ in range(2))
    results = []
    for seed in (3, 3, 4):
        pool = torch.full((GROUPS * PAGES + SPARE, 2, PAGE, DIM), float("nan"), dtype=torch.bfloat16, device=device)
        accumulate(pool, slots, dk, dv, first=True, seed=seed)
        results.append(pool[slots.long()])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    exact = as_records(dk, dv)
    assert ((results[0].float() - exact).abs() <= exact.abs() * 2**-7).all()


@pytest.mark.parametrize(("accumulate", "device"), PLACES)
def test_bfloat16_bits_do_not_depend_on_slots(accumulate: Accumulate, device: str) -> None:
    slots = slots_on(device)
    dk, dv = (token_major(GROUPS, PAGES * PAGE, DIM, torch.float32, device) for _ in range(2))
    results = []
    for placed in (slots, slots.flatten().flip(0).view_as(slots)):
        pool = torch.zeros(GROUPS * PAGES + SPARE, 2, PAGE, DIM, dtype=torch.bfloat16, device=device)
        accumulate(pool, placed, dk, dv, first=False, seed=11)
        results.append(pool[placed.long()])
    assert torch.equal(*results)


@pytest.mark.parametrize(("accumulate", "device"), PLACES)
def test_bfloat16_sum_is_unbiased(accumulate: Accumulate, device: str) -> None:
    """1 + 64 times 2^-10: round-to-nearest would leave every element at 1, its neighbour being 1 + 2^-7."""
    page, dim, steps, step = 16, 16, 64, 2.0**-10
    slots = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    pool = torch.ones(2, 2, page, dim, dtype=torch.bfloat16, device=device)
    grad = torch.full((1, 2 * page, dim), step, device=device)
    for seed in range(steps):
        accumulate(pool, slots, grad, -grad, first=False, seed=seed)
    moved = (pool.float() - 1).cpu()
    deviation = (steps * step * 2**-7) ** 0.5 / (2 * page * dim) ** 0.5  # variance per add: step * (spacing - step)
    assert abs(moved[:, 0].mean() - steps * step) < 5 * deviation
    assert abs(moved[:, 1].mean() + steps * step) < 5 * deviation


@pytest.mark.parametrize(("accumulate", "device"), PLACES)
def test_bfloat16_keeps_values_it_can_hold_and_what_is_not_finite(accumulate: Accumulate, device: str) -> None:
    values = torch.tensor([0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan"), 3e38, 2.0**-126], device=device)
    values = values.to(torch.bfloat16)
    pool = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16, device=device)
    slots = torch.zeros(1, 1, dtype=torch.int32, device=device)
    accumulate(pool, slots, values.view(1, 1, 8), values.view(1, 1, 8), first=True, seed=9)
    for row in pool[0, :, 0]:
        assert torch.equal(
            row.nan_to_num(nan=5.0, posinf=6.0, neginf=-6.0),
            values.nan_to_num(nan=5.0, posinf=6.0, neginf=-6.0),
        )
