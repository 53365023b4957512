"""The least time that the arithmetic of a step can take: nothing runs much faster."""

from __future__ import annotations

from typing import Any

from oomb_accel import OombConfig

FLOPS_PER_SECOND = 700e12
"""Matrix products and attention alike, bf16 on an H200; about 790e12 were measured for large plain products."""
FLOAT8 = 2.0
"""How much faster products of 8-bit floats can be."""
ATTENTION_BACKWARD = 2.5
"""Attention's backward over its forward: five matrix products instead of two."""


def floor_seconds(
    shape: dict[str, Any], tokens: int, chunk_tokens: int, side: str, selected_tokens: int | None = None
) -> float:
    """Floor of one step: forward, recompute and input gradients; with LoRA the adapters themselves are not counted.

    Args:
        shape: sizes of the model, as in its config.
        side: ``peer...`` recomputes everything; ``oomb`` all but the last chunk, and not attention where outputs
            are kept (sides without ``no-kept`` in their name are counted as if all were). ``full`` adds the gradients
            of all weights, ``float8`` has base weights in 8 bits.
        selected_tokens: with sparse attention, the earlier tokens that a token attends to beyond its own chunk.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    head_dim = hidden // shape["num_attention_heads"]
    kv = shape["num_key_value_heads"] * head_dim
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * shape["intermediate_size"])
    if "float8" in side:
        weights /= FLOAT8
    weights += shape["vocab_size"] * hidden
    linear = 2 * weights * tokens
    last = min(chunk_tokens, tokens)
    if selected_tokens is None:
        attention = 2 * hidden * layers * tokens**2  # causal: half of four times
        repeated_attention = ((tokens - last) / tokens) ** 2
    else:
        attention = 4 * hidden * layers * tokens * (last / 2 + selected_tokens)
        repeated_attention = 1 - last / tokens
    if side.startswith("peer"):
        repeated, attended_again = 1.0, 1.0
    else:
        repeated = 1 - last / tokens
        attended_again = repeated_attention if "no-kept" in side else 0.0
    weight_gradients = 1.0 if "full" in side else 0.0
    flops = linear * (2 + repeated + weight_gradients) + attention * (1 + ATTENTION_BACKWARD + attended_again)
    return flops / FLOPS_PER_SECOND


def selected_tokens(settings: OombConfig) -> int | None:
    """The earlier tokens that a token attends to beyond its own chunk; None where attention is dense."""
    if settings.attention == "dense":
        return None
    return (settings.top_k + settings.sink_pages + settings.recent_pages) * settings.page_tokens
