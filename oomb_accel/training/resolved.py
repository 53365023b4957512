"""The recipe of a run as it was started: every setting, with where it came from, as yaml that starts the run again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from oomb_accel.training.recipe import Recipe

OF_ONE_START = ("overwrite_output_dir", "resume_from_checkpoint")
"""What one start was told about the run before it: the next start is told anew."""

_HEAD = """\
# Every setting of this run and where it came from. Start it again in the same folder, with one of these:
#   oomb train {path} --resume
#   oomb train {path} --output_dir ANOTHER_FOLDER
#   oomb train {path} --overwrite_output_dir
"""


def resolved_yaml(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """The text of the file.

    Args:
        origins: place of each setting of the recurrence that somebody wrote down; others have their defaults.
    """
    values = {name: value for name, value in recipe.to_dict().items() if name not in OF_ONE_START}
    block = values.pop("oomb")
    lines = [line for name, value in values.items() for line in _lines({name: value}, _source(recipe, name))]
    lines.append("oomb:")
    for name, value in block.items():
        place = origins.get(name, "default")
        lines += [f"  {line}" for line in _lines({name: value}, _block_source(place))]
    return _HEAD.format(path=shlex.quote(f"{recipe.output_dir}/config.yaml")) + "\n".join(lines) + "\n"


def _source(recipe: Recipe, name: str) -> str:
    if name in recipe.flags:
        return "flag"
    return "recipe" if name in recipe.given else "default"


def _block_source(place: str) -> str:
    if place.startswith("--"):
        return "flag"
    return "recipe" if place == "the oomb block of the recipe" else place


def _lines(item: dict[str, Any], source: str) -> Iterator[str]:
    """One setting; its source stands behind the first line, or above a text of several lines."""
    first, *rest = yaml.safe_dump(item, sort_keys=False, width=1 << 20, allow_unicode=True).rstrip("\n").split("\n")
    if rest and not first.endswith(":"):
        yield f"# {source}"
        yield first
    else:
        yield f"{first}  # {source}"
    yield from rest
