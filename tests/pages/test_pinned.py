"""PinnedNumbers: what a kernel reads stays as it is until the kernel has passed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from oomb_accel.pages import pinned
from oomb_accel.pages.pinned import PinnedNumbers
from oomb_kernels import set_slots


class Event:
    """Passes when a test says so."""

    passed = True

    def record(self, stream: object) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> PinnedNumbers:
    """On the CPU, without pinned memory."""
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **rest: empty(*size, **rest))
    monkeypatch.setattr(pinned, "_LEAST_NUMBERS", 8)
    monkeypatch.setattr(pinned, "_PAGES_AT_ONCE", 2)
    return PinnedNumbers(torch.device("cpu"), in_place=True)


def given(numbers: PinnedNumbers, *rows: list[int]) -> Tensor:
    seen: list[Tensor] = []
    numbers.launch(seen.append, *(np.array(row) for row in rows))
    return seen[0]


def let_pass(numbers: PinnedNumbers, count: int) -> None:
    for page in list(numbers._pages)[:count]:
        page.passed.passed = True  # type: ignore[attr-defined]


def test_a_page_is_used_again_when_its_kernel_has_passed(numbers: PinnedNumbers) -> None:
    first, second, third = given(numbers, [1, 2], [3, 4]), given(numbers, [5]), given(numbers, [6])
    assert first.dtype == torch.int32
    assert (first.tolist(), second.tolist()) == ([[1, 2], [3, 4]], [[5]]), "the first kernel has still to read"
    assert len(numbers._pages) == 4 and len({page.tensor.data_ptr() for page in numbers._pages}) == 4
    given(numbers, [7])
    let_pass(numbers, 1)
    assert given(numbers, [8]).data_ptr() == first.data_ptr()
    assert (second.tolist(), third.tolist(), len(numbers._pages)) == ([[5]], [[6]], 4)


def test_more_numbers_than_a_page_has(numbers: PinnedNumbers) -> None:
    given(numbers, [1])
    let_pass(numbers, 2)
    rows = [list(range(20)), list(range(20, 40))]
    assert given(numbers, *rows).tolist() == rows
    assert [page.numbers.size for page in numbers._pages] == [64, 64], "small ones are given up"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_place", [False, True])
def test_the_host_is_far_ahead(in_place: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    numbers, found = PinnedNumbers(device, in_place=in_place), torch.zeros(50, 4, dtype=torch.int32, device=device)
    torch.cuda._sleep(100_000_000)
    for row in range(50):
        numbers.launch(functools.partial(set_slots, found, row * 4), np.arange(4), np.arange(4) + row * 10)
    wanted = torch.arange(50)[:, None] * 10 + torch.arange(4)
    assert torch.equal(found.cpu(), wanted.int())
