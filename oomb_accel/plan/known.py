"""Sizes of models that people train most, so that an estimate needs neither network nor download."""

from __future__ import annotations

from typing import Any


def _sizes(
    model_type: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    positions: int,
    *,
    tied: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """As in the model's config.json."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        **others,
    }


_SELECTED_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}

KNOWN: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _sizes("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, tied=True),
    "qwen2.5-1.5b": _sizes("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, tied=True),
    "qwen2.5-3b": _sizes("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, tied=True),
    "qwen2.5-7b": _sizes("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    "qwen2.5-7b-instruct-1m": _sizes("qwen2", 3584, 18944, 28, 28, 4, 152064, 1010000),
    "qwen2.5-14b": _sizes("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072),
    "qwen2.5-32b": _sizes("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    "qwen2.5-72b": _sizes("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072),
    "qwen3-0.6b": _sizes("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, tied=True, head_dim=128),
    "qwen3-1.7b": _sizes("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, tied=True, head_dim=128),
    "qwen3-4b": _sizes("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, tied=True, head_dim=128),
    "qwen3-8b": _sizes("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "qwen3-14b": _sizes("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, head_dim=128),
    "qwen3-32b": _sizes("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128),
    "qwen3-30b-a3b": _sizes("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, head_dim=128, **_SELECTED_EXPERTS),
    "llama-3.1-8b": _sizes("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "llama-3.1-70b": _sizes("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "llama-3.2-1b": _sizes("llama", 2048, 8192, 16, 32, 8, 128256, 131072, tied=True, head_dim=64),
    "llama-3.2-3b": _sizes("llama", 3072, 8192, 28, 24, 8, 128256, 131072, tied=True, head_dim=128),
    "llama-3.3-70b": _sizes("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "mistral-7b-v0.3": _sizes("mistral", 4096, 14336, 32, 32, 8, 32768, 32768),
    "mistral-nemo-instruct-2407": _sizes("mistral", 5120, 14336, 40, 32, 8, 131072, 1024000, head_dim=128),
    "phi-4": _sizes("phi3", 5120, 17920, 40, 40, 10, 100352, 16384),
    "smollm2-135m": _sizes("llama", 576, 1536, 30, 9, 3, 49152, 8192, tied=True),
}
"""Fields of config.json by the name of the model, in small letters and without its organisation."""

for _size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"):  # base models from 1.5B on, but for the 3B, say 131072
    KNOWN[f"qwen2.5-{_size}-instruct"] = KNOWN[f"qwen2.5-{_size}"] | {"max_position_embeddings": 32768}

_VARIANTS = ("-instruct", "-base", "-chat", "-hf", "-2507")


def known_name(name: str) -> str:
    """The name under which a model would be in `KNOWN`: fine-tuned variants have the sizes of their base, where they
    are not there themselves."""
    key = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    changed = key not in KNOWN
    while changed:
        changed = False
        for variant in _VARIANTS:
            if key.endswith(variant):
                key, changed = key.removesuffix(variant), True
    return key
