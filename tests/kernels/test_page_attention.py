"""Attention to selected pages, forward and backward, against dense masked attention with autograd in fp64."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oomb_kernels import (
    AttentionCall,
    dense_attention_backward,
    dense_attention_forward,
    page_call,
    page_dkv,
    page_dq,
    page_forward,
)
from tests.kernels.page_checks import EVERYWHERE, KERNELS, PUBLIC, Functions, check, others_of, run
from tests.kernels.page_reference import PATTERNS, SHIFTS, any_lists, as_lists, make_problem, plain_page_attention
from tests.kernels.pairwise import pairwise
from tests.kernels.reference import INTERPRETED, ON_GPU, TRITON_PLACES, assert_equal_by_definition

# Scores far above the other keys' overflow on purpose: the kernel notices and starts again.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)

# What decides which kernel is compiled, and how tiles lie.
SHAPES: dict[str, Any] = {
    "head_dim": [64, 80, 96, 128, 256],
    "group": [1, 2, 4, 7, 8],
    "page_tokens": [32, 64, 128, 256],
    "block_tokens": [64, 128],
    "pattern": ["one", "many", "all", "hot", "counts differ"],
    "others": ["none", "some", "gaps"],
    "softcap": [None, 1.5],
    "rows": ["whole blocks", "ragged block", "less than a block"],
}
# What decides the numbers.
CONTENTS: dict[str, Any] = {
    "pattern": list(PATTERNS),
    "others": ["none", "some", "gaps", *SHIFTS],
    "softcap": [None, 1.5, 50.0],
    "scale": [None, 0.7],
    "layout": ["token major", "heads first", "fused", "unaligned"],
    "rows": ["whole blocks", "ragged block", "less than a block"],
}
ON_DEVICE = [torch.bfloat16, torch.float16, torch.float32]
ON_CPU = [*ON_DEVICE, torch.float64]
IN_INTERPRETER = [torch.float32, torch.float16]
SMALL = {"page_tokens": [16, 32], "block_tokens": [16, 64]}
TURNS = [0, 1]
"""KV heads of a turn of the backward: 0 forms the scores twice."""


def check_case(functions: Functions, case: dict[str, Any], device: str = "cpu", **sizes: Any) -> None:
    """A combination of settings whose `rows` say how many query rows there are."""
    sizes = {**sizes, **case}
    block = sizes["block_tokens"]
    if "turn" in sizes:
        functions = functions._replace(backward=partial(functions.backward, turn=sizes.pop("turn")))
    tokens = {"whole blocks": 2 * block, "ragged block": 2 * block + 5, "less than a block": block - 3}
    check(functions, make_problem(tokens=tokens[sizes.pop("rows")], device=device, **sizes))


def name_of(case: dict[str, Any]) -> str:
    return ",".join(str(value).removeprefix("torch.").replace(" ", "_") for value in case.values())


def cases(settings: dict[str, Any], *, marks: Any = ()) -> pytest.MarkDecorator:
    rows = [pytest.param(case, id=name_of(case), marks=marks) for case in pairwise(settings)]
    return pytest.mark.parametrize("case", rows)


@cases(SHAPES | {"dtype": ON_CPU, "page_tokens": [5, 32, 128]})
def test_reference_shapes(case: dict[str, Any]) -> None:
    check_case(PUBLIC, case)


@cases(CONTENTS | {"dtype": ON_CPU})
def test_reference_contents(case: dict[str, Any]) -> None:
    check_case(PUBLIC, case, block_tokens=6, page_tokens=5)


@pytest.mark.parametrize("dtype", IN_INTERPRETER, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 128, "page_tokens": 128, "block_tokens": 128, "group": 2, "tokens": 130},
        {"head_dim": 64, "page_tokens": 256, "block_tokens": 64, "group": 1, "tokens": 128},
        {"head_dim": 256, "page_tokens": 64, "block_tokens": 64, "group": 1, "tokens": 70},
    ],
    ids=name_of,
)
@INTERPRETED
def test_interpreted_at_sizes_in_use(shape: dict[str, Any], dtype: torch.dtype) -> None:
    check(KERNELS, make_problem(dtype=dtype, groups=1, pages=2, pattern="counts differ", others="some", **shape))


@pytest.mark.parametrize("turn", TURNS)
@INTERPRETED
def test_interpreted_blocks_and_pages_of_several_tiles(turn: int) -> None:
    case = {"rows": "ragged block", "block_tokens": 64, "page_tokens": 64, "pattern": "counts differ", "turn": turn}
    check_case(KERNELS, case, dtype=torch.float32, groups=1, group=2, pages=4, others="some")


@cases(SHAPES | SMALL | {"dtype": IN_INTERPRETER, "turn": TURNS}, marks=INTERPRETED)
def test_interpreted_shapes(case: dict[str, Any]) -> None:
    check_case(KERNELS, case, groups=1, pages=3)


@cases(CONTENTS | {"dtype": IN_INTERPRETER, "turn": TURNS}, marks=INTERPRETED)
def test_interpreted_contents(case: dict[str, Any]) -> None:
    check_case(KERNELS, case, block_tokens=16, page_tokens=16, group=2, groups=1, pages=3)


@cases(SHAPES | {"dtype": ON_DEVICE}, marks=ON_GPU)
def test_gpu_shapes(case: dict[str, Any]) -> None:
    check_case(PUBLIC, case, "cuda", pages=9)


@cases(CONTENTS | {"dtype": ON_DEVICE}, marks=ON_GPU)
def test_gpu_contents(case: dict[str, Any]) -> None:
    check_case(PUBLIC, case, "cuda", block_tokens=128, page_tokens=128, head_dim=128, group=7, pages=9)


@contextmanager
def as_before_hopper(shared_kib: int) -> Iterator[None]:
    """Launches as on a device with so much shared memory that copies no tiles."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(page_call, "copies_tiles", lambda device: False))
        for module in (page_forward, page_dq, page_dkv):
            stack.enter_context(patch.object(module, "shared_memory_of", lambda device: shared_kib * 1024))
        yield


