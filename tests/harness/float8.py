"""What a query sees of earlier chunks where pages are stored in 8 bits, and linear layers in 8 bits, written from the
definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oomb_accel.schedule import ChunkSchedule
from tests.harness.models import Model


def as_stored(x_GTD: Tensor, page: int) -> Tensor:
    """K or V of a document as pages give them back; tokens behind the last whole page as they are. The gradient goes
    straight through."""
    whole = x_GTD.shape[1] // page * page
    pages_GNPD = x_GTD[:, :whole].detach().unflatten(1, (-1, page))
    top = pages_GNPD.abs().amax((2, 3), keepdim=True)
    scale = torch.where(top > 0, 2.0 ** torch.ceil(torch.log2(top / 448)), 1.0)
    read_GTD = ((pages_GNPD / scale).to(torch.float8_e4m3fn).to(x_GTD.dtype) * scale).flatten(1, 2)
    change = torch.nn.functional.pad(read_GTD - x_GTD[:, :whole].detach(), (0, 0, 0, x_GTD.shape[1] - whole))
    return x_GTD + change


def same_chunk(schedule: ChunkSchedule, document: int, num_tokens: int) -> Tensor:
    """Which keys of a document are in the chunk of the query, ``[T, T]``."""
    number_T = torch.full((num_tokens,), -1)
    for chunk in schedule.chunks:
        for segment in chunk.segments:
            if segment.document == document:
                number_T[segment.past_tokens : segment.past_tokens + segment.num_tokens] = chunk.index
    return number_T[:, None] == number_T


def rounded(x: Tensor) -> Tensor:
    """A matrix with each row as 8 bits hold it, under the smallest scale that is a power of two."""
    top = x.detach().abs().amax(1, keepdim=True).double()
    scale = torch.where(top > 0, 2.0 ** torch.ceil(torch.log2(top / 448)), 1.0)
    return ((x.double() / scale).to(torch.float8_e4m3fn).double() * scale).to(x.dtype)


class _InFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        rows = torch.nn.functional.linear(rounded(x.flatten(0, -2)), rounded(weight), bias)
        return rows.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        (dy,) = grads
        dx = rounded(dy.flatten(0, -2)) @ rounded(weight.t()).t()
        return dx.view(*dy.shape[:-1], weight.shape[1]), None, None


def with_float8_linears(model: Model) -> Model:
    """The model with every frozen linear layer of its blocks from the definition, in place."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in f".{name}" and not module.weight.requires_grad:
            module.forward = lambda x, m=module: _InFloat8.apply(x, m.weight, m.bias)  # type: ignore[method-assign, misc]
    return model
