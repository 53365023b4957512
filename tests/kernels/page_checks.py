"""Running page attention forward and backward and judging all of its results at once."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from oomb_kernels import page_attention_backward, page_attention_forward
from oomb_kernels.page_backward import launch_page_attention_backward
from oomb_kernels.page_forward import launch_page_attention_forward
from oomb_kernels.page_index import launch_build_page_index
from tests.kernels.page_reference import PageAttention, PageProblem, plain_page_attention, selected, shuffled_slots
from tests.kernels.reference import INTERPRETED, ON_GPU, assert_close_in, assert_equal_by_definition

SPARE = 2  # slots of a gradient pool that belong to no page


class Functions(NamedTuple):
    """One implementation of page attention."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor]


def launch_backward(*args: Any, max_blocks: int = 8, turn: int | None = 1, **settings: Any) -> Tensor:
    """The kernels of the backward, some KV heads at a time; with 0 those that form the scores twice."""
    grad_pool, _, lists = args[6:9]
    index = None if grad_pool is None else launch_build_page_index(lists, max_blocks)
    return launch_page_attention_backward(*(*args, index), turn=turn, **settings)


PUBLIC = Functions(page_attention_forward, page_attention_backward)
KERNELS = Functions(launch_page_attention_forward, launch_backward)
TWICE = Functions(launch_page_attention_forward, partial(launch_backward, turn=0))

# For properties that are not about rounding. On CPU the public functions are the definitions in plain torch.
EVERYWHERE = pytest.mark.parametrize(
    ("functions", "device"),
    [
        pytest.param(PUBLIC, "cpu", id="definition"),
        pytest.param(KERNELS, "cpu", marks=INTERPRETED, id="interpreted"),
        pytest.param(TWICE, "cpu", marks=INTERPRETED, id="interpreted-twice"),
        pytest.param(KERNELS, "cuda", marks=ON_GPU, id="gpu"),
        pytest.param(TWICE, "cuda", marks=ON_GPU, id="gpu-twice"),
    ],
)


class Results(NamedTuple):
    """What a forward and a backward return, and the gradient pool before and after."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    grads: Tensor
    before: Tensor
    grad_slots_GN: Tensor


def used_pages(problem: PageProblem) -> Tensor:
    """bool [G, N] on the problem's device: pages that some list names."""
    return selected(problem.lists, problem.q_HTD.shape[1]).any(1).to(problem.q_HTD.device)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of LSE, of merged outputs and of exact gradients."""
    return torch.promote_types(dtype, torch.float32)


def gradient_pool(problem: PageProblem, dtype: torch.dtype, slots_seed: int, fill: float | None) -> tuple[Tensor, ...]:
    """A pool with `fill` (None: random numbers) where lists point to and NaN elsewhere, and its slots."""
    groups, pages = problem.slots_GN.shape
    device = problem.q_HTD.device
    slots = shuffled_slots(groups, pages, SPARE, str(device), slots_seed)
    pool = torch.full((groups * pages + SPARE, *problem.pool.shape[1:]), float("nan"), dtype=dtype, device=device)
    used = slots[used_pages(problem)].long()
    shape = (len(used), *pool.shape[1:])
    generator = torch.Generator().manual_seed(23)
    values = torch.randn(shape, generator=generator).to(device) if fill is None else torch.full(shape, fill)
    pool[used] = values.to(device=device, dtype=dtype)
    return pool, slots


def others_of(problem: PageProblem, truth: PageAttention, out_dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Output and LSE of the other keys, where there are any."""
    if not problem.other_k_GMD.shape[1]:
        return None
    return truth.other_out.to(out_dtype), truth.other_lse.to(compute_dtype(problem.q_HTD.dtype))


def run(
    functions: Functions,
    problem: PageProblem,
    truth: PageAttention,
    *,
    pool_dtype: torch.dtype | None = None,
    others_dtype: torch.dtype | None = None,
    seed: int = 0,
    slots_seed: int = 29,
    fill: float | None = None,
    with_grads: bool = True,
    after: Results | None = None,
) -> Results:
    """Forward, then backward with its own output and LSE, with what the other keys contribute from `truth`.

    Args:
        after: an earlier run with the same forward, whose output and LSE are taken: only the backward is run.
    """
    wide = compute_dtype(problem.q_HTD.dtype)
    score = {"scale": problem.scale, "softcap": problem.softcap}
    others = others_of(problem, truth, others_dtype or wide)
    dq_others = None if others is None else truth.dq_others.to(others_dtype or wide)
    pools = (problem.pool, problem.slots_GN)
    inputs = [
        problem.pool,
        problem.q_HTD,
        problem.dout_HTD,
        *(others or ()),
        *([] if dq_others is None else [dq_others]),
    ]
    copies = [x.clone() for x in inputs]
    if after is None:
        out, lse = functions.forward(problem.q_HTD, *pools, problem.lists, **score, others=others)
    else:
        out, lse = after.out, after.lse
    grads, grad_slots = gradient_pool(problem, pool_dtype or wide, slots_seed, fill)
    before = grads.clone()
    dq = functions.backward(
        problem.dout_HTD, problem.q_HTD, out, lse, *pools, grads if with_grads else None, grad_slots, problem.lists,
        **score, seed=seed, dq_HTD=dq_others,
    )  # fmt: skip
    assert all(same_bits(x, copy) for x, copy in zip(inputs, copies, strict=True)), "an input was written"
    if not with_grads:
        assert same_bits(grads, before)
    return Results(out, lse, dq, grads, before, grad_slots)


def check(
    functions: Functions,
    problem: PageProblem,
    *,
    others_dtype: torch.dtype | None = None,
    after: Results | None = None,
) -> Results:
    """Every result against the textbook in fp64; gradients are added to random ones; nothing else is written."""
    dtype = problem.q_HTD.dtype
    truth = plain_page_attention(problem, torch.float64)
    plain = truth if dtype.itemsize > 2 else plain_page_attention(problem, dtype)
    ours = run(functions, problem, truth, others_dtype=others_dtype, after=after)
    assert ours.out.dtype == ours.dq.dtype == dtype and ours.lse.dtype == compute_dtype(dtype)
    assert ours.out.transpose(0, 1).is_contiguous() and ours.dq.transpose(0, 1).is_contiguous()
    assert_equal_by_definition(ours.lse, truth.lse, "lse")
    assert_close_in(dtype, ours.out, plain.out, truth.out, "out")
    assert_close_in(dtype, ours.dq, plain.dq_pages + plain.dq_others, truth.dq_pages + truth.dq_others, "dq")
    check_page_gradients(ours, problem, plain, truth)
    return ours


def check_page_gradients(ours: Results, problem: PageProblem, plain: PageAttention, truth: PageAttention) -> None:
    """What was added to the records that lists name, and that no other record changed a bit."""
    used = used_pages(problem)
    slots = ours.grad_slots_GN[used].long()
    added = ours.grads[slots] - ours.before[slots]
    for part, name in enumerate(("dk_GNPD", "dv_GNPD")):
        low, exact = getattr(plain, name)[used], getattr(truth, name)[used]
        assert_close_in(problem.q_HTD.dtype, added[:, part], low, exact, name)
    untouched = torch.ones(len(ours.grads), dtype=torch.bool, device=slots.device)
    untouched[slots] = False
    assert untouched.sum() == len(ours.grads) - used.sum()
    assert same_bits(ours.grads[untouched], ours.before[untouched]), "a record was written that no list names"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells NaNs apart and holds for equal ones."""
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(as_integers), b.contiguous().view(as_integers))
