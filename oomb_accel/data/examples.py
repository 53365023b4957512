"""From a row to what is tokenised: texts, and which characters of them are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from oomb_accel.data import chat
from oomb_accel.data.documents import IGNORED
from oomb_accel.data.rows import ROW_EXAMPLE, Row
from oomb_accel.data.settings import DataSettings, TrainOn
from oomb_accel.data.store import Ids, Range
from oomb_accel.reading import kind_of
from oomb_accel.spelling import called


@dataclass(frozen=True, slots=True)
class Part:
    """A text that is tokenised by itself."""

    chunks: Callable[[], Iterator[str]]
    """The text, from its beginning."""
    targets: list[Range] | None
    """Ranges of characters that are trained on, ascending; None is all of them."""
    special: bool = False
    """Whether the tokenizer's start token stands in front."""
    end: bool = False
    """Whether the end token follows, as a target."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Token ids that were ready."""

    ids: Ids
    targets: list[Range]


Example = list[Part] | Ready
"""One document."""


def text_example(label: str, chunks: Callable[[], Iterator[str]], train_on: TrainOn) -> Example:
    """A text, all of it to be trained on.

    Raises:
        ValueError: only replies are to be trained on, and there are none.
    """
    if train_on in ("completions", "assistant"):
        raise ValueError(
            f"{label} is plain text, which has no {'completion' if train_on == 'completions' else 'assistant'}.\n"
            f"  Got train_on={train_on}.\n  Set train_on: all, or use rows with messages, or prompt and completion."
        )
    return [Part(chunks, None, special=True, end=True)]


def row_example(name: str, row: Row, settings: DataSettings, tokenizer: Any, notes: chat.Notes) -> Example:
    """The document of a row.

    Args:
        name: for messages.
        notes: gets what the user should know about the rows.

    Raises:
        ValueError: the row is not understood.
    """
    # A column of a table exists in every row: where it is empty, the row does not have it.
    row = {key: value for key, value in row.items() if value is not None}
    if "input_ids" in row:
        return _ready(name, row)
    if "messages" in row or "conversations" in row:
        return _chat(name, chat.messages_of(name, row), row, settings.train_on, tokenizer, notes)
    if "prompt" in row and "completion" in row:
        return _pair(name, row, settings.train_on, tokenizer, notes)
    if settings.text_field in row:
        text = _text(name, row, settings.text_field)
        return text_example(name, lambda: iter([text]), settings.train_on)
    field = called("text_field")
    raise ValueError(
        f"{name} has no field to train on.\n  Got {', '.join(map(repr, row)) or 'an empty object'}.\n"
        f"  Use rows like {ROW_EXAMPLE}{f', or set {field}' if field else ''}."
    )


def _pair(name: str, row: Row, train_on: TrainOn, tokenizer: Any, notes: chat.Notes) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        if train_on == "assistant":
            return _chat(name, [*prompt, *completion], row, train_on, tokenizer, notes)
        rendered = chat.render_pair(name, prompt, completion, row, tokenizer)
        _check_encodable(name, "prompt and completion", rendered.text)
        targets = None if train_on == "all" else [rendered.completion]
        return [Part(lambda: iter([rendered.text]), targets)]
    prompt, completion = _text(name, row, "prompt"), _text(name, row, "completion")
    return [
        Part(lambda: iter([prompt]), None if train_on == "all" else [], special=True),
        Part(lambda: iter([completion]), None, end=True),
    ]


def _chat(name: str, messages: list[Any], row: Row, train_on: TrainOn, tokenizer: Any, notes: chat.Notes) -> Example:
    text, targets = chat.render(name, messages, row, train_on, tokenizer, notes)
    _check_encodable(name, "messages", text)
    return [Part(lambda: iter([text]), targets)]


def _text(name: str, row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(
            f"{name}: {key} must be text.\n  Got {kind_of(value)}.\n"
            "  Chats go into a field called messages, or into prompt and completion, both as lists."
        )
    _check_encodable(name, key, value)
    return value


def _check_encodable(name: str, key: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: {key} holds half of a character.\n  {error}.\n"
            "  Write the whole character: a surrogate such as \\ud83d must be followed by its other half."
        ) from None


def _ready(name: str, row: Row) -> Ready:
    ids, labels = row["input_ids"], row.get("labels")
    if isinstance(ids, list) and not ids:
        raise ValueError(
            f'{name} has no tokens.\n  Got input_ids=[].\n  Remove the row, or give it ids: {{"input_ids": [1, 2, 3]}}.'
        )
    for key, values in (("input_ids", ids), ("labels", ids if labels is None else labels)):
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise ValueError(
                f"{name}: {key} must be a list of whole numbers.\n  Got {str(values)[:60]}.\n"
                "  Use one flat list per row."
            )
    if labels is not None and len(labels) != len(ids):
        raise ValueError(
            f"{name}: labels and input_ids differ in length.\n"
            f"  Got {len(labels)} labels for {len(ids)} ids.\n"
            f"  Give one label per token, not shifted; {IGNORED} where a token is no target."
        )
    if min(ids) < 0 or max(ids) >= 1 << 32:
        raise ValueError(
            f"{name}: input_ids holds a number that is no token id.\n"
            f"  Got {min(ids) if min(ids) < 0 else max(ids)}; ids go from 0 up.\n"
            "  Tokenise the data with this model's own tokenizer."
        )
    if labels is not None and (min(labels) < IGNORED or max(labels) >= 1 << 32):
        wrong_label = min(labels) if min(labels) < IGNORED else max(labels)
        raise ValueError(
            f"{name}: labels holds a number that is no label.\n  Got {wrong_label}; a label is an id, or {IGNORED}.\n"
            f"  Give each token's own id, not shifted, or {IGNORED} where it is no target."
        )
    array = np.array(ids, np.int64)
    wanted = np.array(ids if labels is None else labels, np.int64)
    wrong = np.flatnonzero((wanted != array) & (wanted != IGNORED))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(
            f"{name}: labels do not repeat input_ids.\n"
            f"  Position {at} has label {wanted[at]} and id {ids[at]}.\n"
            f"  Give each token's own id, not shifted, or {IGNORED} where it is no target."
        )
    return Ready(array.astype(np.uint32), ranges_of(wanted != IGNORED))


def ranges_of(mask: Any) -> list[Range]:
    """Runs of True in a boolean array."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
