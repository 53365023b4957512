"""Matrices in 8 bits: their numbers and scales, and products of two of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oomb_accel.integrations.float8_base import LONGEST_FAST_SUM
from oomb_kernels import FLOAT8, float8_product, float8_product_fault, has_float8_product, quantize_rows, row_float8
from oomb_kernels.row_float8 import launch_quantize_rows, quantize_rows_reference
from tests.kernels.reference import INTERPRETED, ON_GPU, TRITON_PLACES
from tests.kernels.test_page_float8 import EDGES, NUMBERS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
SHAPES = [(5, 48), (1, 16), (3, 1), (7, 100), (0, 16)]


def check_rows(quantize: Quantize, x: Tensor) -> None:
    """The nearest 8-bit numbers under the smallest scale that is a power of two."""
    codes, scales = quantize(x)
    assert codes.dtype == FLOAT8 and codes.shape == x.shape and codes.is_contiguous()
    assert scales.dtype == torch.float32 and scales.shape == (len(x), 1) and scales.is_contiguous()
    if not len(x):
        return
    assert (scales.frexp().mantissa == 0.5).all(), "a power of two"
    scaled = x.double() / scales.double()
    top = scaled.abs().amax(1)
    assert (top <= 448).all() and (top > 224).all()
    nearest = (scaled[..., None] - NUMBERS.to(x.device)).abs().amin(-1)
    assert torch.equal((scaled - codes.double()).abs(), nearest)


def rows(shape: tuple[int, int], dtype: torch.dtype, device: str, *, seed: int = 3) -> Tensor:
    torch.manual_seed(seed)
    return (torch.randn(shape, device=device) * torch.exp(2 * torch.randn(shape[0], 1, device=device))).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_definition(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_rows(quantize_rows, rows(shape, dtype, "cpu"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_rows(launch_quantize_rows, rows(shape, dtype, device))
    wide = rows((shape[0], shape[1] + 5), dtype, device)[:, : shape[1]]  # rows do not lie side by side
    check_rows(launch_quantize_rows, wide)


@pytest.mark.parametrize("size", [3584, 18944])
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=ON_GPU)])
def test_kernel_and_definition_agree_at_full_size(dtype: torch.dtype, size: int) -> None:
    x = rows((513, size), dtype, "cuda")
    for ours, wanted in zip(launch_quantize_rows(x), quantize_rows_reference(x), strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=ON_GPU)])
def test_kernel_and_definition_agree_on_edges(device: str, name: str) -> None:
    values = torch.tensor(EDGES[name])
    chosen = torch.randint(len(values), (6, 24), generator=torch.Generator().manual_seed(1))
    chosen[:, :8] = torch.arange(8) % len(values)
    x = values[chosen].to(device)
    for ours, wanted in zip(launch_quantize_rows(x), quantize_rows_reference(x), strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("quantize", "device"),
    [
        pytest.param(quantize_rows, "cpu", id="definition"),
        pytest.param(launch_quantize_rows, "cpu", marks=INTERPRETED, id="interpreted"),
        pytest.param(launch_quantize_rows, "cuda", marks=ON_GPU, id="gpu"),
    ],
)
def test_infinities_and_nan_do_not_hide(quantize: Quantize, device: str, bad: float) -> None:
    """Nor reach other rows."""
    x, weight = torch.randn(4, 32, device=device), torch.randn(16, 32, device=device)
    x[2, 5] = bad
    out = torch.empty(4, 16, dtype=torch.bfloat16, device=device)
    (a, a_scales), (b, b_scales) = quantize(x), quantize(weight)
    float8_product(a, a_scales, b, b_scales, None, out, fast=True)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_what_the_numbers_stand_for(with_bias: bool, dtype: torch.dtype) -> None:
    """Of scales that are powers of two nothing is lost in any dtype."""
    x, weight = rows((9, 64), dtype, "cpu"), rows((32, 64), dtype, "cpu")
    bias = torch.randn(32).to(dtype) if with_bias else None
    (a, a_scales), (b, b_scales) = quantize_rows(x), quantize_rows(weight)
    out = torch.empty(9, 32, dtype=dtype)
    float8_product(a, a_scales, b, b_scales, bias, out, fast=True)
    wanted = (a.double() * a_scales) @ (b.double() * b_scales).t() + (0 if bias is None else bias.double())
    rounding = torch.finfo(dtype).eps * wanted.abs().max()
    assert (out.double() - wanted).abs().max() <= rounding
    change = (wanted - (x.double() @ weight.double().t() + (0 if bias is None else bias.double()))).norm()
    assert 0.01 < change / wanted.norm() < 0.06


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "fast"),
    [
        *((*sizes, fast) for sizes in [(515, 512, 3584), (1, 3584, 3584), (7, 512, 3584)] for fast in (True, False)),
        (8192, 512, LONGEST_FAST_SUM, True),
        (8192, 512, 18944, False),
    ],
)
def test_the_scaled_product(num_rows: int, outputs: int, inputs: int, fast: bool, with_bias: bool) -> None:
    """torch's, against the definition in fp64: bf16's rounding, and with fast sums a little more, up to where the
    float8 base takes them. Of 18,944 numbers they are too far off."""
    x = rows((num_rows, inputs), torch.bfloat16, "cuda")
    weight = rows((outputs, inputs), torch.bfloat16, "cuda", seed=4)  # rows of one seed may be each other's
    bias = torch.randn(outputs, device="cuda").bfloat16() if with_bias else None
    (a, a_scales), (b, b_scales) = quantize_rows(x), quantize_rows(weight)
    first, second = (torch.full((num_rows, outputs), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    exact = torch.empty(num_rows, outputs, dtype=torch.float64, device="cuda")
    for out in (first, second, exact):
        float8_product(a, a_scales, b, b_scales, None if bias is None else bias.to(out.dtype), out, fast=fast)
    error = ((first.double() - exact).norm(dim=1) / exact.norm(dim=1)).max()
    assert error <= (0.02 if fast else 0.004)  # rounding x and W is 0.037
    assert torch.equal(first, second)


def test_which_products_there_are() -> None:
    assert has_float8_product(16, 64) and not has_float8_product(24, 64) and not has_float8_product(16, 40)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_products_that_work_have_no_fault(device: str) -> None:
    row_float8.float8_product_fault.cache_clear()
    assert float8_product_fault(torch.device(device)) is None


@pytest.mark.parametrize("bad", ["fast", "exact", "wrong"])
def test_a_fault_is_found_and_remembered(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    """One that only one way of summing has, and numbers that are wrong."""
    calls = 0

    def product(*args: Tensor, fast: bool) -> None:
        nonlocal calls
        calls += 1
        if bad == ("fast" if fast else "exact"):
            raise NotImplementedError("scales by row\nmore text")
        float8_product(*args, fast=fast)
        if bad == "wrong":
            args[-1][3, 4] += 1

    row_float8.float8_product_fault.cache_clear()
    monkeypatch.setattr(row_float8, "float8_product", product)
    cpu = torch.device("cpu")
    wanted = "wrong numbers" if bad == "wrong" else "NotImplementedError: scales by row"
    before = float8_product_fault(cpu), calls
    assert before[0] == wanted == float8_product_fault(cpu) and calls == before[1]
    row_float8.float8_product_fault.cache_clear()
