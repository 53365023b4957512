"""The pool of page gradients under page attention: pages with many blocks, rounding, bits, and slots far apart."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from oomb_kernels.page_index import build_page_index
from tests.kernels.page_checks import (
    EVERYWHERE,
    KERNELS,
    PUBLIC,
    Functions,
    Results,
    check,
    launch_backward,
    run,
    same_bits,
    used_pages,
)
from tests.kernels.page_reference import PageProblem, make_problem, plain_page_attention, shuffled_slots
from tests.kernels.reference import INTERPRETED, ON_GPU, TRITON_PLACES, assert_equal_by_definition

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def cutting(max_blocks: int, turn: int = 1) -> Functions:
    """The kernels with pages of more query blocks than this cut into several units of work."""
    return KERNELS._replace(backward=partial(launch_backward, max_blocks=max_blocks, turn=turn))


# The rounding and the sums have two places in the kernels: owners of whole pages, and the sum of cut pages.
PLACES = pytest.mark.parametrize(
    ("functions", "device"),
    [
        pytest.param(PUBLIC, "cpu", id="definition"),
        *(
            pytest.param(cutting(most), device, marks=marks, id=f"{place}-{name}")
            for most, name in ((8, "whole"), (2, "cut"))
            for device, marks, place in (("cpu", INTERPRETED, "interpreted"), ("cuda", ON_GPU, "gpu"))
        ),
    ],
)


def hot_problem(device: str, dtype: torch.dtype = torch.float32, others: str = "some") -> PageProblem:
    """Five blocks, the last one ragged, that all pick one page and some of them another."""
    return make_problem(
        dtype=dtype,
        device=device,
        tokens=4 * 16 + 5,
        block_tokens=16,
        group=1,
        pattern="hot and another",
        others=others,
    )


def records(results: Results, problem: PageProblem) -> Tensor:
    """[n, 2, P, D], the gradients of the pages that lists name, wherever they lie."""
    return results.grads[results.grad_slots_GN[used_pages(problem)].long()]


@pytest.mark.parametrize("max_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_pages_that_many_blocks_pick(device: str, dtype: torch.dtype, max_blocks: int) -> None:
    problem = hot_problem(device, dtype)
    lists = replace(problem.lists, pages_GBK=problem.lists.pages_GBK.cpu(), counts_GB=problem.lists.counts_GB.cpu())
    units, partial_sums, cut_pages = build_page_index(lists, max_blocks).totals_3.tolist()
    assert units > partial_sums > cut_pages > 0 or max_blocks == 1, "some pages must be cut, others not"
    first = check(cutting(max_blocks, 0), problem)
    for turn in (1, 2):
        check(cutting(max_blocks, turn), problem, after=first)


@PLACES
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_again_and_in_other_slots(functions: Functions, device: str, pool_dtype: torch.dtype) -> None:
    problem = hot_problem(device)
    truth = plain_page_attention(problem, torch.float64)
    groups, pages = problem.slots_GN.shape
    slots = shuffled_slots(groups, pages, 3, device, seed=6)
    pool = torch.full_like(problem.pool, float("nan"))
    pool[slots.long()] = problem.pool[problem.slots_GN.long()]
    moved = replace(problem, pool=pool, slots_GN=slots)
    assert not torch.equal(slots, problem.slots_GN)

    first = run(functions, problem, truth, pool_dtype=pool_dtype, seed=3)
    for again, slots_seed in ((problem, 29), (moved, 30)):
        ours = run(functions, again, truth, pool_dtype=pool_dtype, seed=3, slots_seed=slots_seed)
        assert torch.equal(ours.out, first.out) and torch.equal(ours.lse, first.lse) and torch.equal(ours.dq, first.dq)
        assert torch.equal(records(ours, again), records(first, problem))
        assert torch.equal(ours.grad_slots_GN, first.grad_slots_GN) == (slots_seed == 29)


@EVERYWHERE
def test_without_a_pool_only_dq(functions: Functions, device: str) -> None:
    problem = hot_problem(device)
    truth = plain_page_attention(problem, torch.float64)
    dq_alone = run(functions, problem, truth, with_grads=False).dq
    assert_equal_by_definition(dq_alone, truth.dq_pages + truth.dq_others, "dq")


@pytest.mark.parametrize("max_blocks", [1, 8])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kv_heads_in_turns_change_no_bit(device: str, dtype: torch.dtype, max_blocks: int) -> None:
    """dS of one KV head at a time, of some, or of all; the last turn may be shorter. Without dS only dQ may differ."""
    problem = make_problem(
        dtype=dtype, device=device, tokens=37, block_tokens=16, groups=3, pattern="hot and another", others="some"
    )
    truth = plain_page_attention(problem, torch.float64)
    first = run(cutting(max_blocks), problem, truth)
    for turn in (0, 2, 3):
        again = run(cutting(max_blocks, turn), problem, truth, after=first)
        assert same_bits(again.grads, first.grads)
        assert turn == 0 or torch.equal(again.dq, first.dq)


@PLACES
def test_bfloat16_rounds_to_a_neighbour_by_seed(functions: Functions, device: str) -> None:
    problem = hot_problem(device)
    truth = plain_page_attention(problem, torch.float64)
    first = run(functions, problem, truth, fill=0.0)
    exact = records(first, problem)
    rounded = [
        records(run(functions, problem, truth, pool_dtype=torch.bfloat16, seed=seed, fill=0.0, after=first), problem)
        for seed in (3, 3, 4)
    ]
    assert torch.equal(rounded[0], rounded[1]) and not torch.equal(rounded[0], rounded[2])
    # A little more than the distance of neighbours: sums of 1e-6 differ between fp32 and bf16 pools on a GPU.
    assert ((rounded[0].float() - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()
    up = rounded[0].float() > exact
    assert 0.4 < up.float().mean() < 0.6, "both neighbours are taken"


@PLACES
def test_pages_are_rounded_independently(functions: Functions, device: str) -> None:
    """Equal pages with equal gradients, which are rounded by different random bits."""
    problem = make_problem(dtype=torch.float32, device=device, tokens=5 * 16, block_tokens=16, pattern="all", group=1)
    problem.pool[:] = problem.pool[int(problem.slots_GN[0, 0])]
    truth = plain_page_attention(problem, torch.float64)
    exact, rounded = (
        records(run(functions, problem, truth, pool_dtype=dtype, fill=0.0), problem).unflatten(0, (2, 4))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact[:, 0], exact[:, 1]) and not torch.equal(rounded[:, 0], rounded[:, 1])


@PLACES
def test_bfloat16_sums_are_unbiased(functions: Functions, device: str) -> None:
    """Added to 384, where neighbours are 2 apart: round-to-nearest would lose nearly every gradient."""
    problem = hot_problem(device)
    truth = plain_page_attention(problem, torch.float64)
    first = run(functions, problem, truth, fill=0.0)
    exact = records(first, problem)
    assert exact.abs().median() < 0.5
    size, moved, seeds = exact.abs().double(), torch.zeros(2, dtype=torch.float64, device=device), range(4)
    for seed in seeds:
        results = run(functions, problem, truth, pool_dtype=torch.bfloat16, seed=seed, fill=384.0, after=first)
        ours = records(results, problem)
        moved += ((ours.double() - 384) * exact.sign()).sum((0, 2, 3))
    expected = len(seeds) * size.sum((0, 2, 3))
    deviation = (len(seeds) * (size * (2 - size)).clamp(min=0).sum((0, 2, 3))).sqrt()
    assert ((moved - expected).abs() < 5 * deviation).all(), f"{moved} for {expected} +- {deviation}, K and V"
    assert (expected > 10 * deviation).all(), "the test could not tell"


@PLACES
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_that_vanish_beside_the_others_change_no_bit(
    functions: Functions, device: str, pool_dtype: torch.dtype
) -> None:
    problem = hot_problem(device, others="high")
    truth = plain_page_attention(problem, torch.float64)
    ours = run(functions, problem, truth, pool_dtype=pool_dtype)
    assert same_bits(ours.grads, ours.before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slots_beyond_two_gi_elements() -> None:
    """32-bit offsets would wrap: slot 70,000 of 32,768 elements lies at 2.29e9."""
    problem = make_problem(
        dtype=torch.bfloat16, device="cuda", tokens=300, block_tokens=128, groups=1, head_dim=128, page_tokens=128,
        pages=3, pattern="all", others="some",
    )  # fmt: skip
    far = torch.tensor([[70_000, 1, 69_999]], dtype=torch.int32, device="cuda")
    pool, grads = (torch.zeros(70_001, 2, 128, 128, dtype=d, device="cuda") for d in (torch.bfloat16, torch.float32))
    pool[far.long()] = problem.pool[problem.slots_GN.long()]
    near_grads = torch.zeros_like(problem.pool, dtype=torch.float32)
    results = []
    for pages, slots, page_grads in ((problem.pool, problem.slots_GN, near_grads), (pool, far, grads)):
        out, lse = PUBLIC.forward(problem.q_HTD, pages, slots, problem.lists, scale=problem.scale)
        dq = PUBLIC.backward(
            problem.dout_HTD, problem.q_HTD, out, lse, pages, slots, page_grads, slots, problem.lists,
            scale=problem.scale, seed=0,
        )  # fmt: skip
        results.append((out, lse, dq, page_grads[slots.long()]))
    assert all(torch.equal(near, away) for near, away in zip(*results, strict=True))
    assert near_grads.any() and not grads[2:69_999].any()
