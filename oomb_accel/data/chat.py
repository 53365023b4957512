"""Chats: from messages to text by the tokenizer's template, and which characters the assistant said."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from oomb_accel.data.rows import Row
from oomb_accel.data.settings import TrainOn
from oomb_accel.data.store import Range
from oomb_accel.reading import in_a_line

Notes = Counter[str]
"""What happened to rows, and to how many."""

ALL_TOKENS = (
    "chats are trained on whole, as the template does not mark what the assistant says; "
    "train_on: assistant leaves the rest out"
)
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Roles in ShareGPT data."""

MESSAGES_EXAMPLE = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


@dataclass(frozen=True, slots=True)
class Pair:
    """A rendered prompt with its completion."""

    text: str
    completion: Range
    """Its characters."""


def messages_of(name: str, row: Row) -> list[Any]:
    """The messages of a row, in ``role`` and ``content``.

    Raises:
        ValueError: they are no list of messages.
    """
    key = "messages" if "messages" in row else "conversations"
    messages = row[key]
    if not isinstance(messages, list) or any(not isinstance(message, dict) for message in messages):
        raise ValueError(
            f"{name}: {key} must be a list of messages.\n  Got {str(messages)[:60]}.\n  Use {MESSAGES_EXAMPLE}."
        )
    return [_message(name, number, message) for number, message in enumerate(messages, start=1)]


def _message(name: str, number: int, message: dict[str, Any]) -> dict[str, Any]:
    # Tables of datasets hold every key in every message.
    message = {key: value for key, value in message.items() if value is not None}
    if "from" not in message or "value" not in message:
        return message
    role = SHAREGPT.get(str(message["from"]).lower())
    if role is None:
        raise ValueError(
            f"{name}: message {number} is from nobody that is known.\n  Got from={message['from']!r}.\n"
            f"  Use one of {', '.join(SHAREGPT)}."
        )
    return {"role": role, "content": message["value"]}


def render(
    name: str, messages: list[Any], row: Row, train_on: TrainOn, tokenizer: Any, notes: Notes
) -> tuple[str, list[Range] | None]:
    """The text of a chat, and the characters that are trained on (None is all of them).

    Raises:
        ValueError: no template, or one that does not take these messages or does not show who says what.
    """
    template = _template(name, tokenizer)
    if train_on == "all":
        return _text(name, messages, row, tokenizer), None
    if train_on in ("auto", "assistant") and re.search(r"{%-?\s*generation\b", template):
        rendered, spans = _render(name, messages, row, tokenizer, marks=True)
        return rendered, [(int(start), int(end)) for start, end in spans]
    if train_on == "auto":
        notes[ALL_TOKENS] += 1
        return _text(name, messages, row, tokenizer), None
    spoken = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not spoken:
        raise ValueError(
            f"{name} holds nothing that the assistant says.\n  Got the roles {_roles(messages)}.\n"
            "  Set train_on: all, or leave the row out."
        )
    spoken = spoken[-1:] if train_on == "completions" else spoken
    text = _text(name, messages, row, tokenizer)
    return text, [_said(name, messages, index, text, row, tokenizer) for index in spoken]


def render_pair(name: str, prompt: list[Any], completion: list[Any], row: Row, tokenizer: Any) -> Pair:
    """A prompt and its completion, both lists of messages.

    Raises:
        ValueError: as :func:`render`.
    """
    _template(name, tokenizer)
    before = _text(name, prompt, row, tokenizer, prompting=True)
    text = _text(name, [*prompt, *completion], row, tokenizer)
    if not text.startswith(before):
        raise _unstable(name, len(prompt))
    return Pair(text, (len(before), _end_of_reply(text, tokenizer)))


def _said(name: str, messages: list[Any], index: int, text: str, row: Row, tokenizer: Any) -> Range:
    """Characters of what one message says, found by rendering the chat before it and up to it."""
    before = _text(name, messages[:index], row, tokenizer, prompting=True)
    after = text if index == len(messages) - 1 else _text(name, messages[: index + 1], row, tokenizer)
    if not after.startswith(before) or not text.startswith(after):
        raise _unstable(name, index + 1)
    return len(before), _end_of_reply(after, tokenizer)


def _end_of_reply(text: str, tokenizer: Any) -> int:
    """Where a text ends that a model would write: white space behind an end token is never generated."""
    stripped = text.rstrip()
    return len(stripped) if stripped.endswith(tuple(tokenizer.get_added_vocab())) else len(text)


def _unstable(name: str, number: int) -> ValueError:
    return ValueError(
        f"{name}: the chat template does not show where message {number} begins and ends.\n"
        "  It renders the messages before it otherwise when others follow (some leave out earlier thoughts).\n"
        "  Use a template with {% generation %} marks, train_on: completions, or train_on: all."
    )


def _template(name: str, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"{name} holds messages, but the tokenizer has no chat template.\n"
            f"  Got {type(tokenizer).__name__} without one.\n"
            "  Use an instruct model, or rows with prompt and completion."
        )
    return str(tokenizer.get_chat_template())


def _text(name: str, messages: list[Any], row: Row, tokenizer: Any, *, prompting: bool = False) -> str:
    text, _ = _render(name, messages, row, tokenizer, prompting=prompting)
    return text


def _render(
    name: str, messages: list[Any], row: Row, tokenizer: Any, *, prompting: bool = False, marks: bool = False
) -> tuple[str, list[Range]]:
    try:
        result: Any = render_jinja_template(
            conversations=[messages],
            tools=row.get("tools"),
            chat_template=tokenizer.get_chat_template(tools=row.get("tools")),
            add_generation_prompt=prompting,
            return_assistant_tokens_mask=marks,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template is a program of its own; whatever it raises is about this row
        raise ValueError(
            f"{name}: the chat template does not take these messages.\n  {type(error).__name__}: {in_a_line(error)}\n"
            f"  Use messages like {MESSAGES_EXAMPLE}; the roles here are {_roles(messages)}."
        ) from error
    texts, spans = result
    return texts[0], spans[0] if marks else []


def _roles(messages: list[Any]) -> str:
    roles = [str(message.get("role")) for message in messages if isinstance(message, dict)]
    return ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "") if roles else "none"
