"""How the gradients of a step's passes become the gradients of its parameters.

From outside a step is one forward and one backward, but its backward sweep runs the model once per chunk. Two ways
lead from the passes to the parameters:

* *Returned*: each pass differentiates with respect to the parameters; the sums are what the step's node in the
  caller's graph returns. Every hook of the parameters fires once. For one process, DDP and ZeRO 0-2.
* *Deferred*: each pass back-propagates into ``p.grad``; all passes but the last are put aside in fp32, and the last
  one delivers the sum. For ZeRO 3, whose parameters are empty outside of their modules, so that no node can have
  them as inputs. DeepSpeed is told by ``ds_grad_is_ready`` when a gradient is complete.

Both hold every trainable gradient whole, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oomb_accel.hooks import first_hooks, without_hooks


class StepGradients(Protocol):
    """Takes the gradients of one step, pass by pass."""

    @property
    def leaves(self) -> Sequence[Tensor]:
        """What the step depends on, as far as the caller's graph can know it."""

    def add(self, log_probs_N: Tensor, grad_N: Tensor, embeds_1TD: Tensor | None, *, last: bool) -> Tensor | None:
        """Back-propagate one pass.

        Args:
            log_probs_N: result of the pass, with its graph.
            grad_N: its gradient.
            embeds_1TD: the pass's input embeddings: a leaf.
            last: no pass comes after this one.

        Returns:
            Gradient of the embeddings, where they want one.
        """

    def results(self) -> list[Tensor | None]:
        """Gradients of the leaves, after the last pass."""


class ReturnedGradients:
    """Sums of all passes in fp32, for the step's node to return.

    Args:
        parameters: the trainable parameters of the model.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.leaves = parameters

    @cached_property
    def _sums(self) -> list[Tensor]:
        """Made when the backward sweep needs them; zeros, not None, for a step without passes."""
        return [torch.zeros_like(p, dtype=_wide(p)) for p in self.leaves]

    def add(self, log_probs_N: Tensor, grad_N: Tensor, embeds_1TD: Tensor | None, *, last: bool) -> Tensor | None:
        del last
        wants = embeds_1TD is not None and embeds_1TD.requires_grad
        inputs = [*self.leaves, embeds_1TD] if embeds_1TD is not None and wants else list(self.leaves)
        with without_hooks(inputs):
            # A parameter may play no part in a pass.
            grads = torch.autograd.grad(log_probs_N, inputs, grad_N, allow_unused=True)
        _add(self._sums, grads[: len(self.leaves)])
        return grads[-1] if wants else None

    def results(self) -> list[Tensor | None]:
        sums = self._sums
        found: list[Tensor | None] = []
        for parameter in self.leaves:
            found.append(sums.pop(0).to(parameter.dtype))  # one fp32 sum after another can go
        return found


class Deliveries:
    """Refuses what DeepSpeed's ZeRO 3 cannot take: a parameter's gradient twice in one backward of the caller.

    Ordinary steps add up there as they do in plain DeepSpeed; a step of several passes delivers complete gradients.
    """

    def __init__(self) -> None:
        self._backward = -1
        self._deferred = False

    def note(self, *, deferred: bool) -> None:
        """A step delivers its gradients now, within a backward.

        Raises:
            RuntimeError: another step has, in the same backward, and one of the two has several passes.
        """
        backward = torch._C._current_graph_task_id()
        if 0 <= backward == self._backward and (deferred or self._deferred):
            raise RuntimeError(
                "Two forwards before one backward are not possible under ZeRO 3.\n"
                "  Each of them would deliver the complete gradient of every parameter.\n"
                "  Call backward after each forward and set gradient_accumulation_steps, or use ZeRO 2."
            )
        self._backward, self._deferred = backward, deferred


class DeferredGradients:
    """Gradients go to the parameters themselves, complete with the last pass.

    Args:
        parameters: the trainable parameters of the model, partitioned by ZeRO 3.
        device: of the model.
        deliveries: of the model.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device, deliveries: Deliveries) -> None:
        self.leaves: Sequence[Tensor] = (torch.zeros((), device=device, requires_grad=True),)
        self._parameters = parameters
        self._deliveries = deliveries
        self._put_aside: dict[nn.Parameter, Tensor] = {}

    def add(self, log_probs_N: Tensor, grad_N: Tensor, embeds_1TD: Tensor | None, *, last: bool) -> Tensor | None:
        if last:
            self._deliveries.note(deferred=True)
        hooks = first_hooks(self._parameters, self._complete) if last else without_hooks(self._parameters)
        try:
            with hooks, _ready(self._parameters, last):
                torch.autograd.backward(log_probs_N, grad_N)
        except BaseException:
            self._forget()
            raise
        if not last:
            self._collect()
        elif self._put_aside:
            raise RuntimeError(
                f"{len(self._put_aside)} parameters took part in a chunk, but not in the first one: their gradients "
                "would be lost.\n  Under ZeRO 3 every pass must run every module.\n"
                "  Use ZeRO 2, or a model whose layers do not depend on the data."
            )
        return None if embeds_1TD is None else embeds_1TD.grad

    def results(self) -> list[Tensor | None]:
        return [None]

    def _forget(self) -> None:
        """After an error: a part of a gradient must not become a part of the next step."""
        for parameter in self._parameters:
            parameter.grad = None
        self._put_aside.clear()

    def _collect(self) -> None:
        """Put the gradients of a pass aside."""
        known = [parameter for parameter in self._parameters if parameter in self._put_aside]
        _add([self._put_aside[parameter] for parameter in known], [parameter.grad for parameter in known])
        for parameter in self._parameters:  # one after another can go
            grad, parameter.grad = parameter.grad, None
            if grad is not None and parameter not in self._put_aside:
                self._put_aside[parameter] = grad.to(_wide(grad))

    def _complete(self, parameter: nn.Parameter, grad: Tensor) -> Tensor:
        """The last pass's gradient together with all that was put aside."""
        total = self._put_aside.pop(parameter, None)
        return grad if total is None else total.add_(grad).to(grad.dtype)


@contextmanager
def _ready(parameters: Sequence[Any], ready: bool) -> Iterator[None]:
    """Tell DeepSpeed whether the gradients of the backward inside are complete. It takes a parameter without this
    mark as ready, so the mark never stays behind, not even after an error."""
    for parameter in parameters:
        parameter.ds_grad_is_ready = ready
    try:
        yield
    finally:
        for parameter in parameters:
            del parameter.ds_grad_is_ready


def _add(sums: list[Tensor], grads: Sequence[Tensor | None]) -> None:
    pairs = [(s, g) for s, g in zip(sums, grads, strict=True) if g is not None]
    if pairs:
        torch._foreach_add_([s for s, _ in pairs], [g for _, g in pairs])


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
