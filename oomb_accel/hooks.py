"""Gradient hooks of parameters: the caller's fire once per step, on the sum, not once per chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Take the hooks of ``register_hook`` off inside. A hook that clips or scales would act on each chunk's part,
    and then again on the sum."""
    hooked = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks
