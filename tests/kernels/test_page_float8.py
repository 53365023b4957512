"""Pages in 8 bits: the numbers and scales that are stored, what is read, and attention over them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oomb_kernels import FLOAT8, load_pages, store_pages
from oomb_kernels.page_float8 import quantize_pages
from oomb_kernels.page_store import (
    launch_load_pages,
    launch_store_pages,
    load_pages_reference,
    store_pages_reference,
)
from tests.kernels.page_checks import EVERYWHERE, KERNELS, PUBLIC, Functions, check, run
from tests.kernels.page_reference import PageProblem, make_problem, plain_page_attention
from tests.kernels.pairwise import pairwise
from tests.kernels.reference import INTERPRETED, ON_GPU, TRITON_PLACES, token_major

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning",
    "ignore:Conversion of an array:DeprecationWarning",
    "ignore:All-NaN slice encountered:RuntimeWarning",
)

NUMBERS = torch.arange(256, dtype=torch.uint8).view(FLOAT8).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()]
SHAPES = [(4, 8, 3), (5, 12, 2), (1, 16, 4), (16, 80, 1), (3, 8, 0)]  # page_tokens, head_dim, pages
EDGES = {
    "zeros": [0.0, -0.0],
    "one number": [0.0, 3.7],
    "448": [448.0, -448.0, 1.0],
    "just above 448": [448.00003, 1.0],
    "powers of two": [2.0**n for n in range(-12, 9)],
    "ties": [17.0, 19.0, 21.0, 23.0, 2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10, 240.0],
    "huge": [3.1e38, -1e30, 1.0],
    "tiny": [1e-38, -1e-40, 1e-45],
}


def stored(store: Callable[..., None], k: Tensor, v: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """A pool with spare slots, the slots of the pages, and their scales, of K and V ``[G, n * P, D]``."""
    groups, tokens, dim = k.shape
    pages = tokens // page
    slots = torch.randperm(groups * pages + 3, generator=torch.Generator().manual_seed(7))[: groups * pages]
    slots = slots.to(torch.int32).reshape(groups, pages).to(k.device)
    codes = torch.full((groups * pages + 3, 2, page, dim), 0x2A, dtype=torch.uint8, device=k.device)
    scales = torch.full((pages, groups, 2), 7.0, device=k.device).transpose(0, 1)
    store(codes.view(FLOAT8), slots, k, v, scales)
    unused = sorted(set(range(len(codes))) - set(slots.flatten().tolist()))
    assert len(unused) == 3 and (codes[unused] == 0x2A).all()
    return codes.view(FLOAT8), slots, scales


def check_store(
    store: Callable[..., None],
    load: Callable[..., tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    device: str = "cpu",
) -> None:
    """The nearest 8-bit numbers under the smallest scale that is a power of two, and that is what is read."""
    page, dim, pages = shape
    torch.manual_seed(3)
    spread = torch.exp(2 * torch.randn(2, pages * page, 1, device=device))
    k, v = ((token_major(2, pages * page, dim, torch.float32, device) * s).to(dtype) for s in (spread, 1e-3 * spread))
    pool, slots, scales = stored(store, k, v, page)
    if not pages:
        return
    loaded = load(pool, slots, scales, dtype)
    for part, (x, ours) in enumerate(zip((k, v), loaded, strict=True)):
        assert ours.is_contiguous() and ours.dtype == dtype
        exact, read = (y.double().unflatten(1, (pages, page)) for y in (x, ours))
        scale = scales[..., part].double()
        assert (scale.frexp().mantissa == 0.5).all(), "a power of two"
        top = exact.abs().amax((2, 3)) / scale
        assert (top <= 448).all() and (top > 224).all()
        nearest = (exact[..., None] / scale[..., None, None, None] - NUMBERS.to(device)).abs().amin(-1)
        assert torch.equal((exact - read).abs(), nearest * scale[..., None, None])
        assert ((exact - read).abs() <= exact.abs() * 2.0**-4 + scale[..., None, None] * 2.0**-10).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("functions", [(store_pages, load_pages), (store_pages_reference, load_pages_reference)])
def test_reference(functions: tuple[Any, Any], dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    check_store(*functions, dtype, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    check_store(launch_store_pages, launch_load_pages, dtype, shape, device)


@pytest.mark.parametrize(("device", "dtype"), [p for p in TRITON_PLACES if p.values[0] == "cuda"])
def test_kernel_at_full_size(device: str, dtype: torch.dtype) -> None:
    check_store(launch_store_pages, launch_load_pages, dtype, (128, 128, 16), device)


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=ON_GPU)])
def test_kernel_and_definition_agree_on_edges(device: str, name: str) -> None:
    """To the bit: which numbers, which scales, what is read."""
    values = torch.tensor(EDGES[name])
    chosen = torch.randint(len(values), (2, 16, 8), generator=torch.Generator().manual_seed(1))
    chosen[:, ::8] = torch.arange(8) % len(values)  # each occurs in each page
    k = values[chosen].to(device)
    found = []
    for store, load in ((launch_store_pages, launch_load_pages), (store_pages_reference, load_pages_reference)):
        pool, slots, scales = stored(store, k, k.flip(2), 8)
        found.append((pool.view(torch.uint8), scales.contiguous(), *load(pool, slots, scales, torch.float32)))
        assert all(x.isfinite().all() for x in found[-1][1:])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8))
def test_any_numbers(bits: list[int]) -> None:
    """Of any size, with infinities and NaN: finite pages are read as finite, others as NaN throughout."""
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32).reshape(1, 1, 8, 1)
    codes, scales = quantize_pages(x)
    read = codes.double() * scales.double()[..., None, None]
    if not x.isfinite().all():
        assert read.isnan().all()
        return
    scale = float(scales)
    nearest = (x.double()[..., None] / scale - NUMBERS).abs().amin(-1)
    assert torch.equal((x.double() - read).abs(), nearest * scale)
    assert x.abs().max() <= 448 * scale and (x.abs().max() > 224 * scale or scale in (1.0, 2.0**-126))


def test_what_was_read_is_stored_without_loss() -> None:
    k, v = (token_major(2, 32, 16, torch.bfloat16) for _ in range(2))
    pool, slots, scales = stored(store_pages, k, v, 8)
    once = load_pages(pool, slots, scales, torch.bfloat16)
    again = load_pages(*stored(store_pages, *once, 8), torch.bfloat16)
    assert torch.equal(once[0], again[0]) and torch.equal(once[1], again[1])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("store", "load", "device"),
    [
        pytest.param(store_pages, load_pages, "cpu", id="definition"),
        pytest.param(launch_store_pages, launch_load_pages, "cpu", marks=INTERPRETED, id="interpreted"),
        pytest.param(launch_store_pages, launch_load_pages, "cuda", marks=ON_GPU, id="gpu"),
    ],
)
def test_infinities_and_nan_do_not_hide(store: Any, load: Any, device: str, bad: float) -> None:
    k, v = (torch.randn(2, 24, 8, device=device) for _ in range(2))
    k[1, 9, 3] = bad
    loaded_k, loaded_v = load(*stored(store, k, v, 8), torch.float32)
    assert loaded_k[1, 8:16].isnan().all()
    loaded_k[1, 8:16] = 0
    assert loaded_k.isfinite().all() and loaded_v.isfinite().all()


def test_autocast_changes_nothing() -> None:
    k, v = torch.randn(2, 2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = stored(store_pages, k, v, 4)
    outside = stored(store_pages, k, v, 4)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(inside, outside, strict=True))


def test_pages_that_are_nowhere_are_zeros() -> None:
    pool, slots, scales = stored(store_pages, torch.ones(1, 8, 8), torch.ones(1, 8, 8), 4)
    slots[0, 1], scales[0, 1] = -1, float("nan")
    for load in (load_pages, *([] if torch.cuda.is_available() else [launch_load_pages])):
        k, v = load(pool, slots, scales, torch.float32)
        assert (k[:, :4] == 1).all() and (v[:, :4] == 1).all() and not k[:, 4:].any() and not v[:, 4:].any()


# Attention: `page_checks` judges it against the textbook, with the numbers that are read in the place of the pages.


def in_float8(problem: PageProblem) -> tuple[PageProblem, Tensor, Tensor]:
    """The problem with pages as they are read, their 8-bit numbers, and their scales. Sizes differ by page."""
    torch.manual_seed(4)
    sizes = 2.0 ** torch.randint(-3, 3, (len(problem.pool), 2, 1, 1), device=problem.pool.device)
    sizes[:, 0] = sizes[:, 0].clamp(0.5, 2)  # of K, or one page would take all weights
    codes, scales = quantize_pages(problem.pool.float() * sizes)
    problem.pool[:] = codes.float() * scales[..., None, None]
    return problem, codes, scales[problem.slots_GN.long()]


def reading(functions: Functions, codes: Tensor, scales: Tensor) -> Functions:
    """The functions, reading these instead of the problem's pages."""

    def forward(q: Tensor, pool: Tensor, *rest: Any, **others: Any) -> tuple[Tensor, Tensor]:
        return functions.forward(q, codes, *rest, scales_GN2=scales, **others)

    def backward(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, pool: Tensor, *rest: Any, **others: Any) -> Tensor:
        return functions.backward(dout, q, out, lse, codes, *rest, scales_GN2=scales, **others)

    return Functions(forward, backward)


