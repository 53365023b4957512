"""The sizes of a model, from the fields of its config: no weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oomb_accel.reading import shown

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OTHER_NUMBERS = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size")
_FOUR_NORMS = frozenset({"gemma2", "gemma3_text"})
"""Model types with a norm before and behind each of attention and MLP."""
_HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
"""Model types that normalise each query and key head."""
_TIED = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Model types whose head is their embedding unless the config says otherwise."""
_ALWAYS_BIASED = frozenset({"qwen2"})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the estimates know of a model."""

    name: str
    model_type: str
    hidden: int
    intermediate: int
    """Of the MLP, or of one expert where there are experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Whether the head has the weights of the embedding."""
    windows: tuple[int | None, ...]
    """Sliding window in tokens of each layer; None where the layer attends to everything."""
    num_experts: int = 0
    """0 where the MLP is one block."""
    experts_per_token: int = 0
    biased: bool = False
    """Whether queries, keys and values have a bias."""
    trained_tokens: int | None = None
    """The range that the positions are made for, as far as the config says."""
    stored_dtype: str | None = None
    """Of the weights in the model's files, as far as the config says."""

    @property
    def linears(self) -> tuple[tuple[int, int, int], ...]:
        """Inputs, outputs and number of the linear maps of one layer."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        experts = max(1, self.num_experts)
        mlp = ((self.hidden, self.intermediate, 2 * experts), (self.intermediate, self.hidden, experts))
        router = ((self.hidden, self.num_experts, 1),) if self.num_experts else ()
        return (
            (self.hidden, queries, 1),
            (self.hidden, keys, 2),
            (queries, self.hidden, 1),
            *mlp,
            *router,
        )

    @property
    def layer_weights(self) -> int:
        """Numbers in the linear maps of one layer."""
        return sum(inputs * outputs * count for inputs, outputs, count in self.linears)

    @property
    def active_layer_weights(self) -> int:
        """Of these, the ones that one token is multiplied with."""
        idle = max(0, self.num_experts - self.experts_per_token)
        return self.layer_weights - idle * 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        """All of them, as transformers counts."""
        keys = self.num_kv_heads * self.head_dim
        queries = self.num_heads * self.head_dim
        norms = self.hidden * (4 if self.model_type in _FOUR_NORMS else 2)
        if self.model_type in _HEAD_NORMS:
            norms += 2 * self.head_dim
        if self.model_type == "olmo2":
            norms += queries + keys
        biases = queries + 2 * keys if self.biased else 0
        if self.biased and self.model_type not in _ALWAYS_BIASED:
            biases += self.hidden
        embeddings = self.head_weights * (1 if self.tied else 2)
        return self.num_layers * (self.layer_weights + norms + biases) + embeddings + self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer but the head."""
        widths = sum((inputs + outputs) * count for inputs, outputs, count in self._linear_layers)
        return self.num_layers * rank * widths

    @property
    def linear_layer_weights(self) -> int:
        """Numbers in all linear layers but the head."""
        return self.num_layers * sum(inputs * outputs * count for inputs, outputs, count in self._linear_layers)

    @property
    def _linear_layers(self) -> tuple[tuple[int, int, int], ...]:
        """Of the linear maps, those that are layers of their own: transformers stores experts as one tensor."""
        return self.linears[:3] if self.num_experts else self.linears


def _check_numbers(fields: Mapping[str, Any], name: str) -> None:
    for field in (*_REQUIRED, *_OTHER_NUMBERS):
        value = fields.get(field)
        if value is not None and not (type(value) is int and value >= 0):
            raise ValueError(
                f"The config of {name} holds a size that is no whole number.\n  Got {field}={shown(value)}.\n"
                "  Pass the config.json of a model, as it was published."
            )


def shape_of(fields: Mapping[str, Any], name: str, rope_parameters: Mapping[str, Any] | None = None) -> ModelShape:
    """Read the sizes from the fields of a config.json, or of a config object as a mapping.

    Args:
        name: for messages and reports.
        rope_parameters: over those of the config.

    Raises:
        ValueError: sizes are missing.
    """
    whole, fields = fields, _text_fields(fields)
    model_type = str(fields.get("model_type", "unknown"))
    missing = [field for field in _REQUIRED if not fields.get(field)]
    intermediate = fields.get("moe_intermediate_size") or fields.get("intermediate_size")
    if not intermediate:
        missing.append("intermediate_size")
    if missing or not intermediate:
        raise ValueError(
            f"The config of {name} does not say how large the model is.\n"
            f"  It has no {', '.join(missing)} (model_type {model_type!r}).\n"
            "  Pass a causal language model's config.json with these fields."
        )
    _check_numbers(fields, name)
    heads, layers = int(fields["num_attention_heads"]), int(fields["num_hidden_layers"])
    experts = int(fields.get("num_experts") or fields.get("num_local_experts") or 0)
    return ModelShape(
        name=name,
        model_type=model_type,
        hidden=int(fields["hidden_size"]),
        intermediate=int(intermediate),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or int(fields["hidden_size"]) // heads),
        vocabulary=int(fields["vocab_size"]),
        tied=bool(fields.get("tie_word_embeddings", model_type in _TIED)),
        windows=_windows(fields, model_type, layers),
        num_experts=experts,
        experts_per_token=int(fields.get("num_experts_per_tok") or 0) if experts else 0,
        biased=model_type in _ALWAYS_BIASED or bool(fields.get("attention_bias")),
        trained_tokens=_trained_tokens(fields, rope_parameters or {}),
        stored_dtype=_stored_dtype(whole) or _stored_dtype(fields),
    )


def _stored_dtype(fields: Mapping[str, Any]) -> str | None:
    named = fields.get("dtype") or fields.get("torch_dtype")
    return None if named is None else str(named).removeprefix("torch.")


def _text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of the language model, where the config is of a model with other parts as well."""
    inner = fields.get("text_config")
    return inner if isinstance(inner, Mapping) and "hidden_size" not in fields else fields


def _windows(fields: Mapping[str, Any], model_type: str, layers: int) -> tuple[int | None, ...]:
    """As transformers resolves them, also for files from before ``layer_types``."""
    window = fields.get("sliding_window")
    kinds = fields.get("layer_types")
    if window is None or fields.get("use_sliding_window") is False:
        return (None,) * layers
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    if model_type in ("qwen2", "qwen3", "qwen3_moe"):
        first = int(fields.get("max_window_layers", 0)) if fields.get("use_sliding_window") else layers
        return tuple(int(window) if layer >= first else None for layer in range(layers))
    if model_type in _FOUR_NORMS:
        every = int(fields.get("sliding_window_pattern") or (2 if model_type == "gemma2" else 6))
        return tuple(int(window) if (layer + 1) % every else None for layer in range(layers))
    return (int(window),) * layers


def _trained_tokens(fields: Mapping[str, Any], override: Mapping[str, Any]) -> int | None:
    positions = fields.get("max_position_embeddings")
    rope = {**(fields.get("rope_parameters") or fields.get("rope_scaling") or {}), **override}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if positions and factor and original:
        return max(int(positions), int(factor * original))
    return int(positions) if positions else None
