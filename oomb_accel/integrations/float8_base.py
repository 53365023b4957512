"""Frozen base weights in 8 bits: ``base_dtype="float8"``.

Each frozen linear layer of the decoder has two copies of its weight in e4m3, one for its output and, stored transposed
because scaled products read both matrices along the sum, one for the gradient of its input. Each has a scale for every
row, and so have inputs and output gradients, which are quantised where they come. What adapters add is computed from
unrounded numbers, and the weight itself stays for checkpoints and for calls that are no chunks.

Legend: I inputs, O outputs, T tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._nn import linear  # torch.nn.functional.linear; DeepSpeed puts another one there

from oomb_kernels import checksums, float8_product, has_float8_product, quantize_rows

Rows = tuple[Tensor, Tensor]
"""e4m3 ``[T, I]`` and scales ``[T, 1]``."""
LONGEST_FAST_SUM = 4096
"""Numbers. An H200's own accumulators were off by 0.6 % in the worst of 8,192 random rows of so many, by 3.3 % in that
of 18,944, and by 24 % where both matrices came from one seed: most likely sums of squares."""


class LastInput:
    """The last input in 8 bits: query, key and value have the same one, and so have gate and up."""

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._key: tuple[object, ...] | None = None
        self._rows: Rows | None = None

    def rows(self, x: Tensor) -> Rows:
        """An input ``[..., I]`` as rows in 8 bits."""
        # An alias of the input will do. As long as the tensor lives, its address is nobody else's.
        key = None if x.is_inference() else (x.data_ptr(), x._version, x.shape, x.stride(), x.dtype)
        if self._rows is None or key is None or key != self._key or self._source is None or self._source() is None:
            self._rows = None  # before others are made
            self._rows = quantize_rows(x.detach().reshape(-1, x.shape[-1]))
            self._key, self._source = key, weakref.ref(x)
        return self._rows

    def forget(self) -> None:
        self._key = self._rows = self._source = None


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A weight ``[O, I]`` in 8 bits, for both directions."""

    weight_OI: Tensor
    scales_O1: Tensor
    weight_IO: Tensor
    scales_I1: Tensor
    last_input: LastInput

    @classmethod
    def of(cls, weight_OI: Tensor, last_input: LastInput) -> Float8Weight:
        """Quantise a weight."""
        weight_OI = weight_OI.detach()
        return cls(*quantize_rows(weight_OI), *quantize_rows(weight_OI.t().contiguous()), last_input)

    def product(self, x: Tensor, bias_O: Tensor | None, out_TO: Tensor) -> None:
        """``out = x W^T + bias``. Short sums are left to the tensor cores' own accumulators, as inference with 8-bit
        floats does: their error is a small part of the rounding of x and W."""
        fast = self.weight_OI.shape[1] <= LONGEST_FAST_SUM
        float8_product(*self.last_input.rows(x), self.weight_OI, self.scales_O1, bias_O, out_TO, fast=fast)

    def input_gradient(self, dy_TO: Tensor) -> Tensor:
        """``dx = dy W``, ``[T, I]``. Sums in fp32: what is lost here is lost again in every layer below."""
        dx_TI = dy_TO.new_empty(len(dy_TO), len(self.weight_IO))
        float8_product(*quantize_rows(dy_TO), self.weight_IO, self.scales_I1, None, dx_TI, fast=False)
        return dx_TI


def base_product(
    x: Tensor,
    rows_TI: Tensor,
    weight_OI: Tensor | None,
    bias_O: Tensor | None,
    out_TO: Tensor,
    float8: Float8Weight | None,
) -> None:
    """``out = x W^T + bias`` of a frozen layer.

    Args:
        x: ``[..., I]``; all in the dtype of ``out``.
        rows_TI: the same, row by row.
        weight_OI: read where there is no weight in 8 bits.
    """
    if float8 is not None:
        float8.product(x, bias_O, out_TO)
        return
    assert weight_OI is not None
    linear(rows_TI, weight_OI, bias_O, out=out_TO)  # type: ignore[call-arg]  # its stub does not know of `out`


def base_input_gradient(
    dy_TO: Tensor, weight_OI: Tensor | None, float8: Float8Weight | None, *, add_to: Tensor | None
) -> Tensor:
    """``dx = dy W`` of a frozen layer, ``[T, I]``, which the caller may change; ``add_to`` with that added."""
    if float8 is not None:
        dx_TI = float8.input_gradient(dy_TO)
        return dx_TI if add_to is None else add_to.add_(dx_TI)
    assert weight_OI is not None
    return dy_TO @ weight_OI if add_to is None else add_to.addmm_(dy_TO, weight_OI)


