"""LoRA's share of a linear layer, added within its matrix products.

PEFT computes ``base(x) + lora_B(lora_A(x)) * scaling`` one operation after another, and autograd its gradients. Beside
the products that is six reads and writes of the output, and four of the input, for nothing but sums. Here products add
to what is there, in their own fp32: ``y = s (x A^T) B^T``, ``y += x W^T``, and ``dx`` likewise. Sums are rounded once
or twice instead of three times. LoRA's product comes first where it can, since it computes next to nothing: the other
one's reading of what is there runs beside its arithmetic.

Layers that read the same input (q, k and v; gate and up) run together, as one node of the graph. The first that is
called computes the outputs of all of them, from one product for ``x A^T``; the others find theirs when they come. In
the backward each adds its ``dy W`` to the ``dx`` of the next, last layer first, and LoRA's share is added for all. A
layer that is called otherwise than its name suggests costs the host and the device what its siblings take, and nothing
else.

Outputs of layers that are run again in the backward sweep may be kept instead (`ChunkResults`): then their node has the
graph of the product without its arithmetic.

Only where the result is PEFT's own: one active adapter of plain LoRA without dropout or biases, unmerged, on a frozen
`nn.Linear` that nobody has put a hook on. Everything else is left to PEFT, layer by layer and call by call.

Legend: T tokens, I inputs, O outputs, R rank, S sum of the ranks of layers with a common input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from oomb_accel.integrations.float8_base import (
    Float8Weight,
    autocast_dtype,
    base_input_gradient,
    base_product,
    float8_of,
)
from oomb_accel.integrations.support import is_plain_linear
from oomb_accel.kept_results import NOTHING_KEPT, ChunkResults, Product

_PEFT_FORWARD = lora.Linear.forward


def fused_lora(
    layers: Iterable[Any], siblings: Iterable[Sequence[Any]] = ()
) -> Callable[..., AbstractContextManager[None]]:
    """What to enter around each pass of one step: inside, these layers of PEFT run fused where they can.

    What a layer consists of is looked at once, at its first call. Weights do not change within a step.

    Args:
        siblings: groups of layers that share work when they are called with the same tensor, see `lora_siblings`.

    Returns:
        Called with what is kept of the pass's chunk: outputs of the layers named there are kept from its first pass
        for the recompute.
    """
    if lora.Linear.forward is not _PEFT_FORWARD:  # somebody has another idea of it
        layers = ()
    plain = [layer for layer in layers if type(layer) is lora.Linear]
    calls = _Calls({layer: group for group in siblings for layer in group})
    forwards = {layer: partial(calls.forward, layer) for layer in plain}

    @contextmanager
    def active(results: ChunkResults = NOTHING_KEPT) -> Iterator[None]:
        fused = [layer for layer in plain if "forward" not in vars(layer)]
        for layer in fused:  # past nn.Module's __setattr__ and __delattr__: there are some 200 of them, in every pass
            vars(layer)["forward"] = forwards[layer]
        calls.results = results
        try:
            yield
        finally:
            for layer in fused:
                del vars(layer)["forward"]
            calls.forget()

    return active


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a fused layer consists of. Parameters are what gradients go to; products read copies in one dtype."""

    weight_OI: Tensor | None
    """None where there is one in 8 bits."""
    bias_O: Tensor | None
    float8: Float8Weight | None
    scale: float
    b_OR: Tensor
    a_RI: Tensor
    """Parameters."""
    copied_b_OR: Tensor
    copied_b_RO: Tensor
    """A view of it: to make one takes the host as long as a product does."""
    unread: Tensor
    """One number, for products that take something to add and are told not to."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A layer and its siblings, as they run when the layer is the first that is called with an input."""

    layers: tuple[Any, ...]
    parts: tuple[_Parts, ...]
    """Of each layer."""
    parameters: tuple[Tensor, ...]
    """B of each layer, then A of each."""
    a_SI: Tensor
    """Copies of all A, one below the other."""
    a_IS: Tensor
    """A view of them."""
    ranks: tuple[int, ...]
    wide: torch.dtype
    """Of the gradients of A: to cast them together takes less than autograd's casts one by one."""

    def weights(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Of the base layers, in a dtype; None where there is one in 8 bits."""
        return [_in(dtype, its.weight_OI) for its in self.parts]


@dataclass(slots=True)
class _Shared:
    """What the first layer called with an input has left for its siblings."""

    source: Tensor
    """The input as the caller has it."""
    state: tuple[Any, ...] | None
    """Of the input and of torch's modes, when it was read."""
    outputs: dict[Any, Tensor]
    """Of each layer that has not come yet."""


class _Calls:
    """The calls of the layers of one `fused_lora`.

    Args:
        siblings: by layer, its group, with itself.
    """

    results = NOTHING_KEPT
    """Of the chunk that is run."""

    def __init__(self, siblings: dict[Any, Sequence[Any]]) -> None:
        self._siblings = siblings
        self._shared: _Shared | None = None
        self._groups: dict[tuple[Any, ...], _Group | None] = {}

    def forward(self, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            return lora.Linear.forward(layer, x, *args, **kwargs)
        cast_to = autocast_dtype(x)
        autocast, dtype = cast_to is not None, cast_to or x.dtype
        # Tensors of inference mode do not tell of changes in place: there each call stands alone.
        state = None if x.is_inference() else (x._version, dtype, autocast, torch.is_grad_enabled())
        shared = self._shared
        if shared is not None and layer in shared.outputs and shared.source is x and shared.state == state:
            out = shared.outputs.pop(layer)
            if not shared.outputs:
                self._shared = None
            return out
        group = self._group(layer, dtype, autocast, alone=state is None or x.shape[-1] != layer.in_features)
        if group is None:
            return lora.Linear.forward(layer, x)
        keeps = len(group.layers) == 1 and self.results.keeps(layer)
        known = _taken(self.results, layer, x, dtype) if keeps else None
        made: tuple[Tensor, ...] = ()
        if torch.is_grad_enabled():
            out, *others = _FusedLinears.apply(x, dtype, group, known, *group.parameters)
        elif known is not None:
            out, others = known.out, []
        else:  # a node of the graph takes the host longer than most operations
            (out, *others), xas = _outputs(_in(dtype, x), group.weights(dtype), group)
            made = () if out.is_inference() else (out, xas[0])
        if keeps and not self.results.returns:  # each call, or the next one's would be taken for it
            self.results.put(layer, *made)
        self._shared = _Shared(x, state, dict(zip(group.layers[1:], others, strict=True))) if others else None
        return out

    def forget(self) -> None:
        """The pass is over."""
        self._shared, self.results = None, NOTHING_KEPT

    def _group(self, layer: Any, dtype: torch.dtype, autocast: bool, *, alone: bool) -> _Group | None:
        """None where PEFT has to run the layer."""
        key = layer, dtype, autocast, alone
        if key not in self._groups:
            self._groups[key] = self._make_group(layer, dtype, autocast, alone)
        return self._groups[key]

    def _make_group(self, layer: Any, dtype: torch.dtype, autocast: bool, alone: bool) -> _Group | None:
        first = _parts(layer, dtype, autocast)
        if first is None:
            return None
        found = {layer: first}
        for sibling in () if alone else self._siblings.get(layer, ()):
            its = _parts(sibling, dtype, autocast) if sibling is not layer else None
            if its is not None and its.a_RI.shape[1] == first.a_RI.shape[1] and its.a_RI.device == first.a_RI.device:
                found[sibling] = its
        parts = tuple(found.values())
        all_a = [its.a_RI for its in parts]
        a_SI = _copied(dtype, torch.cat([a_RI.detach() for a_RI in all_a]) if len(all_a) > 1 else first.a_RI)
        return _Group(
            layers=tuple(found),
            parts=parts,
            parameters=(*(its.b_OR for its in parts), *all_a),
            a_SI=a_SI,
            a_IS=a_SI.t(),
            ranks=tuple(len(a_RI) for a_RI in all_a),
            wide=torch.promote_types(dtype, first.a_RI.dtype),
        )


def _parts(layer: Any, dtype: torch.dtype, autocast: bool) -> _Parts | None:
    """Of a layer that can run fused; None where PEFT has to do it.

    Args:
        dtype: what is computed in; other weights are cast under autocast, and are PEFT's without it.
    """
    adapter = _only_adapter(layer)
    if adapter is None:
        return None
    base, a_RI, b_OR = layer.base_layer, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    if not autocast and not dtype == base.weight.dtype == a_RI.dtype == b_OR.dtype:
        return None
    float8 = float8_of(base)
    weight_OI = base.weight if float8 is None else None
    bias_O = None if base.bias is None else _in(dtype, base.bias)
    copied_b_OR = _copied(dtype, b_OR)
    unread = copied_b_OR.new_empty(())
    scale = float(layer.scaling[adapter])
    return _Parts(weight_OI, bias_O, float8, scale, b_OR, a_RI, copied_b_OR, copied_b_OR.t(), unread)


def _taken(results: ChunkResults, layer: Any, x: Tensor, dtype: torch.dtype) -> Product | None:
    """The oldest product of this layer that is kept, if it is that of such an input."""
    kept = results.take(layer)
    if not kept:  # nothing, or of a call whose product was not
        return None
    product = Product(*kept)
    fits = product.out.shape[:-1] == x.shape[:-1] and product.out.dtype == dtype
    return product if fits else None


def _in(dtype: torch.dtype, x: Any) -> Any:
    """A tensor in this dtype, without graph where that makes a copy; None is none."""
    return x if x is None or x.dtype == dtype else x.detach().to(dtype)


def _copied(dtype: torch.dtype, parameter: Tensor) -> Tensor:
    """A copy in this dtype, also where the parameter has it: what ZeRO 3 gathers lies elsewhere each time."""
    return parameter.detach().to(dtype, copy=True)


def _only_adapter(layer: Any) -> str | None:
    """The adapter that is all this layer adds; None where PEFT has to do it."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant or layer.disable_adapters or layer.merged:
        return None
    (name,) = active
    base, a, b, dropout = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if not all(is_plain_linear(part) for part in (base, a, b)) or a.bias is not None or b.bias is not None:
        return None
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return None
    drops = not isinstance(dropout, nn.Identity) and (layer.training or not isinstance(dropout, nn.Dropout))
    return None if drops else name


class _FusedLinears(torch.autograd.Function):
    """Layers that read the same x. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, group: _Group, known: Product | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """The output of each layer.

        Args:
            dtype: what is computed in; others are cast.
            known: what comes out for this x, where the group is one layer.
            parameters: of the group, for their gradients.
        """
        x, weights = _in(dtype, x), group.weights(dtype)
        if known is None:
            outs, xas = _outputs(x, weights, group)
        else:  # a tensor of its own, which may become part of the graph
            outs, xas = (known.out.detach(),), (known.xa,)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *xas, *weights)
        ctx.group = group
        need_x, _, _, _, *need = ctx.needs_input_grad
        if not need_x:
            need_bs, need_as = need[: len(outs)], need[len(outs) :]
            ctx.mark_non_differentiable(*(outs[n] for n in range(len(outs)) if not need_bs[n] and not need_as[n]))
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        group, count = ctx.group, len(douts)
        x, *saved = ctx.saved_tensors
        xas, weights = saved[:count], saved[count:]
        need_x, _, _, _, *need = ctx.needs_input_grad
        need_bs, need_as = need[:count], need[count:]
        dys = {n: _rows(dout) for n, dout in enumerate(douts) if dout is not None}  # others had no part in the result
        dx_TI: Tensor | None = None
        dbs: list[Tensor | None] = [None] * count
        das: list[Tensor | None] = [None] * count
        for n, dy_TO in dys.items():
            if need_bs[n]:
                dbs[n] = _scaled_product(dy_TO.t(), xas[n], group.parts[n])
        if dys and (need_x or any(need_as)):
            dxas = [_scaled_product(dy_TO, group.parts[n].copied_b_OR, group.parts[n]) for n, dy_TO in dys.items()]
            dxa_TS = torch.cat(dxas, dim=1) if len(dxas) > 1 else dxas[0]
            if need_x:
                dx_TI = _input_gradient(dys, dxa_TS, weights, group)
            if any(need_as):
                da_SI = (dxa_TS.t() @ _rows(x)).to(group.wide)
                for n, da_RI in zip(dys, _split(da_SI, [group.ranks[n] for n in dys], dim=0), strict=True):
                    das[n] = da_RI
        return None if dx_TI is None else dx_TI.view(x.shape), None, None, None, *dbs, *das


def _outputs(x: Tensor, weights: Sequence[Tensor | None], group: _Group) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
    """Outputs of all layers, ``x W^T + bias + scale xa B^T``; and ``xa``, the ``x A^T`` of each."""
    rows_TI = _rows(x)
    xas, outs = _split(rows_TI @ group.a_IS, group.ranks, dim=1), []
    for xa, weight_OI, parts in zip(xas, weights, group.parts, strict=True):
        num_outputs = parts.b_OR.shape[0]
        out = x.new_empty(*x.shape[:-1], num_outputs)  # no view, which nobody could change in place
        flat = out.view(-1, num_outputs)
        if weight_OI is None or parts.bias_O is not None:  # a product that adds nothing to what is there, or the bias
            base_product(x, rows_TI, weight_OI, parts.bias_O, flat, parts.float8)
            flat.addmm_(xa, parts.copied_b_RO, alpha=parts.scale)
        else:
            torch.addmm(parts.unread, xa, parts.copied_b_RO, beta=0, alpha=parts.scale, out=flat)
            flat.addmm_(rows_TI, weight_OI.t())
        outs.append(out)
    return tuple(outs), xas


def _input_gradient(dys: dict[int, Tensor], dxa_TS: Tensor, weights: Sequence[Tensor | None], group: _Group) -> Tensor:
    """``dx``, the sum of ``dy W`` and ``dxa A`` over the layers that had a part in the result, ``[T, I]``.

    Args:
        dys: by number of the layer; dxa_TS: ``scale dy B`` of these, side by side.
    """
    a_SI = group.a_SI if len(dys) == len(group.parts) else _parts_of_a(group, list(dys))
    in_float8 = any(group.parts[n].float8 is not None for n in dys)
    dx_TI = None if in_float8 else dxa_TS @ a_SI
    for n in reversed(dys):
        dx_TI = base_input_gradient(dys[n], weights[n], group.parts[n].float8, add_to=dx_TI)
    assert dx_TI is not None
    return dx_TI.addmm_(dxa_TS, a_SI) if in_float8 else dx_TI


def _parts_of_a(group: _Group, numbers: Sequence[int]) -> Tensor:
    """Copies of A of some layers."""
    all_a = _split(group.a_SI, group.ranks, dim=0)
    return torch.cat([all_a[n] for n in numbers])


def _scaled_product(left: Tensor, right: Tensor, parts: _Parts) -> Tensor:
    """``scale left right``, scaled by the product itself."""
    return torch.addmm(parts.unread, left, right, beta=0, alpha=parts.scale)


def _rows(x: Tensor) -> Tensor:
    """``[T, I]`` of ``[..., I]``."""
    return x.reshape(-1, x.shape[-1])


def _split(matrix: Tensor, sizes: Sequence[int], *, dim: int) -> Sequence[Tensor]:
    return torch.split_with_sizes(matrix, sizes, dim) if len(sizes) > 1 else (matrix,)
