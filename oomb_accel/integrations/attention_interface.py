"""Chunk attention behind transformers' AttentionInterface.

A model that is switched on carries an implementation name of the form ``oomb_<original>``. A call that brings a
`ChunkPass` in its keywords goes to chunk attention; any other call (generation, plain evaluation) goes to the
original implementation, mask included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oomb_accel.attention import chunk_attention
from oomb_accel.chunk_pass import ChunkPass, LayerCall

PASS_KEYWORD = "oomb_pass"
CHUNKED: WeakSet[nn.Module] = WeakSet()
"""Attention modules of models that are switched on."""
_PREFIX = "oomb_"
_SINK_KEYWORDS = ("s_aux", "sinks", "position_bias", "score_mod")


def register(original: str) -> str:
    """Register chunk attention on top of an implementation; returns the name to set on the model."""
    name = original if original.startswith(_PREFIX) else _PREFIX + original
    if name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return name
    AttentionInterface.register(name, _with_chunks(original))
    if original in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return name


def is_registered(name: str) -> bool:
    """Whether this implementation is chunk attention."""
    return name.startswith(_PREFIX)


def original_of(name: str) -> str:
    """The implementation that a registered name stands on."""
    return name.removeprefix(_PREFIX)


def no_mask(device: torch.device) -> Tensor:
    """What a chunk passes as attention mask: a ready 4-D mask is handed through by transformers as it is, so
    none is built. It has no elements and nobody reads it."""
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def _with_chunks(original: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        run = kwargs.pop(PASS_KEYWORD, None)
        if run is None:
            if module.training and torch.is_grad_enabled() and module in CHUNKED:
                raise RuntimeError(
                    "Training would bypass the chunks: attention was called, but not by the model's chunked forward.\n"
                    "  Its forward was replaced after oomb_accel was switched on, or a part of the model was called.\n"
                    "  Call oomb_accel.enable(model, config) after the last replacement, or use OombCallback."
                )
            plain = _plain_attention(original, module)
            result: tuple[Tensor, Tensor | None] = plain(module, query, key, value, attention_mask, **kwargs)
            return result
        return _chunk_call(module, query, key, value, run, **kwargs), None

    return attention


def _plain_attention(original: str, module: nn.Module) -> Callable[..., Any]:
    if original == "eager":  # each model file has its own, which knows soft-capping and the like
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[original]


def _chunk_call(module: Any, query: Tensor, key: Tensor, value: Tensor, run: ChunkPass, **kwargs: Any) -> Tensor:
    layer = module.layer_idx
    _check_call(layer, query, key, value, run, kwargs)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = kwargs.get("scaling")
    call = LayerCall(
        layer=layer,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=kwargs.get("softcap"),
    )
    # No index: its backward would copy the gradient into zeros.
    out_HTD = chunk_attention(query.squeeze(0), key.squeeze(0), value.squeeze(0), call, run)
    return out_HTD.transpose(0, 1).unsqueeze(0)


def _check_call(layer: int, query: Tensor, key: Tensor, value: Tensor, run: ChunkPass, kwargs: dict[str, Any]) -> None:
    expected = (1, run.chunk.num_tokens)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if (tensor.shape[0], tensor.shape[2]) != expected:
            raise RuntimeError(
                f"Layer {layer} hands attention something else than its chunk.\n"
                f"  {name} has batch and tokens {(tensor.shape[0], tensor.shape[2])}, the chunk {expected}.\n"
                "  This model changes the sequence between layers; it cannot be trained in chunks."
            )
    if value.shape[-1] != query.shape[-1]:
        raise RuntimeError(
            f"Layer {layer} has values of another width than its keys.\n"
            f"  Keys {key.shape[-1]}, values {value.shape[-1]}.\n  Such attention (MLA) is not supported."
        )
    if kwargs.get("dropout"):
        raise RuntimeError(
            f"Layer {layer} asks for attention dropout {kwargs['dropout']}.\n"
            "  Attention kernels over pages have none.\n  Set config.attention_dropout = 0.0."
        )
    for name in _SINK_KEYWORDS:
        if kwargs.get(name) is not None:
            raise RuntimeError(
                f"Layer {layer} passes {name!r} to attention, which chunks do not support.\n"
                "  Its attention has a part that the kernels here do not compute.\n  Use another model."
            )
    window = kwargs.get("sliding_window")
    if window != run.windows[layer]:
        raise RuntimeError(
            f"Layer {layer} attends otherwise than its config says.\n"
            f"  Call: sliding_window={window}; config: {run.windows[layer]}.\n"
            "  Report this model: its layers are not read correctly."
        )
