"""From names on the command line to a model and documents that can be evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from oomb_accel.config import OombConfig
from oomb_accel.evaluation.adapter import put_on
from oomb_accel.evaluation.scoring import Subject
from oomb_accel.evaluation.windows import Text
from oomb_accel.integrations.rope import describe_rope, trained_tokens
from oomb_accel.integrations.support import base_model_of, refusals
from oomb_accel.reading import refusal
from oomb_accel.training.data import Document, check_vocabulary, load_corpus
from oomb_accel.training.model import load_model, load_tokenizer
from oomb_accel.training.recipe import Recipe


def load_texts(
    model: str,
    paths: Sequence[str],
    tokenizer: Any,
    *,
    text_field: str = "text",
    folder_as: Literal["auto", "document", "files"] = "auto",
) -> tuple[list[Text], list[str]]:
    """The documents of all paths, in order, and what is to be known about them: a folder may be one document.

    Raises:
        ValueError: as `load_corpus`.
    """
    found: list[Text] = []
    notes: list[str] = []
    for path in paths:
        recipe = Recipe(
            model_name_or_path=model, data_path=path, output_dir="unused", text_field=text_field, folder_as=folder_as
        )
        corpus = load_corpus(recipe, tokenizer)
        notes += corpus.notes
        for document in corpus.documents:
            ids = document.input_ids
            if len(ids) > 1 and int(ids[-1]) == tokenizer.eos_token_id:
                ids = ids[:-1]
            starts = tokenizer.bos_token_id is not None and int(ids[0]) == tokenizer.bos_token_id
            found.append(Text(document.name, ids, starts))
    return found, list(dict.fromkeys(notes))


def tokenizer_of(model: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a model."""
    return load_tokenizer(recipe_of(model, trust_remote_code=trust_remote_code))


def load_subject(
    model: str,
    adapter: Path | None,
    tokenizer: Any,
    config: OombConfig,
    *,
    rope_parameters: dict[str, Any] | None,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool = False,
) -> Subject:
    """A model on a device, with its adapter.

    Args:
        dtype: of the weights; None leaves that of the checkpoint.
        trust_remote_code: run the code that comes with the model.

    Raises:
        ValueError: no such model, one that is not supported, or an adapter that does not belong to it.
    """
    base = load_model(recipe_of(model, rope_parameters, dtype, trust_remote_code=trust_remote_code))
    assert isinstance(base, PreTrainedModel)
    if reasons := refusals(base, base_model_of(base)):
        raise ValueError(refusal("This model is not supported", reasons))
    whole: nn.Module = base if adapter is None else put_on(base, adapter)
    if dtype == torch.float64:  # loaded in fp32, which casts RoPE's frequencies to nothing coarser
        whole = whole.to(dtype)
    return Subject(whole.to(device), tokenizer, config, adapter is not None)


def check_texts(subject: Subject, texts: Sequence[Text], longest_pass: int, questions: int) -> None:
    """Refuse token ids that the model does not know, and passes beyond the range of its positions.

    Args:
        longest_pass: tokens of the longest call that is to come.
        questions: so many of them stand behind the document.

    Raises:
        ValueError: with what would work.
    """
    config = base_model_of(subject.model).config.get_text_config()
    check_vocabulary([Document(text.name, text.ids, text.ids) for text in texts], config.vocab_size)
    limit = trained_tokens(config)
    if limit and longest_pass > limit and subject.config.beyond_trained_length == "error":
        raise ValueError(
            "A document is longer than the range of positions that the model was trained or scaled for.\n"
            f"  {longest_pass:,} tokens, {questions:,} of them questions; model: {describe_rope(config)}.\n"
            f"  Use --tokens {max(2, limit - questions)}, or scale its RoPE: "
            f"--rope_parameters '{{rope_type: yarn, factor: {-(-longest_pass // limit)}.0}}'"
        )


def recipe_of(
    model: str,
    rope_parameters: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
) -> Recipe:
    """A recipe that says no more than how a model is loaded.

    Args:
        dtype: of its weights; None is that of its files.
    """
    names = {None: "auto", torch.bfloat16: "bfloat16"}
    return Recipe(
        model_name_or_path=model,
        data_path="unused",
        output_dir="unused",
        rope_parameters=rope_parameters,
        trust_remote_code=trust_remote_code,
        torch_dtype=names.get(dtype, "float32"),  # type: ignore[arg-type]
    )
