"""Cutting a long text into pieces that can be tokenised one by one, with the same tokens as in one call.

A cut is proven in two steps. First the tokenizer's own description has to be of a kind (:func:`can_cut`) in which

* the text is split into words from left to right, where a word depends on nothing before its beginning (expressions
  that do not look back), and on nothing behind the next character, or behind the white space that follows (expressions
  that look ahead with ``(?!\\S)`` only), and
* each word is turned into tokens by itself.

Cuts are made behind a newline between two characters that are no white space. So, of a piece tokenised alone, the words
that end before the last characters are words of the whole text too: they cannot depend on what follows the piece. The
last few are held against the text behind the cut, by tokenising them together with it
(:func:`oomb_accel.data.worker.encode`): they must come out with the same tokens and end at the cut. Then a word of the
whole text begins at the cut, and by induction the next piece's words are words of the whole text as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

PIECE_CHARS = 1 << 18
"""Least characters of a piece that is not the last one."""

_LOOKS_AROUND = ("(?<", "(?=", "(?!", "^", "$", r"\b", r"\B", r"\G", r"\A", r"\z", r"\Z", r"\K")
"""Marks of expressions whose matches depend on what stands around them."""

CONTEXT_CHARS = 256
"""Characters behind a cut that its proof looks at."""


def can_cut(description: str) -> bool:
    """Whether a fast tokenizer is of a kind whose texts may be cut.

    Args:
        description: its JSON, as in tokenizer.json.
    """
    parts: dict[str, Any] = json.loads(description)
    if parts["model"].get("dropout"):
        return False
    # An added token is looked for in the whole text before words are: it must not reach over a newline.
    if any(token["lstrip"] or "\n" in token["content"] for token in parts["added_tokens"]):
        return False
    return _normalises_locally(parts["normalizer"]) and _splits_forward(parts["pre_tokenizer"])


def _normalises_locally(normalizer: dict[str, Any] | None) -> bool:
    """Unicode forms never join a newline with what stands beside it."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(_normalises_locally(part) for part in normalizer["normalizers"])
    return normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD")


def _splits_forward(splitter: dict[str, Any] | None) -> bool:
    if splitter is None:
        return False
    kind = splitter["type"]
    if kind == "Sequence":
        parts = splitter["pretokenizers"]
        # Some part has to make words; the others only take them further apart.
        return any(_makes_words(part) for part in parts) and all(_makes_words(p) or _keeps_words(p) for p in parts)
    return _makes_words(splitter)


def _makes_words(splitter: dict[str, Any]) -> bool:
    if splitter["type"] == "ByteLevel":  # GPT-2's expression
        return bool(splitter["use_regex"]) and not splitter["add_prefix_space"]
    if splitter["type"] == "Split":
        # A negated class is no anchor.
        expression = splitter["pattern"].get("Regex", "").replace(r"(?!\S)", "").replace("[^", "[")
        looks_around = any(mark in expression for mark in _LOOKS_AROUND)
        return bool(expression) and splitter["behavior"] == "Isolated" and not looks_around
    return splitter["type"] in ("Whitespace", "WhitespaceSplit")


def _keeps_words(splitter: dict[str, Any]) -> bool:
    """Works inside of words, and changes no text."""
    kind = splitter["type"]
    return kind in ("Digits", "Punctuation") or (kind == "ByteLevel" and not splitter["add_prefix_space"])


def pieces(chunks: Iterable[str], size: int = PIECE_CHARS) -> Iterator[tuple[str, str | None]]:
    """Cut a text behind newlines that stand alone between two characters that are no white space.

    Holds one piece at a time, where the text has such newlines.

    Args:
        chunks: the text in parts.
        size: least characters of a piece.

    Yields: pieces, each with the text behind its cut; None behind the last one.
    """
    held: list[str] = []
    length, wanted = 0, size + CONTEXT_CHARS
    for chunk in (whole[at : at + size] for whole in chunks for at in range(0, len(whole), size)):
        held.append(chunk)
        length += len(chunk)
        while length >= wanted:
            text = "".join(held)
            cut = find_cut(text, size, len(text) - CONTEXT_CHARS)
            if cut is None:
                held, wanted = [text], 2 * length  # so that a single huge line is not joined over and over
                break
            yield text[:cut], text[cut : cut + CONTEXT_CHARS]
            held, length, wanted = [text[cut:]], length - cut, size + CONTEXT_CHARS
    yield "".join(held), None


def find_cut(text: str, start: int, end: int) -> int | None:
    """The first position in ``[start, end)`` behind a newline with no white space on either side."""
    at = max(start - 1, 0)
    while (at := text.find("\n", at, end - 1)) >= 0:
        if at and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        at += 1
    return None
