"""LoRA's share of a linear layer, added within its matrix products.

PEFT computes ``base(x) + lora_B(lora_A(x)) * scaling`` one operation after another, and autograd its gradients. Beside
the products that is six reads and writes of the output, and four of the input, for nothing but sums. Here products add
to what is there, in their own fp32: ``y += s (x A^T) B^T``, ``dx += s (dy B) A``. Sums are rounded once instead of two
or three times.

Layers that read the same input (q, k and v; gate and up) share more. The first that is called multiplies x by the A of
all of them; the others find their part when they come. In the graph they are a chain: each hands x on to the next, so
each adds its ``dy W`` to the ``dx`` of the next, and the first adds LoRA's share for all. Nothing is computed before it
is asked for but ``x A^T``, which is small: a layer that is called otherwise than its name suggests costs that product,
and nothing else.

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
from torch.nn.functional import linear

from oomb_accel.integrations.float8_base import (
    Float8Weight,
    autocast_dtype,
    base_input_gradient,
    base_product,
    float8_of,
)

_PEFT_FORWARD = lora.Linear.forward
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What transformers calls layers of one module that read the same input. Whether they do is looked at in each call."""


def lora_siblings(modules: Iterable[nn.Module]) -> tuple[tuple[Any, ...], ...]:
    """Groups of LoRA layers that should be called with the same input, by their names within each of these modules."""
    groups = []
    for module in modules:
        for names in _SIBLINGS:
            found = (getattr(module, name, None) for name in names)
            group = tuple(layer for layer in found if type(layer) is lora.Linear)
            if len(group) > 1:
                groups.append(group)
    return tuple(groups)


def fused_lora(
    layers: Iterable[Any], siblings: Iterable[Sequence[Any]] = ()
) -> Callable[[], AbstractContextManager[None]]:
    """What to enter around the passes of one step: inside, these layers of PEFT run fused where they can.

    What a layer consists of is looked at once, at its first call. Weights do not change within a step.

    Args:
        siblings: groups of layers that share work when they are called with the same tensor, see `lora_siblings`.
    """
    if lora.Linear.forward is not _PEFT_FORWARD:  # somebody has another idea of it
        layers = ()
    plain = [layer for layer in layers if type(layer) is lora.Linear]
    calls = _Calls({layer: group for group in siblings for layer in group})
    forwards = {layer: partial(calls.forward, layer) for layer in plain}

    @contextmanager
    def active() -> Iterator[None]:
        fused = [layer for layer in plain if "forward" not in vars(layer)]
        for layer in fused:  # past nn.Module's __setattr__ and __delattr__: there are some 200 of them, in every pass
            vars(layer)["forward"] = forwards[layer]
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

    parts: _Parts
    others: dict[Any, _Parts]
    all_a: tuple[Tensor, ...]
    """A of all of them, of the layer first: parameters."""
    a_SI: Tensor
    """Copies of them, one below the other."""
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Shared:
    """What the first layer called with an input has left for its siblings."""

    source: Tensor
    """The input as the caller has it."""
    state: tuple[Any, ...] | None
    """Of the input and of torch's modes, when it was read."""
    x: Tensor
    """The same values; its gradient goes to the layer that was called last."""
    waiting: dict[Any, tuple[_Parts, Tensor]]
    """Parts of each layer that has not come yet, and its ``x A^T``."""


