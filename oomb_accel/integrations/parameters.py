"""The parameters of a model, looked up before every step: what they are may have changed since the last one."""

from __future__ import annotations

import sys

from torch import nn

ZERO3 = "deepspeed.runtime.zero.partition_parameters"
"""The module that holds parameters in parts."""


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """What ``model.parameters()`` gives, in half of its time: a model with adapters has thousands of modules, over
    which that takes milliseconds."""
    found: dict[int, nn.Parameter] = {}
    seen, ahead = set[int](), [model]
    while ahead:
        module = ahead.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
        if module._modules:
            ahead += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found.values())


def parameters_in_parts(model: nn.Module) -> list[nn.Parameter]:
    """Those that ZeRO 3 (or ``zero.Init``) holds in parts."""
    if ZERO3 not in sys.modules:  # most know without looking
        return []
    return [parameter for parameter in parameters_of(model) if hasattr(parameter, "ds_id")]


def trained_parameters(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """Those that a step gives gradients."""
    return tuple(p for p in parameters_of(model) if p.requires_grad)
