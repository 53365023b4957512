"""Target log-probabilities and their gradient against log_softmax and autograd in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oomb_kernels import token_log_probs, token_log_probs_backward_, token_loss
from oomb_kernels.token_loss import (
    launch_token_log_probs,
    launch_token_log_probs_backward_,
    token_log_probs_backward_reference_,
    token_log_probs_reference,
)
from tests.kernels.reference import INTERPRETED, ON_GPU, TRITON_PLACES, assert_close_in, assert_equal_by_definition

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
REFERENCES = [
    pytest.param(token_log_probs, token_log_probs_backward_, id="public"),
    pytest.param(token_log_probs_reference, token_log_probs_backward_reference_, id="reference"),
]


def plain(logits: Tensor, targets: Tensor, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """logp, lse and the gradient to the logits in `dtype`."""
    leaf = logits.detach().to(dtype, copy=True).requires_grad_()
    logp = torch.log_softmax(leaf, -1).gather(1, targets[:, None])[:, 0]
    logp.backward(grad.to(dtype))
    assert leaf.grad is not None
    return logp.detach(), torch.logsumexp(leaf.detach(), -1), leaf.grad


def check(
    forward: Forward, backward: Backward, device: str, dtype: torch.dtype, rows: int = 7, vocab: int = 50
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows, vocab + 6, device=device) * 4).to(dtype)[:, :vocab]  # rows are not adjacent
    targets = torch.randint(0, vocab, (rows,), device=device)
    targets[0], targets[-1] = 0, vocab - 1
    grad = torch.randn(rows, device=device, dtype=torch.promote_types(dtype, torch.float32))
    truth = plain(logits, targets, grad, torch.float64)
    low = plain(logits, targets, grad, dtype)
    logp, lse = forward(logits, targets)
    assert logp.dtype == lse.dtype == grad.dtype
    assert_equal_by_definition(logp, truth[0], "logp")
    assert_equal_by_definition(lse, truth[1], "lse")
    version, place = logits._version, logits.data_ptr()
    dlogits = backward(logits, targets, lse, grad)
    assert dlogits is logits and logits.data_ptr() == place and logits._version > version
    assert_close_in(dtype, dlogits, low[2], truth[2], "dlogits")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("forward", "backward"), REFERENCES)
def test_reference(forward: Forward, backward: Backward, dtype: torch.dtype) -> None:
    check(forward, backward, "cpu", dtype)


def test_reference_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_loss, "_MAX_ELEMENTS", 100)
    check(token_log_probs, token_log_probs_backward_, "cpu", torch.float32)


@pytest.mark.parametrize("vocab", [1, 50, 64])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel(device: str, dtype: torch.dtype, vocab: int) -> None:
    check(launch_token_log_probs, launch_token_log_probs_backward_, device, dtype, vocab=vocab)


@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel_over_several_blocks(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_loss, "_BLOCK_V", 16)
    check(launch_token_log_probs, launch_token_log_probs_backward_, device, dtype)


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=ON_GPU, id=str(d)) for d in (torch.float32, torch.bfloat16)])
def test_kernel_at_full_vocabulary(dtype: torch.dtype) -> None:
    check(launch_token_log_probs, launch_token_log_probs_backward_, "cuda", dtype, rows=64, vocab=152_064)


@pytest.mark.parametrize(
    ("forward", "backward", "device"),
    [
        pytest.param(token_log_probs_reference, token_log_probs_backward_reference_, "cpu", id="reference"),
        pytest.param(
            launch_token_log_probs,
            launch_token_log_probs_backward_,
            "cpu",
            marks=INTERPRETED,
            id="interpreted",
        ),
        pytest.param(launch_token_log_probs, launch_token_log_probs_backward_, "cuda", marks=ON_GPU, id="gpu"),
    ],
)
def test_extreme_logits_and_no_rows(
    forward: Forward, backward: Backward, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_loss, "_BLOCK_V", 4)
    never = float("-inf")
    logits = torch.tensor([[never] * 4 + [3e4, -3e4], [never] * 5 + [2.0], [0.0] * 6], device=device)
    targets = torch.tensor([4, 5, 3], device=device)
    logp, lse = forward(logits, targets)
    exact = torch.tensor([0.0, 0.0, -torch.tensor(6.0).log().item()])
    assert_equal_by_definition(logp.cpu(), exact.double())
    dlogits = backward(logits, targets, lse, torch.ones(3, device=device)).cpu()
    assert torch.equal(dlogits[:2], torch.zeros(2, 6))
    assert_equal_by_definition(dlogits[2], torch.tensor([-1, -1, -1, 5, -1, -1]).double() / 6)

    nothing, none = torch.empty(0, 6, device=device), torch.empty(0, dtype=torch.int64, device=device)
    logp, lse = forward(nothing, none)
    assert logp.shape == lse.shape == (0,)
    assert backward(nothing, none, lse, logp).shape == (0, 6)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), *TRITON_PLACES])
def test_autograd_notices_the_overwritten_logits(device: str, dtype: torch.dtype) -> None:
    backward: Backward = token_log_probs_backward_reference_
    if device == "cuda" or not torch.cuda.is_available():
        backward = launch_token_log_probs_backward_
    logits = torch.randn(2, 8, device=device, dtype=dtype)
    weight = torch.ones(2, 8, device=device, dtype=dtype, requires_grad=True)
    product = (weight * logits).sum()
    targets = torch.tensor([1, 2], device=device)
    backward(logits, targets, torch.zeros(2, device=device), torch.ones(2, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