class _Calls:
    """The calls of the layers of one `fused_lora`.

    Args:
        siblings: by layer, its group, with itself.
    """

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
        if shared is not None and layer in shared.waiting and shared.source is x and shared.state == state:
            return self._next(layer, shared)
        group = self._group(layer, dtype, autocast, alone=state is None or x.shape[-1] != layer.in_features)
        if group is None:
            return lora.Linear.forward(layer, x)
        parts, others = group.parts, group.others
        if torch.is_grad_enabled():
            out, *left = _FusedLinear.apply(x, parts.weight_OI, parts.b_OR, dtype, group, *group.all_a)
        else:
            (out, *left), _ = _first_outputs(_in(dtype, x), _in(dtype, parts.weight_OI), group)
        self._shared = None
        if others:
            passed_on, *xas = left
            waiting = {sibling: (its, xa) for (sibling, its), xa in zip(others.items(), xas, strict=True)}
            self._shared = _Shared(x, state, passed_on, waiting)
        return out

    def forget(self) -> None:
        """The pass is over."""
        self._shared = None

    def _next(self, layer: Any, shared: _Shared) -> Tensor:
        parts, xa = shared.waiting.pop(layer)
        if torch.is_grad_enabled():
            out, shared.x = _NextFusedLinear.apply(shared.x, xa, parts.weight_OI, parts.b_OR, parts)
        else:
            x = shared.x
            out = _output(x, _rows(x), xa, _in(x.dtype, parts.weight_OI), parts)
        if not shared.waiting:
            self._shared = None
        return out

    def _group(self, layer: Any, dtype: torch.dtype, autocast: bool, *, alone: bool) -> _Group | None:
        """None where PEFT has to run the layer."""
        key = layer, dtype, autocast, alone
        if key not in self._groups:
            self._groups[key] = self._make_group(layer, dtype, autocast, alone)
        return self._groups[key]

    def _make_group(self, layer: Any, dtype: torch.dtype, autocast: bool, alone: bool) -> _Group | None:
        parts = _parts(layer, dtype, autocast)
        if parts is None:
            return None
        others = {}
        for sibling in () if alone else self._siblings.get(layer, ()):
            its = _parts(sibling, dtype, autocast) if sibling is not layer else None
            if its is not None and its.a_RI.shape[1] == parts.a_RI.shape[1] and its.a_RI.device == parts.a_RI.device:
                others[sibling] = its
        all_a = (parts.a_RI, *(its.a_RI for its in others.values()))
        a_SI = _copied(dtype, torch.cat([a_RI.detach() for a_RI in all_a]) if others else parts.a_RI)
        return _Group(parts, others, all_a, a_SI, tuple(len(a_RI) for a_RI in all_a))


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
    if not all(_is_plain(part) for part in (base, a, b)) or a.bias is not None or b.bias is not None:
        return None
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return None
    drops = not isinstance(dropout, nn.Identity) and (layer.training or not isinstance(dropout, nn.Dropout))
    return None if drops else name


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer that nobody watches, as ZeRO 3 does that gathers module by module, with a weight
    that is no more than a tensor."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    changed = "forward" in vars(module) and float8_of(module) is None
    if type(module) is not nn.Linear or any(hooks) or changed:
        return False
    return type(module.weight) is nn.Parameter  # looked at last: where ZeRO 3 watches, looking gathers it


