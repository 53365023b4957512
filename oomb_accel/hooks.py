"""Gradient hooks of parameters: the caller's fire once per step, on the sum, not once per chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from torch import Tensor

Leaf = TypeVar("Leaf", bound=Tensor)


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


@contextmanager
def first_hooks(parameters: Sequence[Leaf], hook: Callable[[Leaf, Tensor], Tensor]) -> Iterator[None]:
    """Inside, ``hook(parameter, gradient)`` replaces each parameter's gradient before the caller's hooks see it."""
    handles = []
    try:
        for parameter in parameters:
            handles.append(parameter.register_hook(partial(hook, parameter)))
            hooks: dict[int, object] = parameter._backward_hooks  # type: ignore[assignment]
            for earlier in list(hooks)[:-1]:  # autograd goes by the order of insertion
                hooks[earlier] = hooks.pop(earlier)
        yield
    finally:
        for handle in handles:
            handle.remove()