@cases(
    SHAPES | SMALL | {"dtype": [torch.float32], "turn": TURNS, "head_dim": [64, 80], "group": [1, 3]}, marks=INTERPRETED
)
def test_interpreted_as_before_hopper(case: dict[str, Any]) -> None:
    with as_before_hopper(163):
        check_case(KERNELS, case, groups=1, pages=3)


@pytest.mark.parametrize("shared_kib", [163, 99])
@cases(SHAPES | {"dtype": ON_DEVICE}, marks=ON_GPU)
def test_gpu_as_before_hopper(case: dict[str, Any], shared_kib: int) -> None:
    with as_before_hopper(shared_kib):
        check_case(PUBLIC, case, "cuda", pages=9)


GRID = ("head_dim", "group", "page_tokens", "block_tokens")
FULL_GRID = [dict(zip(GRID, values, strict=True)) for values in product(*(SHAPES[name] for name in GRID))]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [pytest.param(sizes, id=name_of(sizes), marks=ON_GPU) for sizes in FULL_GRID])
def test_gpu_full_grid(sizes: dict[str, Any]) -> None:
    tokens = 2 * sizes["block_tokens"] + 5
    check(PUBLIC, make_problem(dtype=torch.bfloat16, device="cuda", tokens=tokens, pages=9, others="some", **sizes))


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=ON_GPU, id=str(d)) for d in ON_DEVICE])
@pytest.mark.parametrize("pattern", ["many", "hot and another"])
def test_gpu_at_full_size(pattern: str, dtype: torch.dtype) -> None:
    """A chunk of Qwen2.5-7B's heads; the hot page has 17 blocks, more than one unit of work takes."""
    sizes: dict[str, Any] = {
        "groups": 4,
        "group": 7,
        "head_dim": 128,
        "page_tokens": 128,
        "pages": 24,
        "block_tokens": 128,
    }
    check(PUBLIC, make_problem(dtype=dtype, device="cuda", tokens=2100, pattern=pattern, others="some", **sizes))


@given(data=st.data())
def test_any_lists(data: st.DataObject) -> None:
    groups, blocks, pages, block = (data.draw(st.integers(1, most)) for most in (3, 4, 6, 5))
    tokens = data.draw(st.integers((blocks - 1) * block + 1, blocks * block))
    chosen = data.draw(any_lists(groups, blocks, pages, block))
    problem = make_problem(
        dtype=torch.float64, tokens=tokens, block_tokens=block, groups=groups, group=data.draw(st.integers(1, 3)),
        head_dim=4, page_tokens=3, pages=pages, pattern="all", others=data.draw(st.sampled_from(["none", "gaps"])),
    )  # fmt: skip
    check(PUBLIC, replace(problem, lists=chosen))


@EVERYWHERE
@pytest.mark.parametrize("page_tokens", [16, 48])
@pytest.mark.parametrize("others", ["none", "some", "lower"])
def test_first_and_last_steps_of_a_list(functions: Functions, device: str, others: str, page_tokens: int) -> None:
    """No page, one, two or three, of one step or of three each. Other keys that are small take the list up twice."""
    chosen = [[[], [2], [0, 1], [0, 1, 2]], [[0, 1, 2], [], [1], [0, 2]]]
    sizes: dict[str, Any] = {"tokens": 61, "block_tokens": 16, "page_tokens": page_tokens, "pages": 3}
    problem = make_problem(dtype=torch.float32, device=device, pattern="all", others=others, **sizes)
    problem = replace(problem, lists=as_lists(chosen, 3, 3, 16, device))
    first = check(functions, problem)
    merged = others_of(problem, plain_page_attention(problem, torch.float64), torch.float32)
    settings = {"scale": problem.scale, "softcap": problem.softcap, "others": merged}
    out, lse = functions.forward(problem.q_HTD, problem.pool, problem.slots_GN, problem.lists, **settings)
    assert torch.equal(first.out, out) and torch.equal(first.lse, lse), "not the same bits again"


@EVERYWHERE
@pytest.mark.parametrize("page_tokens", [16, 48])
def test_one_page_is_all_there_is(functions: Functions, device: str, page_tokens: int) -> None:
    sizes: dict[str, Any] = {"tokens": 37, "block_tokens": 16, "page_tokens": page_tokens, "pages": 1}
    check(functions, make_problem(dtype=torch.float32, device=device, pattern="all", others="some", **sizes))


@EVERYWHERE
def test_all_pages_and_the_chunk_are_dense_attention(functions: Functions, device: str) -> None:
    """Every page selected, the own chunk by the dense functions: one causal call over past and chunk."""
    problem = make_problem(
        dtype=torch.float32, device=device, tokens=37, block_tokens=16, pages=3, pattern="all", others="some"
    )
    call = AttentionCall(scale=problem.scale, causal=True)
    own = (problem.other_k_GMD, problem.other_v_GMD)
    past = problem.pool[problem.slots_GN.long()].transpose(1, 2).flatten(2, 3)  # [G, 2, N*P, D]
    k, v = (torch.cat([past[:, part], own[part]], 1) for part in (0, 1))
    whole = dense_attention_forward(problem.q_HTD, k, v, call, "torch")
    expected = (*whole, *dense_attention_backward(problem.dout_HTD, problem.q_HTD, k, v, *whole, call, "torch"))

    others = dense_attention_forward(problem.q_HTD, *own, call, "torch")
    pools = (problem.pool, problem.slots_GN)
    out, lse = functions.forward(problem.q_HTD, *pools, problem.lists, scale=call.scale, others=others)
    dq, own_dk, own_dv = dense_attention_backward(problem.dout_HTD, problem.q_HTD, *own, out, lse, call, "torch")
    grads = torch.zeros_like(problem.pool)
    dq = functions.backward(
        problem.dout_HTD, problem.q_HTD, out, lse, *pools, grads, problem.slots_GN, problem.lists,
        scale=call.scale, seed=0, dq_HTD=dq,
    )  # fmt: skip
    past_grads = grads[problem.slots_GN.long()].transpose(1, 2).flatten(2, 3)
    dk, dv = (torch.cat([past_grads[:, part], g], 1) for part, g in ((0, own_dk), (1, own_dv)))
    for name, ours, truth in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, dq, dk, dv), expected, strict=True):
        assert_equal_by_definition(ours, truth.double(), name)


