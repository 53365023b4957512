"""A few numbers of the host for kernels, which read them where they lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LEAST_NUMBERS = 8192
_PAGES_AT_ONCE = 16
"""Pinning takes longer than all else here."""


@dataclass(frozen=True, slots=True)
class _Page:
    tensor: Tensor
    numbers: npt.NDArray[np.int32]
    """The same memory."""
    passed: torch.cuda.Event
    """Behind the last kernel that reads it, if there was one."""


class PinnedNumbers:
    """Pages of pinned memory in turn. A page is used again when its kernel has passed; until then there is another.

    Args:
        in_place: whether kernels see pinned memory; otherwise the numbers are copied first.
    """

    def __init__(self, device: torch.device, *, in_place: bool) -> None:
        self._device, self._in_place = device, in_place
        self._pages: deque[_Page] = deque()
        """In the order in which they were used, those that never were first."""
        self._page_numbers = _LEAST_NUMBERS

    def launch(self, kernel: Callable[[Tensor], None], *rows: npt.NDArray[np.integer]) -> None:
        """Call ``kernel`` with these rows, int32 ``[number of rows, M]``, which it may read on the current stream."""
        count = rows[0].size
        page = self._page(len(rows) * count)
        for number, row in enumerate(rows):
            page.numbers[number * count : (number + 1) * count] = row
        numbers = page.tensor[: len(rows) * count].view(len(rows), count)
        kernel(numbers if self._in_place else numbers.to(self._device, non_blocking=True))
        page.passed.record(torch.cuda.current_stream(self._device))
        self._pages.append(page)

    def _page(self, num_numbers: int) -> _Page:
        while self._page_numbers < num_numbers:
            self._page_numbers *= 2
        while self._pages and self._pages[0].passed.query():
            page = self._pages.popleft()
            if page.numbers.size == self._page_numbers:  # smaller ones are given up
                return page
        block = torch.empty(_PAGES_AT_ONCE, self._page_numbers, dtype=torch.int32, pin_memory=True)
        first, *others = (_Page(tensor, tensor.numpy(), torch.cuda.Event()) for tensor in block)
        self._pages.extendleft(others)
        return first
