"""From files to documents to batches."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oomb_accel.training.recipe import Recipe

IGNORED = -100
"""Label of a token that is no target."""

TABLE_SUFFIXES = (".json", ".csv", ".tsv", ".parquet", ".arrow")
ROW_EXAMPLE = '{"text": "..."}, {"prompt": "...", "completion": "..."}, {"messages": [...]} or {"input_ids": [...]}'


@dataclass(frozen=True, slots=True)
class Document:
    """One training sequence."""

    name: str
    """Where it came from, for messages."""
    input_ids: torch.Tensor
    """int64 ``[tokens]``."""
    labels: torch.Tensor
    """int64 ``[tokens]``: the token itself where it is a target, -100 elsewhere; not shifted."""

    @property
    def num_targets(self) -> int:
        """Targets of this document: labelled tokens, the first one excepted."""
        return int((self.labels[1:] != IGNORED).sum())

    def part(self, start: int, end: int, name: str | None = None) -> Document:
        """Tokens ``[start, end)`` as a document of their own."""
        return Document(name or self.name, self.input_ids[start:end], self.labels[start:end])


@dataclass(slots=True)
class Corpus:
    """The documents of a run, and what the user should know about how they were read."""

    documents: list[Document] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load_corpus(recipe: Recipe, tokenizer: Any) -> Corpus:
    """Read, tokenise and cut the data of a recipe.

    Args:
        recipe: its ``data_path``, ``text_field``, ``max_length`` and ``truncation`` are used.
        tokenizer: of transformers. A text goes through it in one call: fast tokenizers take linear time
            (5 MB in 4 s on one core), and cutting a text first could change tokens at the cuts.

    Raises:
        ValueError: nothing to read, a row that is not understood, no targets at all, or a document that
            is too long.
    """
    path = Path(recipe.data_path)
    corpus = Corpus()
    if path.is_dir():
        text = _read_folder(path, corpus.notes)
        found: Iterator[Document] = iter([_text_document(str(path), text, tokenizer)])
    elif not path.is_file():
        raise ValueError(
            f"There is no data at {recipe.data_path!r}.\n  Looked in {os.getcwd()}.\n"
            "  Give a text file, a .jsonl file or a folder as data_path (--text in oomb verify)."
        )
    elif path.suffix in TABLE_SUFFIXES:
        raise ValueError(
            f"{recipe.data_path!r} is a table, and data_path takes text.\n  Got a {path.suffix} file.\n"
            f"  Convert it to .jsonl with rows like {ROW_EXAMPLE}."
        )
    elif path.suffix == ".jsonl":
        found = _read_rows(path, recipe.text_field, tokenizer)
    else:
        found = iter([_text_document(str(path), _read_text(path), tokenizer)])
    for document in found:
        corpus.documents.extend(_limit(document, recipe, corpus.notes))
    _drop_untrained(corpus)
    if not corpus.documents:
        details = "".join(f"\n  {note}" for note in corpus.notes)
        raise ValueError(
            f"{recipe.data_path!r} holds nothing to train on.{details}\n"
            "  A document needs two tokens or more, and a target behind its first token."
        )
    return corpus


def collate(documents: Sequence[Document], pad_token_id: int) -> dict[str, torch.Tensor]:
    """A micro-batch, padded on the right. Without documents it is the empty batch: one token of padding, for a rank
    that has nothing to do in a micro-step and still takes part in it.

    Returns: ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[documents, longest]``.
    """
    if not documents:
        row = torch.full((1, 1), pad_token_id)
        return {"input_ids": row, "attention_mask": torch.zeros_like(row), "labels": torch.full_like(row, IGNORED)}
    rows = [document.input_ids for document in documents]

    def pad(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    return {
        "input_ids": pad(rows, pad_token_id),
        "attention_mask": pad([torch.ones_like(row) for row in rows], 0),
        "labels": pad([document.labels for document in documents], IGNORED),
    }


def last_tokens_batch(document: Document, num_tokens: int) -> dict[str, torch.Tensor]:
    """The whole document as context, only its last ``num_tokens`` as targets; shapes as in :func:`collate`."""
    labels = document.labels.clone()
    labels[: max(len(labels) - num_tokens, 0)] = IGNORED
    return collate([Document(document.name, document.input_ids, labels)], pad_token_id=0)


def check_vocabulary(documents: Sequence[Document], vocab_size: int) -> None:
    """Refuse ready ``input_ids`` that the model has no embedding for.

    Raises:
        ValueError: naming the document and the id.
    """
    for document in documents:
        highest, lowest = int(document.input_ids.max()), int(document.input_ids.min())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"{document.name} has a token that the model does not know.\n"
                f"  Got id {wrong}; the model's vocabulary has {vocab_size} ids, from 0.\n"
                "  Tokenise the data with this model's own tokenizer."
            )


def _limit(document: Document, recipe: Recipe, notes: list[str]) -> list[Document]:
    """Apply ``truncation`` to one document."""
    limit, length = recipe.max_length, len(document.input_ids)
    if limit is None or length <= limit:
        return [document]
    if recipe.truncation == "error":
        raise ValueError(
            f"{document.name} is longer than max_length.\n"
            f"  It has {length:,} tokens; max_length is {limit:,}.\n"
            f"  Set max_length={length}, or truncation to start, end or split."
        )
    if recipe.truncation == "split":
        cuts = range(0, length, limit)
        notes.append(f"{document.name}: {length:,} tokens split into {len(cuts)} documents")
        return [
            document.part(start, start + limit, f"{document.name} part {index}")
            for index, start in enumerate(cuts, start=1)
        ]
    notes.append(f"{document.name}: kept the {recipe.truncation}, {limit:,} of {length:,} tokens")
    return [document.part(0, limit) if recipe.truncation == "start" else document.part(length - limit, length)]


def _drop_untrained(corpus: Corpus) -> None:
    """Documents without a target cost time and teach nothing; the user hears which ones they were."""
    untrained = [document.name for document in corpus.documents if document.num_targets == 0]
    if untrained:
        names = ", ".join(untrained[:3]) + (", ..." if len(untrained) > 3 else "")
        corpus.notes.append(f"left out {len(untrained)} documents without a target: {names}")
        corpus.documents = [document for document in corpus.documents if document.num_targets > 0]


def _encode(text: str, tokenizer: Any, *, special: bool = True) -> list[int]:
    """Token ids, with the model's own start token but without an end token."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _document(name: str, ids: list[int], labels: list[int] | None = None) -> Document:
    tensor = torch.tensor(ids, dtype=torch.int64)
    return Document(name, tensor, tensor if labels is None else torch.tensor(labels, dtype=torch.int64))


