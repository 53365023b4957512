"""Settings as text, from the environment and the command line, and back to values; names of dtypes."""

from __future__ import annotations

import contextlib
import re
import types
import typing
from fractions import Fraction
from typing import Any, Literal

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_NOTHING = ("none", "null")
TOKEN_SETTINGS = frozenset(("chunk_tokens", "page_tokens", "span_tokens", "max_length", "eval_last_tokens"))
"""Settings, of recipes and of `OombConfig`, that are a number of tokens."""
LENGTH_NAMES = (
    *("length", "tokens", "num_tokens", "seq_len", "seq_length", "sequence_len", "sequence_length", "max_seq_len"),
    *("max_seq_length", "context_length", "model_max_length", "cutoff_len", "max_tokens"),
)
"""What others, and other commands, call the length of a document. It is ``max_length`` of a recipe."""
_UNITS = {"K": 1 << 10, "M": 1 << 20}
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)"
_LONGEST = 30
_DIGITS = 1000
"""Python refuses to read numbers of some thousand digits."""


def value_of_text(text: str, hint: Any) -> Any:
    """The value that the text stands for.

    Args:
        text: as written.
        hint: type of the setting, or a union of types.

    Returns:
        A value of the first type of the union that the text fits; the text itself where it fits none, or is one
        of a setting's words.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if is_union else (hint,):
        value = _read(text.strip(), option)
        if not isinstance(value, str):
            return value
    return text


def with_unit(value: Any) -> Any:
    """``128K``, ``1.5m`` or ``1,024K`` as the whole number of tokens that it stands for: K is 1,024, M is 1,048,576.
    Anything else as it is: also ``1,2K``, whose comma parts no thousands, and ``0.3K``, which is 307.2 tokens."""
    text = value.strip().upper() if isinstance(value, str) else ""
    match = re.fullmatch(rf"({_WHOLE}(?:\.\d+)?)([KM])", text, re.ASCII)
    if match is None or len(match[1]) > _LONGEST:
        return value
    tokens = Fraction(match[1].replace(",", "").replace("_", "")) * _UNITS[match[2]]
    return int(tokens) if tokens.denominator == 1 else value


def without_commas(text: str) -> str:
    """``131,072`` as ``131072``; the text itself where commas part no thousands."""
    return text.replace(",", "") if re.fullmatch(_WHOLE, text.strip(), re.ASCII) else text


def whole_numbers(text: str) -> tuple[int, ...] | str:
    """``0,1,-1`` or ``[0, 1, -1]`` as whole numbers, none of them for ``none`` or no text; else the text itself."""
    if text.strip().lower() in _NOTHING:
        return ()
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",") if part.strip()]
    return tuple(map(int, parts)) if all(map(_is_number, parts)) else text


def is_choice_of_numbers(option: Any) -> bool:
    """Whether the type is a few numbers, such as ``Literal[64, 128]``."""
    return typing.get_origin(option) is Literal and isinstance(typing.get_args(option)[0], int)


def dtype_name(dtype: object) -> str:
    """``float32`` and the like: a dtype of torch as settings, tables and JSON have it."""
    return str(dtype).removeprefix("torch.")


def _read(text: str, option: Any) -> Any:
    """The value as one type, or the text itself."""
    word = text.lower()
    if option is types.NoneType and word in _NOTHING:
        return None
    if option is bool and word in (*_TRUE, *_FALSE):
        return word in _TRUE
    if (option is int or is_choice_of_numbers(option)) and _is_number(text):
        return int(text)
    if option is float and text.isascii():
        with contextlib.suppress(ValueError):
            return float(text)
    return whole_numbers(text) if typing.get_origin(option) is tuple else text


def _is_number(text: str) -> bool:
    """Whether ``int`` reads it: decimal digits, which single underscores may part."""
    digits = text.removeprefix("-")
    return len(digits) < _DIGITS and digits.isascii() and all(part.isdecimal() for part in digits.split("_"))
