"""Reading settings from yaml and from the command line, with errors that say where, what and what instead."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oomb_accel.config import OombConfig, allowed, unknown_key_message, unknown_message
from oomb_accel.reading import Unreadable, file_text, kind_of, shown, yaml_value
from oomb_accel.setting_text import TOKEN_SETTINGS, is_choice_of_numbers, whole_numbers, with_unit
from oomb_accel.training.other_names import OTHER_NAMES, remedy_of


@dataclass(frozen=True, slots=True)
class Setting:
    """Name of a setting, the types that it takes, and its default."""

    name: str
    options: tuple[Any, ...]
    default: Any

    @staticmethod
    def of(cls: type) -> dict[str, Setting]:
        """The settings of a dataclass, by name: what its constructor takes."""
        resolved, fields = typing.get_type_hints(cls), [item for item in dataclasses.fields(cls) if item.init]
        return {item.name: Setting(item.name, _options(resolved[item.name]), item.default) for item in fields}

    def spell(self) -> str:
        """The types in words."""
        text = " or ".join(_spell(option) for option in self.options)
        return f"{text} (of tokens: 131072 or 128K)" if self.name in TOKEN_SETTINGS else text

    def remedy(self, value: Any) -> str:
        """What to set instead of a value that is not allowed."""
        words = typing.get_args(self.options[0]) if len(self.options) == 1 else ()
        if typing.get_origin(self.options[0]) is Literal and len(words) == 1:
            return f"Set {self.name}: {words[0]}, the only one."
        example = f", for example {self.default}" if type(self.default) in (int, float) else ""
        return allowed(self.name, value, self.options, self.spell() + example)


def field_docs(cls: type) -> dict[str, str]:
    """What the docstring under each field of a dataclass says, in one line, by the field's name; fields without one are
    left out. Read from the source: Python keeps no such docstrings."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            assert isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).replace("``", "`").split())
    return found


class _Mismatch(Exception):
    """The value does not fit this option; another one may."""


def check_value(name: str, value: Any, setting: Setting) -> Any:
    """The value in the setting's type: ``1`` and ``"1e-4"`` (yaml's reading of 1e-4) are numbers.

    Raises:
        ValueError: it fits none of the types.
    """
    value = with_unit(value) if setting.name in TOKEN_SETTINGS else value
    for option in setting.options:
        try:
            return _fit(value, option)
        except _Mismatch:
            continue
    raise ValueError(
        f"{name} has a value that is not allowed.\n  Got {shown(value)} ({type(value).__name__}).\n"
        f"  {setting.remedy(value)}"
    )


def read_settings(
    path: Path | None, overrides: list[str], settings: Mapping[str, Setting], block_type: type[OombConfig]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Settings of a yaml file, with command-line options over them.

    Args:
        path: a yaml file with one mapping; None for options only.
        overrides: options as typed.
        settings: what is allowed.
        block_type: type of the ``oomb`` block.

    Returns: checked values by name, those that nobody set being left out; and the names of those that come from the
        command line, ``oomb.NAME`` for those in the block.

    Raises:
        ValueError: see :meth:`oomb_accel.training.recipe.Recipe.from_yaml`.
    """
    values = {} if path is None else _load_yaml(path)
    block_settings = Setting.of(block_type)
    block = values.pop("oomb", None) or {}
    if not isinstance(block, dict):
        raise ValueError(
            f"In {path}: oomb must be a mapping.\n  Got {shown(block)}.\n  Example: oomb: {{chunk_tokens: 8192}}"
        )
    flags = {name: setting for name, setting in settings.items() if name != "oomb"}
    flags |= {f"oomb.{key}": setting for key, setting in block_settings.items()}
    typed = [(flag, flag.lstrip("-").replace("-", "_"), text) for flag, text in _split_flags(overrides, flags)]
    places = ((str(path), values, settings), (f"the oomb block of {path}", block, block_settings))
    _refuse_all(
        [
            *(_unknown(str(key), settings, str(path), value=values[key]) for key in values if key not in settings),
            *(
                unknown_key_message(str(key), list(block_settings), f"the oomb block of {path}")
                for key in block
                if key not in block_settings
            ),
            *(_unknown_option(flag, name, settings, block_settings) for flag, name, _ in typed if name not in flags),
            *(message for place, given, known in places for message in _wrong_values(place, given, known)),
        ],
        path,
    )
    values = {key: check_value(key, value, settings[key]) for key, value in values.items()}
    block = {key: check_value(key, value, block_settings[key]) for key, value in block.items()}
    for flag, name, text in typed:
        into = block if name.startswith("oomb.") else values
        into[name.removeprefix("oomb.")] = _from_text(flag, text, flags[name])
    place = f"the oomb block of {path or 'the options'}" + (" with the options over it" if overrides and path else "")
    values["oomb"] = block_type.from_dict(block, place=place)
    return values, frozenset(name for _, name, _ in typed)


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        text = file_text(path)
    except Unreadable as error:
        raise ValueError(
            f"The recipe {str(path)!r} cannot be read.\n  {error}\n"
            "  Give the path of a yaml file; configs/ has examples."
        ) from None
    try:
        loaded = yaml_value(text)
    except Unreadable as error:
        raise ValueError(
            f"The recipe {str(path)!r} is not valid yaml.\n  {error}\n"
            "  Write one setting per line, indented with spaces: learning_rate: 2.0e-4"
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(
            f"The recipe {str(path)!r} must hold one mapping of settings.\n  Got {kind_of(loaded)}.\n"
            "  Example line: learning_rate: 2.0e-4"
        )
    return loaded


def _split_flags(arguments: list[str], settings: Mapping[str, Setting]) -> list[tuple[str, str]]:
    """Options as pairs of flag and text; a switch without a value is true."""
    pairs: list[tuple[str, str]] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if not argument.startswith("--"):
            near = difflib.get_close_matches(argument[:100].replace("-", "_"), settings, n=1)
            meant = f"Did you mean --{near[0]}? " if near else ""
            raise ValueError(
                f"Cannot tell what {shown(argument)} on the command line belongs to.\n"
                "  It stands behind no option, and is none.\n"
                f"  {meant}Options are --name value or --name=value, for example --learning_rate 1e-4."
            )
        flag, equals, text = argument.partition("=")
        if not equals:
            has_value = position < len(arguments) and not arguments[position].startswith("--")
            setting = settings.get(flag.lstrip("-").replace("-", "_"))
            if has_value:
                text = arguments[position]
                position += 1
            elif setting is not None and bool in setting.options:
                text = "true"
            else:
                behind = f"the option {arguments[position]}" if position < len(arguments) else "nothing"
                raise ValueError(
                    f"{flag} on the command line has no value.\n  Got {behind} behind it.\n  Write {flag} VALUE."
                )
        _refuse_twice(flag, text, pairs)
        pairs.append((flag, text))
    return pairs


def _refuse_twice(flag: str, text: str, pairs: list[tuple[str, str]]) -> None:
    for earlier, value in pairs:
        if earlier.replace("-", "_") == flag.replace("-", "_") and value != text:
            raise ValueError(
                f"{flag} stands twice on the command line.\n  Got {shown(value)} and {shown(text)}.\n"
                "  Keep one of them."
            )


def _from_text(flag: str, text: str, setting: Setting) -> Any:
    """A value as typed on the command line, in the setting's type."""
    if text.lower() in ("null", "none") and types.NoneType in setting.options:
        return None
    number = with_unit(text)
    if setting.name in TOKEN_SETTINGS and not isinstance(number, str):
        return number
    as_list = text.startswith("[") and list[str] in setting.options
    for option in (list[str],) if as_list else setting.options:
        try:
            return _fit(_parse(text, option), option)
        except (_Mismatch, ValueError, Unreadable):
            continue
    raise ValueError(
        f"{flag} on the command line has a value that is not allowed.\n  Got {shown(text)}.\n  {setting.remedy(text)}"
    )


def _parse(text: str, option: Any) -> Any:
    if option is int or is_choice_of_numbers(option):
        return int(text)
    if option == tuple[int, ...]:
        return whole_numbers(text)
    if option is bool:
        return {"true": True, "yes": True, "false": False, "no": False}.get(text.lower())
    if option == list[str] and not text.startswith("["):
        if text == "all-linear":
            raise _Mismatch
        return [part.strip() for part in text.split(",")]
    if option == list[str] or typing.get_origin(option) is dict:
        return yaml_value(text)
    return text


def _wrong_values(place: str, given: dict[str, Any], known: Mapping[str, Setting]) -> Iterator[str]:
    """The texts of the errors for values that are not allowed for their settings."""
    for name, value in given.items():
        if name in known:
            try:
                check_value(name, value, known[name])
            except ValueError as error:
                yield f"In {place}: {error}"


def _refuse_all(messages: list[str], path: Path | None) -> None:
    """Refuse settings that there are not, and wrong values: one by its message, several together, with the file named
    once.

    Raises:
        ValueError: there is one.
    """
    if len(messages) == 1:
        raise ValueError(messages[0])
    if messages:
        what = "not known" if all(m.startswith("Unknown") for m in messages) else "not known or have a wrong value"
        lines = [
            m.removeprefix(f"In {path}: ").replace(f" in {path}", "", 1).replace(f" of {path}", "", 1).splitlines()
            for m in messages
        ]
        found = (f"{first.removeprefix('Unknown ').rstrip('.')}: {_short(remedy)}" for first, *_, remedy in lines)
        raise ValueError(
            "\n  ".join(
                (
                    f"{len(messages)} settings are {what}{'' if path is None else f' in {path}'}.",
                    *found,
                    "Names that other trainers use are in docs/migration.md, all of ours in oomb train --help.",
                )
            )
        )


def _short(remedy: str) -> str:
    """Without the list of all names, where nothing is like the wrong one."""
    return "nothing is called like it." if remedy.lstrip().startswith("Valid ") else remedy.strip()


def _unknown(
    key: str, settings: Mapping[str, Setting], place: str, *, value: Any = None, option: str | None = None
) -> str:
    """The text of the error for a key that is no setting of a recipe, or for an option so called."""
    what = f"key {key!r} in {place}" if option is None else f"option {option!r} on the command line"
    if key in OTHER_NAMES:
        return f"Unknown {what}.\n  Other trainers call something so.\n  {remedy_of(key, value)}"
    if key in Setting.of(OombConfig):
        own = f"Set oomb.{key}" if option is None else f"Write --oomb.{key}"
        return f"Unknown {what}.\n  It belongs into the oomb block.\n  {own} instead."
    if option is None:
        return unknown_key_message(key, list(settings), place)
    known = [f"--{name}" for name in settings if name != "oomb"]
    return unknown_message("option", f"--{key}", known, "on the command line")


def _unknown_option(
    flag: str, name: str, settings: Mapping[str, Setting], block_settings: Mapping[str, Setting]
) -> str:
    if not name.startswith("oomb."):
        return _unknown(name, settings, "", option=flag)
    known = [f"--oomb.{key}" for key in block_settings]
    return unknown_message("option", f"--{name}", known, "on the command line")


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(option for part in typing.get_args(hint) for option in _options(part))
    return (hint,)


def _fit(value: Any, option: Any) -> Any:
    """``value`` as ``option``, or :class:`_Mismatch`."""
    if option is types.NoneType and value is None:
        return None
    if typing.get_origin(option) is Literal:
        choices = typing.get_args(option)
        # Yaml reads a bare `no` as False.
        value = "no" if value is False and "no" in choices else value
        if value in choices and type(value) is type(choices[0]):
            return value
    elif option == tuple[int, ...]:
        if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
            return tuple(value)
    elif option == list[str]:
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return value
    elif typing.get_origin(option) is dict:
        if isinstance(value, dict):
            return value
    elif option is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            return float(value)
        except (ValueError, OverflowError):
            raise _Mismatch from None
    elif type(value) is option:
        return value
    raise _Mismatch


def _spell(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(option))
    if typing.get_origin(option) is dict:
        return "a mapping"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    words |= {types.NoneType: "null", list[str]: "a list of names", tuple[int, ...]: "a list of whole numbers"}
    return words.get(option, getattr(option, "__name__", str(option)))