def check_attention(functions: Functions, **case: Any) -> None:
    problem, codes, scales = in_float8(make_problem(**case))
    check(reading(functions, codes, scales), problem)


CASES: dict[str, Any] = {
    "pattern": ["one", "many", "hot and another", "counts differ"],
    "others": ["none", "some", "gaps", "low", "high"],
    "softcap": [None, 1.5],
    "group": [1, 3],
    "tokens": [48, 37],
    "layout": ["token major", "unaligned"],
}
WAYS: dict[str, Any] = {"turn": [0, 1], "groups": [1, 2], "head_dim": [16, 80]}
"""KV heads of a turn of the backward (0 forms the scores twice), and what decides how many query heads a sum takes."""


def rows(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(case, id=",".join(str(value) for value in case.values())) for case in pairwise(cases)]


ROWS = rows(CASES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ROWS)
def test_attention_reference(case: dict[str, Any], dtype: torch.dtype) -> None:
    check_attention(PUBLIC, dtype=dtype, block_tokens=6, page_tokens=5, **case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", rows(CASES | WAYS))
@INTERPRETED
def test_attention_interpreted(case: dict[str, Any], dtype: torch.dtype) -> None:
    sizes = dict(case)
    functions = KERNELS._replace(backward=partial(KERNELS.backward, turn=sizes.pop("turn")))
    check_attention(functions, dtype=dtype, block_tokens=16, page_tokens=16, pages=3, **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@INTERPRETED
def test_attention_interpreted_at_sizes_in_use(dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"head_dim": 128, "page_tokens": 128, "block_tokens": 128, "group": 2, "tokens": 130}
    check_attention(KERNELS, dtype=dtype, groups=1, pages=2, pattern="counts differ", others="some", **sizes)


@pytest.mark.parametrize(
    "sizes", [(64, 64, 64), (80, 32, 64), (128, 128, 128), (128, 256, 64), (256, 64, 128)], ids=str
)
@pytest.mark.parametrize("dtype", [pytest.param(d, marks=ON_GPU, id=str(d)) for d in (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("pattern", ["many", "hot and another"])
def test_attention_gpu(pattern: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    head_dim, page, block = sizes
    check_attention(
        PUBLIC, dtype=dtype, device="cuda", tokens=9 * block + 5, block_tokens=block, head_dim=head_dim,
        page_tokens=page, group=7, pages=9, pattern=pattern, others="some",
    )  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case.values[0], marks=ON_GPU, id=case.id) for case in ROWS])
def test_attention_gpu_contents(case: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"block_tokens": 128, "page_tokens": 128, "head_dim": 128, "pages": 5}
    for dtype in (torch.bfloat16, torch.float32):
        check_attention(PUBLIC, dtype=dtype, device="cuda", **{**sizes, **case, "tokens": 7 * case["tokens"]})


@EVERYWHERE
@pytest.mark.parametrize("part", [0, 1], ids=["K", "V"])
def test_a_page_of_nan_reaches_the_output(functions: Functions, device: str, part: int) -> None:
    problem, codes, scales = in_float8(
        make_problem(dtype=torch.float32, device=device, tokens=37, block_tokens=16, pattern="all", others="some")
    )
    truth = plain_page_attention(problem, torch.float64)
    scales = scales.clone()
    scales[0, 2, part] = float("nan")
    results = run(reading(functions, codes, scales), problem, truth)
    group = len(results.out) // len(scales)
    assert results.out[:group].isnan().all() and results.dq[:group].isnan().all()
    assert results.out[group:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slots_beyond_four_gi_elements() -> None:
    """32-bit offsets would wrap: slot 140,000 of 32,768 numbers lies at 4.6e9."""
    pool = torch.empty(140_001, 2, 128, 128, dtype=FLOAT8, device="cuda")
    slots = torch.tensor([[140_000]], dtype=torch.int32, device="cuda")
    scales = torch.empty(1, 1, 2, device="cuda")
    k, v = (torch.randn(1, 128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    store_pages(pool, slots, k, v, scales)
    for ours, x in zip(load_pages(pool, slots, scales, torch.bfloat16), (k, v), strict=True):
        assert ((ours - x).abs() <= x.abs() * 2.0**-4 + float(scales.max()) * 2.0**-10).all()
