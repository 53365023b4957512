"""Reading what users wrote: text, yaml and JSON, without running anything and without silent losses."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml


class Unreadable(Exception):
    """The text says why; who asked knows what the file is for."""


def file_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        Unreadable: there is no such file, or it is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Unreadable(f"There is no file {path}, looked in {os.getcwd()}.") from None
    except UnicodeDecodeError as error:
        raise Unreadable(f"It is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}.") from None
    except OSError as error:
        raise Unreadable(f"{error.strerror or error}.") from None
    except ValueError as error:  # a zero byte in the path
        raise Unreadable(str(error)) from None


def yaml_value(text: str) -> Any:
    """The value of a yaml document. No tag makes anything but plain values, and a key that stands twice is an error.

    Raises:
        Unreadable: it is not valid.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise Unreadable(_yaml_problem(error)) from None
    except RecursionError:
        raise Unreadable("It is nested too deeply.") from None
    except ValueError as error:  # a date that there is not, a number with thousands of digits
        raise Unreadable(f"It holds a value that cannot be read: {error}") from None


def json_value(text: str, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text.

    Args:
        pairs_hook: makes an object of its keys and values.

    Raises:
        json.JSONDecodeError: it is not valid.
        Unreadable: it is valid, and cannot be read all the same.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs_hook, parse_int=_whole)
    except RecursionError:
        raise Unreadable("It is nested too deeply.") from None


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file that a program wrote.

    Raises:
        Unreadable: there is no such file, or it holds something else.
    """
    try:
        value = json_value(file_text(path))
    except json.JSONDecodeError as error:
        raise Unreadable(f"It is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"It holds {kind_of(value)}, no object.")
    return value


def in_a_line(reason: object) -> str:
    """What another library said, as one line of a message: its first line, with those that it announces by a colon."""
    said: list[str] = []
    for line in str(reason).splitlines():
        if line.strip():
            said.append(line.strip())
            if not said[-1].endswith(":"):
                break
    return " ".join(said)[:400] or type(reason).__name__


def refusal(title: str, reasons: Sequence[str]) -> str:
    """The text of an error for something that is not supported: three lines, two more for each further reason.

    Args:
        title: what is refused.
        reasons: at least one, each what was found, and from its second sentence on what to do instead.
    """
    lines = [title.rstrip(".:") + "."]
    for reason in reasons:
        found, stop, remedy = " ".join(reason.split()).partition(". ")
        lines += [found + stop.strip()] + ([remedy] if remedy else [])
    return "\n  ".join(lines)


def kind_of(value: object) -> str:
    """What a file holds instead of a mapping, in words."""
    words = {type(None): "nothing: it is empty", list: "a list", dict: "a mapping", str: "text", bool: "true or false"}
    return words.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def shown(value: object) -> str:
    """A value for a message: as Python writes it, cut short where it is long."""
    return _SHORT.repr(value)


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong, and where, in one line."""
    mark = getattr(error, "problem_mark", None)
    what = " ".join(str(part) for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part)
    if mark is None or not what:
        return " ".join(str(error).split())
    return f"Line {mark.line + 1}, column {mark.column + 1}: {' '.join(what.split())}."


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # more digits than Python reads
        raise Unreadable(str(error)) from None


class _StrictLoader(yaml.SafeLoader):
    """Yaml without silent losses: a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or mapping", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {shown(key)} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxtuple = 3, 8, 8, 8
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 200, 40, 200
