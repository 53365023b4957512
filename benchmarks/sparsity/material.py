"""The study's models: SmolLM2-135M-Instruct out of the parts that `pack` wrote, or a tiny random one.

Weights are in fp32 and on the CPU; whoever trains or evaluates moves a copy.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

Q4_1, Q8_0 = "Q4_1", "Q8_0"
BLOCK = 32
"""Weights of a quantised block."""
TINY = "tiny"
Encode = Callable[[Sequence[str]], list[NDArray[np.int32]]]


@dataclass(frozen=True, slots=True)
class Material:
    """A model and its tokenizer."""

    name: str
    digest: str
    """Of the packed file: which weights these are."""
    config: LlamaConfig
    state: dict[str, Tensor]
    encode: Encode
    """Texts to token ids, without special tokens."""


def part_name(part: int) -> str:
    return f"smol.part{part}"


def load_material(source: str) -> Material:
    """The model of a folder with parts, or of ``"tiny"``.

    Raises:
        ValueError: a part is missing.
    """
    if source == TINY:
        return _tiny()
    parts = sorted(Path(source).glob(part_name(0)[:-1] + "*"))
    data = b"".join(part.read_bytes() for part in parts)
    try:
        arrays = np.load(io.BytesIO(data))
    except (ValueError, OSError, EOFError) as error:
        found = ", ".join(part.name for part in parts) or "nothing"
        raise ValueError(
            f"The parts in {source} do not make a model.\n  Found: {found}.\n"
            "  Write them with python -m benchmarks.sparsity.pack FOLDER, and copy all of them."
        ) from error
    settings = json.loads(arrays["config"].tobytes())
    theta = settings.pop("rope_theta")
    config = LlamaConfig(**settings, rope_parameters={"rope_type": "default", "rope_theta": theta})
    state = {}
    for key in arrays.files:
        kind, _, name = key.partition(":")
        if name:
            state[name] = torch.from_numpy(dequantise(arrays[key], kind))
    tokenizer = Tokenizer.from_str(arrays["tokenizer"].tobytes().decode())

    def encode(texts: Sequence[str]) -> list[NDArray[np.int32]]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    return Material("SmolLM2-135M-Instruct", hashlib.sha256(data).hexdigest()[:16], config, state, encode)


def dequantise(raw: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """fp32 weights of a tensor's rows.

    Args:
        raw: uint8 ``[rows, blocks * bytes]``, or the fp32 weights themselves. A Q4_1 block is a scale and a minimum in
            fp16, then 16 bytes: low halves are the first 16 weights, high halves the last. A Q8_0 block is a scale in
            fp16 and 32 signed bytes.
        kind: ``Q4_1``, ``Q8_0`` or ``F32``.
    """
    if kind == "F32":
        return raw.astype(np.float32)
    head = 4 if kind == Q4_1 else 2
    width = head + (BLOCK // 2 if kind == Q4_1 else BLOCK)
    blocks = raw.reshape(raw.shape[0], -1, width)
    scales = np.ascontiguousarray(blocks[..., :head]).view(np.float16).astype(np.float32)
    if kind == Q8_0:
        weights = scales * np.ascontiguousarray(blocks[..., head:]).view(np.int8)
    else:
        nibbles = blocks[..., head:]
        numbers = np.concatenate([nibbles & 15, nibbles >> 4], -1)
        weights = scales[..., :1] * numbers + scales[..., 1:]
    return weights.astype(np.float32).reshape(raw.shape[0], -1)


def build_model(material: Material, *, rope_factor: float = 1.0) -> LlamaForCausalLM:
    """A new model with these weights, in training mode, all parameters trainable.

    Args:
        rope_factor: YaRN scaling of the positions; 1 leaves RoPE as it is.
    """
    config = LlamaConfig.from_dict(material.config.to_dict())
    if rope_factor != 1.0:
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": config.to_dict()["rope_parameters"]["rope_theta"],
            "factor": rope_factor,
            "original_max_position_embeddings": material.config.max_position_embeddings,
        }
    config.use_cache = False
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    missing, unexpected = model.load_state_dict(material.state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.train()


def _tiny() -> Material:
    """Random weights and a tokenizer of bytes: for tests."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with torch.no_grad():  # large enough that attention is far from uniform
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(4)

    def encode(texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    return Material(TINY, "", config, dict(model.state_dict()), encode)
