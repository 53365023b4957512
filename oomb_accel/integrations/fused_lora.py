"""LoRA's share of a linear layer, added within its matrix products.

PEFT computes ``base(x) + lora_B(lora_A(x)) * scaling`` one operation after another, and autograd its gradients. Beside
the products that is six reads and writes of the output, and four of the input, for nothing but sums. Here products add
to what is there, in their own fp32: ``y += s (x A^T) B^T``, ``dx += s (dy B) A``. Sums are rounded once instead of two
or three times.

Only where the result is PEFT's own: one active adapter of plain LoRA without dropout or biases, unmerged, on a frozen
`nn.Linear` that nobody has put a hook on. Everything else is left to PEFT, layer by layer and call by call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from oomb_accel.integrations.float8_base import Float8Weight, base_input_gradient, base_product, float8_of

_PEFT_FORWARD = lora.Linear.forward


@contextmanager
def fused_lora(layers: Iterable[Any]) -> Iterator[None]:
    """Inside, these layers of PEFT run fused where they can."""
    if lora.Linear.forward is not _PEFT_FORWARD:  # somebody has another idea of it
        layers = ()
    fused = [layer for layer in layers if type(layer) is lora.Linear and "forward" not in vars(layer)]
    for layer in fused:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in fused:
            del layer.forward


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    adapter = None if args or kwargs else _only_adapter(layer)
    if adapter is None:
        return lora.Linear.forward(layer, x, *args, **kwargs)
    base, a_RI, b_OR = layer.base_layer, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if not torch.is_autocast_enabled(kind) and not dtype == base.weight.dtype == a_RI.dtype == b_OR.dtype:
        return lora.Linear.forward(layer, x)
    bias_O = None if base.bias is None else base.bias.to(dtype)
    float8 = float8_of(base)
    weight_OI = base.weight.to(dtype) if float8 is None else None
    out: Tensor = _FusedLinear.apply(
        x.to(dtype), weight_OI, bias_O, a_RI.to(dtype), b_OR.to(dtype), float(layer.scaling[adapter]), float8
    )
    return out


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
    """Differentiable once. Legend: I inputs, O outputs, R rank."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor | None,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
        float8: Float8Weight | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        xa = rows @ a_RI.t()
        out = x.new_empty(*x.shape[:-1], len(b_OR))  # no view, which nobody could change in place
        flat = out.view(-1, len(b_OR))
        base_product(x, weight_OI, bias_O, flat, float8)
        flat.addmm_(xa, b_OR.t(), alpha=scale)
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR, xa)
        ctx.scale, ctx.float8 = scale, float8
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight_OI, a_RI, b_OR, xa = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dy = grads[0].reshape(-1, len(b_OR))
        need_x, _, _, need_a, need_b, *_ = ctx.needs_input_grad
        dxa = (dy @ b_OR).mul_(ctx.scale)
        dx = None
        if need_x:
            dx = base_input_gradient(dy, weight_OI, ctx.float8).addmm_(dxa, a_RI).view(x.shape)
        da_RI = dxa.t() @ rows if need_a else None
        db_OR = (dy.t() @ xa).mul_(ctx.scale) if need_b else None
        return dx, None, None, da_RI, db_OR, None, None
