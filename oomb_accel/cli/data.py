"""``oomb data RECIPE.yaml`` or ``oomb data PATH --model MODEL``: what training would read."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oomb_accel.cli.options import Parser
from oomb_accel.columns import folded
from oomb_accel.spelling import settings_called

if TYPE_CHECKING:
    from oomb_accel.training.recipe import Recipe

USAGE = """usage: oomb data RECIPE.yaml [--json] [--show N] [--setting value ...]
       oomb data PATH [PATH ...] --model MODEL [--json] [--show N] [--setting value ...]

Reads and tokenises the data of a recipe as oomb train would, keeps the result for it, and says
what there is: documents, tokens, targets, lengths, what was cut, dropped and packed, and the label
mask of a document. Needs no GPU and no weights.

  PATH           a file, a folder or a hub dataset
  --model MODEL  folder or hub id with the tokenizer; over the recipe's model_name_or_path
  --show N       show the label mask of document N, from 1; default 1, 0 shows none
  --json         everything as JSON
  --setting      a setting of the recipe, as in oomb train: --max_length 8192 --truncation split
                 --train_on assistant
"""


def main(arguments: Sequence[str]) -> int:
    """Print what the data of a recipe comes to.

    Returns: 0; 1 when training would refuse the data for its lengths; 2 when called without data.

    Raises:
        ValueError: as reading a recipe and its data.
    """
    if "-h" in arguments or "--help" in arguments:
        print(folded(USAGE))
        return 0
    parser = Parser(prog="oomb data", add_help=False)
    parser.add_argument("--model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", type=int, default=1)
    paths, words = _split(arguments)
    options, settings = parser.parse_known_args(words)
    while not paths and settings and not settings[0].startswith("-"):  # behind --model MODEL
        paths.append(settings.pop(0))
    if not paths:
        raise ValueError(
            "There is nothing to read.\n  Got no path.\n"
            "  Please give a recipe, or a path and --model; oomb data --help says more."
        )
    given = {} if options.model is None else {"model_name_or_path": "--model"}
    with settings_called(given if _is_recipe(paths) else given | {"data_path": "PATH"}):
        recipe = _recipe(paths, options.model, settings)
        from oomb_accel.cli.data_report import describe, text_report  # wrong settings are refused before torch comes

        found = describe(recipe, show=options.show)
    print(json.dumps(found.to_dict(), indent=2) if options.json else text_report(found, color=_has_color()))
    return 0 if found.refusal is None else 1


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Paths in front, and options behind them."""
    first = next((index for index, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    return list(arguments[:first]), list(arguments[first:])


def _is_recipe(paths: list[str]) -> bool:
    return Path(paths[0]).suffix.lower() in (".yaml", ".yml")


def _recipe(paths: list[str], model: str | None, settings: list[str]) -> Recipe:
    from oomb_accel.training.recipe import Recipe

    words = [*settings, *([] if model is None else ["--model_name_or_path", model])]
    if _is_recipe(paths):
        if len(paths) > 1:
            raise ValueError(
                f"One recipe at a time.\n  Got {', '.join(paths)}.\n"
                "  Name other data behind the recipe: --data_path PATH."
            )
        return Recipe.from_yaml(paths[0], [*words, "--output_dir", "unused"])
    if not any(word.split("=")[0].replace("-", "_") == "__model_name_or_path" for word in words):
        raise ValueError(
            f"The tokenizer for {paths[0]!r} is not known.\n  Got neither a recipe nor --model.\n"
            f"  Example: oomb data {shlex.quote(paths[0])} --model Qwen/Qwen2.5-7B-Instruct"
        )
    return Recipe.from_options(words, data_path=paths if len(paths) > 1 else paths[0], output_dir="unused")


def _has_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
