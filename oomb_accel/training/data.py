"""The data of a recipe."""

from __future__ import annotations

from typing import Any

from oomb_accel.data.documents import Document, check_vocabulary, collate, last_tokens_batch, within_vocabulary
from oomb_accel.data.load import load
from oomb_accel.data.settings import DataSettings
from oomb_accel.data.store import Corpus
from oomb_accel.training.recipe import Recipe

__all__ = [
    "Corpus",
    "Document",
    "check_vocabulary",
    "collate",
    "data_settings",
    "last_tokens_batch",
    "load_corpus",
    "within_vocabulary",
]


def data_settings(recipe: Recipe) -> DataSettings:
    """What a recipe says about its data."""
    return DataSettings(
        paths=(recipe.data_path,) if isinstance(recipe.data_path, str) else tuple(recipe.data_path),
        text_field=recipe.text_field,
        split=recipe.data_split,
        folder_as=recipe.folder_as,
        include=tuple(recipe.data_include or ()),
        exclude=tuple(recipe.data_exclude or ()),
        train_on=recipe.train_on,
        max_length=recipe.max_length,
        truncation=recipe.truncation,
        packing=recipe.packing,
        cache=recipe.data_cache,
    )


def load_corpus(recipe: Recipe, tokenizer: Any) -> Corpus:
    """Read, tokenise, cut and pack the data of a recipe. Safe to call on all ranks at once: one of each machine
    tokenises, the others wait for it.

    Raises:
        ValueError: nothing to read, a row that is not understood, no targets at all, a document that is too long, or
            a cache that cannot be written.
        RuntimeError: tokenising was killed, or takes another process too long.
    """
    return load(data_settings(recipe), tokenizer)
