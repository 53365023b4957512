"""Which LoRA layers of a model belong together, and which end a block: by what transformers calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peft.tuners.lora import layer as lora
from torch import nn

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What transformers calls layers of one module that read the same input. Whether they do is looked at in each call."""
_ENDS = ("down_proj", "o_proj")
"""What it calls the last layers of an MLP and of attention: an output costs the same room, and the first took more to
compute."""


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


def block_ends(decoder_layers: Iterable[nn.Module]) -> tuple[tuple[Any, ...], ...]:
    """The LoRA layers that end the MLPs of all decoder layers, and those that end attention, where there is one of the
    kind: of all products their outputs are the smallest for what they take to compute."""

    def end_of(decoder_layer: nn.Module, end: str) -> list[Any]:
        found = [module for name, module in decoder_layer.named_modules() if name.rpartition(".")[2] == end]
        return found if len(found) == 1 and type(found[0]) is lora.Linear else []  # experts have many

    layers = tuple(decoder_layers)
    return tuple(tuple(found for layer in layers for found in end_of(layer, end)) for end in _ENDS)
