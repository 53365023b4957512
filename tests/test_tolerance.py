"""The twice-plain rule on made-up errors: it passes what rounding does and fails what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.harness.batches import Document, documents_of, only_targets, padded
from tests.harness.models import tiny_model, twin
from tests.harness.parity import assert_twice_plain_result, chunked, config, reference
from tests.harness.tolerance import CHANCE, assert_same_bits, assert_twice_plain, twice_plain_error

BF16 = torch.bfloat16
SIGMA = 0.1
"""Spread of the made-up errors of plain code: far above the rounding floor of numbers near 1."""


def errors(*shape: int, seed: int) -> Tensor:
    return SIGMA * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def passes(ours: Tensor, plain: Tensor, more_errors: Tensor | None) -> bool:
    """Rule 2 for errors of numbers that are all 1."""
    exact = torch.ones(ours.numel(), dtype=torch.float64)
    more = None if more_errors is None else {"x": more_errors}
    try:
        assert_twice_plain({"x": exact + ours}, {"x": exact + plain}, {"x": exact}, BF16, more)
    except AssertionError:
        return False
    return True


def share_passed(count: int, ours_over_plain: float, *, with_more: bool) -> float:
    """How often errors pass that are as wild as plain code's, or so many times as wild."""
    trials = 2000
    ours, plain = ours_over_plain * errors(trials, count, seed=1), errors(trials, count, seed=2)
    more = errors(1000, seed=3) if with_more else None
    return sum(passes(a, b, more) for a, b in zip(ours, plain, strict=True)) / trials


@pytest.mark.parametrize("count", [1, 2, 5, 24, 100])
def test_few_numbers_pass_when_they_are_as_good_as_plain_code(count: int) -> None:
    assert share_passed(count, 1.0, with_more=True) == 1.0


def test_one_number_against_one_number_is_a_lottery() -> None:
    """Why more numbers are asked: equally good code fails more than every fourth time."""
    assert 0.65 < share_passed(1, 1.0, with_more=False) < 0.75


@pytest.mark.parametrize(("count", "times"), [(1, 1000.0), (5, 10.0), (24, 4.0), (100, 3.0), (1000, 2.5)])
def test_worse_code_fails(count: int, times: float) -> None:
    """The fewer numbers, the worse code must be to be found out."""
    assert share_passed(count, times, with_more=True) < 0.05


@pytest.mark.parametrize("count", [26, 100, 400])
def test_many_numbers_are_judged_as_before(count: int) -> None:
    """Plain code's own error stays the limit where it is no accident."""
    plain, more = errors(count, seed=4), errors(1000, seed=5)
    ones = torch.ones(count, dtype=torch.float64)
    _, alone = twice_plain_error(ones, ones + plain, ones, BF16)
    _, beside = twice_plain_error(ones, ones + plain, ones, BF16, more)
    assert beside <= 1.25 * alone


def test_the_limit_of_one_number() -> None:
    one, more = torch.ones(1, dtype=torch.float64), errors(1000, seed=6)
    typical = more.square().mean().sqrt().item()
    _, allowed = twice_plain_error(one, one, one, BF16, more)
    assert allowed == pytest.approx((1 + CHANCE) * typical + 2.0**-8)
    assert passes(torch.tensor([5.9 * typical]), torch.zeros(1), more)
    assert not passes(torch.tensor([6.1 * typical]), torch.zeros(1), more)
    assert not passes(torch.tensor([torch.nan]), torch.zeros(1), more)


def test_a_number_is_not_its_own_sample() -> None:
    """Errors that are all there is tell nothing beyond twice themselves."""
    plain, ones = errors(3, seed=7), torch.ones(3, dtype=torch.float64)
    assert twice_plain_error(ones, ones + plain, ones, BF16, plain) == twice_plain_error(ones, ones + plain, ones, BF16)


def test_one_target_of_a_model() -> None:
    """The whole way: one log-probability passes where it is right, and seldom where its context was misread."""
    low: nn.Module = tiny_model("llama")
    low.to(BF16)
    document = only_targets(documents_of(90)[0], [80])
    exact, plain = reference(twin(low).float(), [document]), reference(twin(low), [document])
    assert exact.all_log_probs[0].numel() == 89
    assert_same_bits(exact.log_probs[0], exact.all_log_probs[0][79:80])
    assert_twice_plain_result(chunked(twin(low), padded([document]), config()), plain, exact)
    misread = document.ids.clone()
    misread[:16] = 3
    wrong = reference(twin(low), [Document(misread, misread.clone())])
    right, errors = exact.all_log_probs[0], {"x": plain.all_log_probs[0] - exact.all_log_probs[0]}
    found = 0
    for token in range(20, 89):  # each as if it were the only target
        one = slice(token, token + 1)
        try:
            assert_twice_plain({"x": wrong.all_log_probs[0][one]}, {"x": right[one]}, {"x": right[one]}, BF16, errors)
        except AssertionError:
            found += 1
    assert found > 60
