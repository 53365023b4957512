"""A tiny random Llama with a byte tokenizer in a folder, and recipes that use it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"
TEXT = "the quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(autouse=True)
def fresh_accelerate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps device and precision for the whole process; each test starts without, on the CPU."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # logits large enough that adapters in front of a random head can learn
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    """Settings of a small run over :data:`TEXT`."""
    data = tmp_path / "text.txt"
    data.write_text(TEXT)
    return {
        "model_name_or_path": str(model_folder),
        "data_path": str(data),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 3,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "lora_r": 4,
        "oomb": {"chunk_tokens": 64, "page_tokens": 16},
    }


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(values: dict[str, Any]) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write
