"""Reading what users wrote: text, yaml and JSON, without running anything and without silent losses."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Hashable
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
    except (OSError, ValueError) as error:  # ValueError: another encoding, or a zero byte in the path
        raise Unreadable(str(error)) from None


def yaml_value(text: str) -> Any:
    """The value of a yaml document. No tag makes anything but plain values, and a key that stands twice is an error.

    Raises:
        Unreadable: it is not valid.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise Unreadable(str(error).replace("\n", "\n  ")) from None
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
        raise Unreadable(f"It holds {type(value).__name__}, no object.")
    return value


def indented(reason: object) -> str:
    """What another library said, as part of a message: not more than a few lines, each of them indented."""
    lines = [line.strip()[:400] for line in str(reason).splitlines() if line.strip()]
    return "\n  ".join(lines[:8]) or type(reason).__name__


def shown(value: object) -> str:
    """A value for a message: as Python writes it, cut short where it is long."""
    return _SHORT.repr(value)


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