class _FusedLinear(torch.autograd.Function):
    """A layer, and ``x A^T`` of layers that will be called with the same x. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor | None, b_OR: Tensor, dtype: torch.dtype, group: _Group, *all_a: Tensor
    ) -> tuple[Tensor, ...]:
        """
        Args:
            dtype: what is computed in; others are cast.
            b_OR, all_a: parameters, for their gradients: of this layer, then A of the others.

        Returns:
            The output; where there are others x for the next layer, and ``x A^T`` of each.
        """
        x, weight_OI = _in(dtype, x), _in(dtype, weight_OI)
        outputs, xa = _first_outputs(x, weight_OI, group)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, xa, weight_OI)
        ctx.group = group
        need_x, _, need_b, _, _, *need_as = ctx.needs_input_grad
        if not need_x:
            depends = (need_as[0] or need_b, False, *need_as[1:])
            ctx.mark_non_differentiable(*(one for one, does in zip(outputs, depends, strict=False) if not does))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dout: Tensor | None, dx: Tensor | None = None, *other_dxas: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, xa, weight_OI = ctx.saved_tensors
        a_SI, ranks = ctx.group.a_SI, ctx.group.ranks
        need_x, _, need_b, _, _, *need_as = ctx.needs_input_grad
        needed = (need_x, need_x or need_as[0], need_b)
        dx, dxa, db_OR = _gradients(dout, dx, xa, weight_OI, ctx.group.parts, needed, x.shape)
        das: list[Tensor | None] = [None] * len(ranks)
        # Those that had a part in the result; the A of a layer that had none has no gradient.
        parts = {place: one for place, one in enumerate((dxa, *other_dxas)) if one is not None}
        if parts:
            dxa_TS = torch.cat(list(parts.values()), dim=1) if len(parts) > 1 else next(iter(parts.values()))
            if dx is not None:
                if len(parts) < len(ranks):
                    all_a = a_SI.split(list(ranks))
                    a_SI = torch.cat([all_a[place] for place in parts])
                dx.view(-1, dx.shape[-1]).addmm_(dxa_TS, a_SI)
            if any(need_as):
                da_SI = dxa_TS.t() @ _rows(x)
                for place, da_RI in zip(parts, _split(da_SI, [ranks[place] for place in parts], dim=0), strict=True):
                    das[place] = da_RI
        return dx, None, db_OR, None, None, *das


class _NextFusedLinear(torch.autograd.Function):
    """A layer whose x and ``x A^T`` are those of the layer before. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, xa: Tensor, weight_OI: Tensor | None, b_OR: Tensor, parts: _Parts
    ) -> tuple[Tensor, Tensor]:
        """Returns the output; x for the next layer. ``b_OR`` is the parameter, for its gradient."""
        weight_OI = _in(x.dtype, weight_OI)
        out = _output(x, _rows(x), xa, weight_OI, parts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(xa, weight_OI)
        ctx.parts, ctx.shape = parts, x.shape
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(x)
        return out, x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        xa, weight_OI = ctx.saved_tensors
        need_x, need_xa, _, need_b, _ = ctx.needs_input_grad
        dx, dxa, db_OR = _gradients(dout, dx, xa, weight_OI, ctx.parts, (need_x, need_xa, need_b), ctx.shape)
        return dx, dxa, None, db_OR, None


def _first_outputs(x: Tensor, weight_OI: Tensor | None, group: _Group) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `_FusedLinear` returns, and the layer's own ``x A^T``."""
    rows_TI = _rows(x)
    xa, *other_xas = _split(linear(rows_TI, group.a_SI), group.ranks, dim=1)
    out = _output(x, rows_TI, xa, weight_OI, group.parts)
    return (out, x, *other_xas) if other_xas else (out,), xa


def _output(x: Tensor, rows_TI: Tensor, xa: Tensor, weight_OI: Tensor | None, parts: _Parts) -> Tensor:
    """``x W^T + bias + scale xa B^T``."""
    num_outputs = parts.b_OR.shape[0]
    out = x.new_empty(*x.shape[:-1], num_outputs)  # no view, which nobody could change in place
    flat = out.view(-1, num_outputs)
    base_product(x, rows_TI, weight_OI, parts.bias_O, flat, parts.float8)
    flat.addmm_(xa, parts.copied_b_RO, alpha=parts.scale)
    return out


def _gradients(
    dout: Tensor | None,
    dx: Tensor | None,
    xa: Tensor,
    weight_OI: Tensor | None,
    parts: _Parts,
    needed: tuple[bool, bool, bool],
    shape: torch.Size,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x through the weight, added to what the layers behind have made; of ``x A^T``; of B.

    Args:
        dout: None where the output had no part in the result.
        dx: of layers behind, nobody else's; None where there are none.
        needed: which of the results.
        shape: of x.
    """
    if dout is None:
        return dx, None, None
    need_x, need_xa, need_b = needed
    dy_TO = _rows(dout)
    if need_x:
        so_far_TI = None if dx is None else dx.view(-1, shape[-1])
        dx = base_input_gradient(dy_TO, weight_OI, parts.float8, add_to=so_far_TI).view(shape)
    dxa = _scaled_product(dy_TO, parts.copied_b_OR, parts) if need_xa else None
    return dx, dxa, _scaled_product(dy_TO.t(), xa, parts) if need_b else None


def _scaled_product(left: Tensor, right: Tensor, parts: _Parts) -> Tensor:
    """``scale left right``, scaled by the product itself."""
    return torch.addmm(parts.unread, left, right, beta=0, alpha=parts.scale)


def _rows(x: Tensor) -> Tensor:
    """``[T, I]`` of ``[..., I]``."""
    return x.reshape(-1, x.shape[-1])


def _split(matrix: Tensor, sizes: Sequence[int], *, dim: int) -> Sequence[Tensor]:
    return torch.split_with_sizes(matrix, sizes, dim) if len(sizes) > 1 else (matrix,)