@pytest.mark.parametrize("others", ["some", "gaps", "lower"])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), *TRITON_PLACES])
def test_others_rounded_to_the_dtype_of_the_queries(device: str, dtype: torch.dtype, others: str) -> None:
    functions = PUBLIC if device == "cpu" and dtype == torch.bfloat16 else KERNELS
    problem = make_problem(dtype=dtype, device=device, tokens=37, block_tokens=16, others=others)
    check(functions, problem, others_dtype=dtype)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), *TRITON_PLACES])
@pytest.mark.parametrize("sign", ["both", "negative"])
def test_scores_whose_exponentials_overflow(device: str, dtype: torch.dtype, sign: str) -> None:
    """Beyond 88 nats, where fp32 ends."""
    scale = 8.0 if sign == "both" else 18.0
    problem = make_problem(dtype=dtype, device=device, tokens=37, block_tokens=16, scale=scale)
    if sign == "negative":
        problem.q_HTD.abs_()
        problem.pool[:, 0].abs_().neg_()
    lse = plain_page_attention(problem, torch.float64).lse
    assert lse.max() > 88 if sign == "both" else lse.median() < -88
    check(PUBLIC if dtype == torch.float64 else KERNELS, problem)


@EVERYWHERE
@pytest.mark.parametrize("others", ["none", "gaps"])
def test_extreme_scores_give_no_nan(functions: Functions, device: str, others: str) -> None:
    problem = make_problem(
        dtype=torch.float32,
        device=device,
        tokens=37,
        block_tokens=16,
        pattern="counts differ",
        others=others,
        scale=3e4,
    )
    truth = plain_page_attention(problem, torch.float64)
    ours = run(functions, problem, truth)
    assert_equal_by_definition(ours.lse, truth.lse, "lse")
    for result in (ours.out, ours.dq):
        assert result.isfinite().all()
    assert torch.equal(ours.grads.isnan(), ours.before.isnan()) and not ours.grads.isinf().any()


@EVERYWHERE
@pytest.mark.parametrize("layout", ["fused", "unaligned"])
def test_layouts_do_not_change_a_bit(functions: Functions, device: str, layout: str) -> None:
    problem = make_problem(dtype=torch.float32, device=device, tokens=37, block_tokens=16, others="some", layout=layout)
    truth = plain_page_attention(problem, torch.float64)
    packed = replace(problem, q_HTD=problem.q_HTD.contiguous(), dout_HTD=problem.dout_HTD.contiguous())
    assert packed.q_HTD.stride() != problem.q_HTD.stride()
    strided, contiguous = (run(functions, p, truth) for p in (problem, packed))
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(strided, name), getattr(contiguous, name)), name
    assert torch.equal(strided.grads.nan_to_num(7.0), contiguous.grads.nan_to_num(7.0))


def test_autocast_and_gradients_change_nothing() -> None:
    problem = make_problem(dtype=torch.float32, tokens=13, block_tokens=6, page_tokens=5, others="some")
    truth = plain_page_attention(problem, torch.float64)
    expected = run(PUBLIC, problem, truth)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(PUBLIC, replace(problem, q_HTD=problem.q_HTD.clone().requires_grad_()), truth)
    for name in ("out", "lse", "dq"):
        value = getattr(ours, name)
        assert torch.equal(value, getattr(expected, name)) and not value.requires_grad, name


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"page_tokens": 24}, "pages must be whole tiles"),
        ({"block_tokens": 8}, "query blocks must be whole tiles"),
        ({"head_dim": 20}, "rows of a page must be whole 16 bytes"),
    ],
    ids=["page_tokens", "block_tokens", "head_dim"],
)
def test_kernels_run_on_whole_tiles_only(sizes: dict[str, Any], reason: str) -> None:
    problem = make_problem(**{"dtype": torch.float16, "tokens": 16, "block_tokens": 16, **sizes})
    with pytest.raises(AssertionError, match=reason):
        run(KERNELS, problem, plain_page_attention(problem, torch.float64))
