"""How long a step waits for host memory to be made, which only the first of its length does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from oomb_accel.offload import Offload


@dataclass(slots=True)
class Making:
    """What `timed_making` has seen."""

    seconds: float = 0.0


@contextmanager
def timed_making() -> Iterator[Making]:
    """Within it, what it takes to make host memory for pages and kept outputs."""
    made, plain = Making(), Offload._make

    def make(self: Offload, *arguments: Any, **keywords: Any) -> None:
        start = time.perf_counter()
        try:
            plain(self, *arguments, **keywords)
        finally:
            made.seconds += time.perf_counter() - start

    with patch.object(Offload, "_make", make):
        yield made