class Float8Forward:
    """The forward of a frozen linear layer inside of passes."""

    def __init__(self, layer: nn.Linear, weight: Float8Weight) -> None:
        self._layer = layer
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        dtype = autocast_dtype(x) or x.dtype
        bias_O = None if self._layer.bias is None else self._layer.bias.to(dtype)
        out: Tensor = _Float8Linear.apply(x.to(dtype), bias_O, self.weight)
        return out


class _Float8Linear(torch.autograd.Function):
    """Differentiable once, with respect to its input: straight through the rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_O: Tensor | None, weight: Float8Weight) -> Tensor:
        ctx.weight, ctx.shape = weight, x.shape
        num_outputs = len(weight.weight_OI)
        out = x.new_empty(*x.shape[:-1], num_outputs)  # no view, which nobody could change in place
        weight.product(x, bias_O, out.view(-1, num_outputs))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        dy_TO = grads[0].reshape(-1, len(ctx.weight.weight_OI))
        return ctx.weight.input_gradient(dy_TO).view(ctx.shape), None, None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast brings an input of a linear layer to; None where it is off, or leaves the input as it is: fp64."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else None


def float8_of(layer: nn.Module) -> Float8Weight | None:
    """The weight in 8 bits with which a layer runs now."""
    forward = vars(layer).get("forward")
    return forward.weight if isinstance(forward, Float8Forward) else None


def can_run_in_float8(layer: nn.Linear) -> bool:
    """Whether it is a frozen linear layer of nobody's special kind, of sizes that scaled products can take."""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or type(layer.weight) is not nn.Parameter:
        return False
    trained = layer.weight.requires_grad or (layer.bias is not None and layer.bias.requires_grad)
    if trained or not layer.weight.is_floating_point():
        return False
    return has_float8_product(layer.out_features, layer.in_features)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a linear layer stands, which may be replaced."""

    owner: nn.Module
    name: str

    @property
    def layer(self) -> nn.Module | None:
        """The one that stands there now."""
        return self.owner._modules.get(self.name)


class Float8Base:
    """The copies in 8 bits of a model's frozen weights; none before they are wanted.

    Args:
        places: of all linear layers of the decoder.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = tuple(places)
        self._last_input = LastInput()
        self._copies: dict[nn.Linear, tuple[tuple[object, ...], Float8Weight]] = {}

    @property
    def layers(self) -> list[nn.Linear]:
        """All linear layers of the decoder, as it is now."""
        found = (place.layer for place in self._places)
        return list(dict.fromkeys(layer for layer in found if isinstance(layer, nn.Linear)))  # one may stand twice

    def update(self) -> None:
        """Make copies of weights that have none, and again of those that have changed since.

        Reads every weight once: PEFT merges by ``weight.data += delta``, which autograd does not count. For the 6.5
        billion numbers of a 7B that is 13 GB, about 4 ms of an H200, and one wait of the host.
        """
        wanted = self.able_layers()
        for layer in self._copies.keys() - set(wanted):
            del self._copies[layer]
        for layer, checksum in zip(wanted, checksums([layer.weight for layer in wanted]), strict=True):
            now = checksum, layer.weight.shape, layer.weight.dtype, layer.weight.device
            if layer in self._copies and self._copies[layer][0] == now:
                continue
            self._copies.pop(layer, None)  # before the next one is made
            self._copies[layer] = now, Float8Weight.of(layer.weight, self._last_input)

    def able_layers(self) -> list[nn.Linear]:
        """Layers that can run in 8 bits as they are now."""
        return [layer for layer in self.layers if can_run_in_float8(layer)]

    def release(self) -> None:
        """Give their memory back."""
        self._copies.clear()
        self._last_input.forget()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layers run in 8 bits."""
        running = []
        for layer, (_, weight) in self._copies.items():
            if "forward" not in vars(layer):
                layer.forward = Float8Forward(layer, weight)  # type: ignore[method-assign, assignment]
                running.append(layer)
        try:
            yield
        finally:
            for layer in running:
                del layer.forward
            self._last_input.forget()

    @property
    def num_layers(self) -> int:
        """Linear layers that run in 8 bits."""
        return len(self._copies)

    def tensors(self) -> list[Tensor]:
        """The copies and their scales."""
        weights = (weight for _, weight in self._copies.values())
        return [part for w in weights for part in (w.weight_OI, w.scales_O1, w.weight_IO, w.scales_I1)]

    @property
    def num_bytes(self) -> int:
        """Of them."""
        return sum(part.numel() * part.element_size() for part in self.tensors())

    @property
    def widths(self) -> set[int]:
        """Of inputs and outputs of all linear layers."""
        return {width for layer in self.layers for width in (layer.in_features, layer.out_features)}
