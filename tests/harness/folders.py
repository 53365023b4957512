"""Tiny models with a byte tokenizer in folders, as recipes and scripts load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.harness.models import tiny_model

END = "<end>"
BYTES = 260
"""A vocabulary for :func:`byte_tokenizer`: 256 bytes, the end token, and some rows that no text uses."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def save_tiny_model(folder: Path, model_type: str, **settings: Any) -> Path:
    """A seeded model of :mod:`tests.harness.models` and its tokenizer; returns the folder.

    Args:
        settings: config values that replace those of the harness.
    """
    tokenizer = byte_tokenizer()
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    tiny_model(model_type, **{"vocab_size": BYTES, **ids, **settings}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