def _text_document(name: str, text: str, tokenizer: Any) -> Document:
    if not text.strip():
        raise ValueError(f"{name} is empty.\n  Got no text.\n  Give a file or folder with text.")
    return _document(name, _encode(text, tokenizer) + _end(tokenizer))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8 text.\n  {error}\n  Convert it, for example: iconv -f latin1 -t utf-8."
        ) from None


def _read_folder(folder: Path, notes: list[str]) -> str:
    """All text files below a folder in the order of their paths, each behind a line with its path."""
    parts: list[str] = []
    skipped = 0
    for path in sorted(_visible_files(folder), key=lambda path: path.relative_to(folder).as_posix()):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            skipped += 1
            continue
        if "\0" in text:
            skipped += 1
        else:
            parts.append(f"==== {path.relative_to(folder).as_posix()} ====\n{text}")
    notes.append(f"{folder}: one document of {len(parts)} files; skipped {skipped} that are not UTF-8 text")
    if not parts:
        raise ValueError(
            f"The folder {str(folder)!r} holds no text.\n"
            f"  Skipped {skipped} files; hidden ones are not read.\n"
            "  Set data_path to a folder with UTF-8 text files."
        )
    return "\n".join(parts)


def _visible_files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root, name) for name in files if not name.startswith("."))


def _read_rows(path: Path, text_field: str, tokenizer: Any) -> Iterator[Document]:
    """One document per row of a .jsonl file."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{path} line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name} is not valid JSON.\n  {error}\n  Each line is one object: {ROW_EXAMPLE}."
                ) from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{name} is not an object.\n  Got {type(row).__name__}.\n  Use rows like {ROW_EXAMPLE}."
                )
            yield _row_document(name, row, text_field, tokenizer)


def _row_document(name: str, row: dict[str, Any], text_field: str, tokenizer: Any) -> Document:
    if "input_ids" in row:
        return _ready_document(name, row)
    if "messages" in row:
        return _chat_document(name, row, tokenizer)
    if "prompt" in row and "completion" in row:
        _require_text(name, row, "prompt", "completion")
        prompt = _encode(row["prompt"], tokenizer)
        completion = _encode(row["completion"], tokenizer, special=False) + _end(tokenizer)
        return _document(name, prompt + completion, [IGNORED] * len(prompt) + completion)
    if text_field in row:
        _require_text(name, row, text_field)
        return _document(name, _encode(row[text_field], tokenizer) + _end(tokenizer))
    raise ValueError(
        f"{name} has no field to train on.\n  Got {', '.join(map(repr, row)) or 'an empty object'}.\n"
        f"  Use rows like {ROW_EXAMPLE}, or set text_field."
    )


def _require_text(name: str, row: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if not isinstance(row[key], str):
            raise ValueError(
                f"{name}: {key} must be text.\n  Got {type(row[key]).__name__}.\n"
                "  Chats go into a field called messages."
            )


def _ready_document(name: str, row: dict[str, Any]) -> Document:
    ids, labels = row["input_ids"], row.get("labels")
    for key, values in (("input_ids", ids), ("labels", ids if labels is None else labels)):
        if not isinstance(values, list) or not values or any(type(value) is not int for value in values):
            raise ValueError(
                f"{name}: {key} must be a list of whole numbers.\n  Got {str(values)[:60]}.\n"
                "  Use one flat, non-empty list per row."
            )
    if labels is not None and len(labels) != len(ids):
        raise ValueError(
            f"{name}: labels and input_ids differ in length.\n"
            f"  Got {len(labels)} labels for {len(ids)} ids.\n"
            "  Give one label per token, not shifted; -100 where a token is no target."
        )
    return _document(name, ids, labels)


def _chat_document(name: str, row: dict[str, Any], tokenizer: Any) -> Document:
    """All tokens are targets, unless the chat template marks what the assistant said."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{name} holds messages, but the tokenizer has no chat template.\n"
            f"  Got {type(tokenizer).__name__} without one.\n"
            "  Use an instruct model, or rows with prompt and completion."
        )
    marks = re.search(r"{%-?\s*generation\b", str(tokenizer.chat_template)) is not None
    try:
        encoded = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=marks
        )
    except Exception as error:  # a template is a program of its own; whatever it raises is about this row
        raise ValueError(
            f"{name}: the chat template does not take these messages.\n  {type(error).__name__}: {error}\n"
            '  Use messages like [{"role": "user", "content": "..."}, '
            '{"role": "assistant", "content": "..."}].'
        ) from error
    ids: list[int] = encoded["input_ids"]
    if not marks:
        return _document(name, ids)
    mask = encoded["assistant_masks"]
    return _document(name, ids, [token if kept else IGNORED for token, kept in zip(ids, mask, strict=True)])
