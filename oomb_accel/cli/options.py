"""Options of a command: either spelling, each once, and errors that the command line prints as it prints all others."""

from __future__ import annotations

import argparse
import difflib
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from oomb_accel.config import FORMER_VALUES, unknown_message
from oomb_accel.reading import shown
from oomb_accel.setting_text import LENGTH_NAMES, value_of_text, with_unit, without_commas

WITHOUT_RECIPE = {
    **{"data_split": "", "data_include": "", "folder_as": "", "data_cache": "OOMB_CACHE"},
    "trust_remote_code": "--trust_remote_code",
}
"""What commands that read data and models take for settings of a recipe; see `oomb_accel.spelling.settings_called`."""


class Parser(argparse.ArgumentParser):
    """Takes ``--host-gib`` for ``--host_gib``, no abbreviations, and no option twice with different values.

    Errors are ``ValueError`` with three lines; argparse would print its own and leave.
    """

    def __init__(self, **named: Any) -> None:
        super().__init__(allow_abbrev=False, **named)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The options.

        Raises:
            ValueError: one is unknown, wrong or missing.
        """
        found, left = super().parse_known_args(None if args is None else self._checked(args), namespace)
        if left:
            names = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            raise ValueError(
                unknown_message("word", left[0], names, "on the command line", nearest=self._meant(left[0], names))
            )
        return found

    def parse_some(self, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options that are known, and the words that are left for somebody else.

        Raises:
            ValueError: one is wrong or missing.
        """
        return super().parse_known_args(self._checked(args, others=True))

    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"{self.prog} does not work like this.\n  {message[:300]}.\n  {self.prog} --help says what it takes."
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, with the nearest choice."""
        if action.choices is not None and value not in action.choices:
            name = action.option_strings[0] if action.option_strings else action.dest
            former = FORMER_VALUES.get((action.dest, str(value).lower()))
            choices = list(map(str, action.choices))
            raise ValueError(unknown_message("value", str(value), choices, f"for {name}", instead=former))

    def _meant(self, word: str, names: list[str]) -> str | None:
        """The option that a word without dashes is near, or the only one that takes it for a value."""
        takers = [action.option_strings[0] for action in self._actions if word in (action.choices or ())]
        if len(takers) == 1:
            return f"{takers[0]} {word}"
        length = _length_among(word, names)
        if length is not None:
            return length
        by_word = {name[2:]: name for name in names}
        near = difflib.get_close_matches(word[:100].replace("-", "_"), by_word, n=1)
        return by_word[near[0]] if near else None

    def _checked(self, words: Sequence[str], *, others: bool = False) -> list[str]:
        """The words with options as they are known.

        Args:
            others: leave options be that are not known.

        Raises:
            ValueError: an option that there is not, with the nearest one, or one that stands twice.
        """
        known = {name.replace("_", "-"): (name, action) for action in self._actions for name in action.option_strings}
        checked: list[str] = []
        values: dict[str, str] = {}
        for position, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if not flag.startswith("--") or flag == "--":
                checked.append(word)
                continue
            found = known.get(flag.replace("_", "-"))
            if found is None and others:
                checked.append(word)
                continue
            if found is None:
                names = [name for name, _ in known.values() if name.startswith("--")]
                meant = _length_among(flag.removeprefix("--"), names)
                raise ValueError(unknown_message("option", flag, names, "on the command line", nearest=meant))
            name, action = found
            if not equals:
                value = words[position + 1] if action.nargs != 0 and position + 1 < len(words) else ""
            if not isinstance(action, argparse._AppendAction) and values.setdefault(action.dest, value) != value:
                raise ValueError(
                    f"{name} stands twice on the command line.\n"
                    f"  Got {shown(values[action.dest])} and {shown(value)}.\n  Keep one of them."
                )
            checked.append(name + equals + value if equals else name)
        return checked


def _length_among(word: str, names: Sequence[str]) -> str | None:
    """The option for the length of a document, where that is what the word is for others."""
    if word.replace("-", "_") not in (*LENGTH_NAMES, "max_length"):
        return None
    return next((name for name in ("--length", "--tokens") if name in names), None)


def is_recipe(word: str) -> bool:
    return Path(word).suffix.lower() in (".yaml", ".yml")


def check_recipe_is_first(command: str, words: Sequence[str]) -> None:
    """Refuse a recipe behind other words.

    Args:
        command: such as ``oomb train``.

    Raises:
        ValueError: with the command as it works.
    """
    late = [number for number, word in enumerate(words) if is_recipe(word)]
    if not late or late[0] == 0:
        return
    # Rather not what is an option's value, such as a preset.
    place = next((number for number in late if not words[number - 1].startswith("--")), late[0])
    first = 0 if words[0].startswith("-") else 1  # a model, say, which the recipe names itself
    others = [word for number, word in enumerate(words) if number >= first and number != place]
    raise ValueError(
        f"The recipe must be the first word.\n  Got {shown(words[place])} behind {shown(words[0])}.\n"
        f"  Write {command} {shlex.join([words[place], *others])}"
    )


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """``--trust_remote_code`` of the commands that load a model without a recipe."""
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the Python code that comes with the model or tokenizer; read it first. Off if left out",
    )


def tokens_of(text: str) -> int | None:
    """``131072``, ``131,072``, ``128K`` or ``1.5M`` as a number of tokens; K is 1,024, M is 1,048,576. None for
    anything else."""
    found = with_unit(text)
    found = value_of_text(without_commas(text), int) if found is text else found
    return found if isinstance(found, int) else None


def num_tokens(text: str) -> int:
    """The type of an option that is a number of tokens."""
    value = tokens_of(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be a number of tokens, such as 4096 or 4K, got {shown(text)}")
    return value


def number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option that is a finite number.

    Args:
        least: smallest value.
        above: the smallest value itself is not allowed.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (value > least if above else value >= least)):
            bound = f"above {least:g}" if above else f"of {least:g} or more"
            raise argparse.ArgumentTypeError(f"must be a number {bound}, got {shown(text)}")
        return value

    return read
