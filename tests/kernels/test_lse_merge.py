"""Merging attention results against one softmax over both key sets."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oomb_kernels import merge_attention_
from oomb_kernels.lse_merge import launch_merge_attention_, merge_attention_reference_
from tests.kernels.reference import TRITON_PLACES, assert_equal_by_definition

NEVER = float("-inf")


def expected(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted by exp(lse) in fp64, rows without any key set apart."""
    weights = torch.stack([lse_a, lse_b]).double().exp()
    total = weights.sum(0)
    shares = (weights / torch.where(total > 0, total, 1.0)).unsqueeze(-1)
    return shares[0] * out_a.double() + shares[1] * out_b.double(), total.log()


def check(
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    device: str,
    dtype: torch.dtype,
    acc_dtype: torch.dtype,
    *,
    tokens: int = 37,
    dim: int = 24,
) -> None:
    torch.manual_seed(0)
    heads = 3
    acc = torch.randn(tokens, heads, dim, device=device, dtype=acc_dtype).transpose(0, 1)  # strided
    out = torch.randn(tokens, 2 * heads, dim, device=device).to(dtype).transpose(0, 1)[::2]
    lse_acc = torch.randn(heads, tokens, device=device, dtype=acc_dtype) * 3
    lse = (torch.randn(tokens, heads, device=device, dtype=acc_dtype) * 3).t()
    for number, (left, right) in enumerate([(NEVER, 0.5), (0.5, NEVER), (NEVER, NEVER)]):
        lse_acc[:, number], lse[:, number] = left, right
        if left == NEVER:
            acc[:, number] = 0
        if right == NEVER:
            out[:, number] = 0
    truth_out, truth_lse = expected(acc, lse_acc, out, lse)
    merge(acc, lse_acc, out, lse)
    assert_equal_by_definition(acc, truth_out, "out")
    assert_equal_by_definition(lse_acc, truth_lse, "lse")
    assert not acc[:, 2].any()


@pytest.mark.parametrize("acc_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("merge", [merge_attention_, merge_attention_reference_])
def test_reference(
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None], dtype: torch.dtype, acc_dtype: torch.dtype
) -> None:
    check(merge, "cpu", dtype, acc_dtype)


@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel(device: str, dtype: torch.dtype, dim: int) -> None:
    check(launch_merge_attention_, device, dtype, torch.float32, dim=dim)


@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel_with_many_blocks_and_large_heads(device: str, dtype: torch.dtype) -> None:
    check(launch_merge_attention_, device, dtype, torch.float32, tokens=40, dim=256)


@pytest.mark.parametrize("merge", [merge_attention_reference_, launch_merge_attention_])
def test_no_tokens(merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> None:
    merge(torch.empty(2, 0, 8), torch.empty(2, 0), torch.empty(2, 0, 8), torch.empty(2, 0))


def test_large_values_do_not_overflow() -> None:
    acc, lse_acc = torch.ones(1, 2, 4), torch.tensor([[3e4, -3e4]])
    merge_attention_(acc, lse_acc, torch.zeros(1, 2, 4), torch.tensor([[-3e4, 3e4]]))
    assert torch.equal(acc[0], torch.tensor([[1.0] * 4, [0.0] * 4]))
    assert torch.equal(lse_acc, torch.tensor([[3e4, 3e4]]))
