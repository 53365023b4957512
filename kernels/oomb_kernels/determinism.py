"""Deterministic kernels for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Turns torch's deterministic algorithms on, and restores what was set.

    The switch is global: it holds in autograd's threads too. It is the only one that the flash backward has. Filling
    fresh memory, which comes with it by default, stays off: that would cost a write of every page pool.
    """
    if not enabled:
        yield
        return
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory = cast(Any, torch.utils.deterministic)  # the attribute is invisible to type checkers
    was_filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
