"""A step that fails in its middle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn


class Stop(Exception):
    """What `stopping` raises."""


@contextmanager
def stopping(module: nn.Module, call: int) -> Iterator[None]:
    """Inside, this call of the module raises, and nobody may catch it but this."""
    calls = 0

    def raise_at(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Stop

    hook = module.register_forward_pre_hook(raise_at)
    try:
        with pytest.raises(Stop):
            yield
    finally:
        hook.remove()
