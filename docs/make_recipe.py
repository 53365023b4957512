"""Writes docs/recipe.md, the table of a recipe's settings, from the fields of `Recipe` and the docstrings under them.

python docs/make_recipe.py            write it
python docs/make_recipe.py --check    exit code 1 if it would change
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from made_page import write_or_check

from oomb_accel.training import Recipe
from oomb_accel.training.settings import Setting, field_docs

PAGE = Path(__file__).with_name("recipe.md")
HEAD = """# Settings of a recipe

Made from the docstrings by `python docs/make_recipe.py`; do not edit. A recipe is a yaml file with one mapping of these
keys; on the command line each of them is an option, in either spelling (`--lora_r 8`, `--lora-r=8`), that goes over the
file. `oomb train --help` prints the same. Keys that another trainer has: [migration](migration.md). What data may be:
[data](data.md). Recipes to copy: [configs](../configs/README.md).

| key | takes | default | |
|---|---|---|---|
"""
TAIL = """
The keys of the `oomb` block: [settings](settings.md#all-settings); on the command line `--oomb.chunk_tokens 4096`.
"""


def page() -> str:
    """The whole page."""
    settings, docs = Setting.of(Recipe), field_docs(Recipe)
    rows = [
        f"| `{field.name}` | {_takes(settings[field.name])} | {_default(field)} | {docs[field.name]} |"
        for field in dataclasses.fields(Recipe)
        if field.init
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL


def _takes(setting: Setting) -> str:
    return setting.spell() if setting.name != "oomb" else "a mapping"


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING:
        return "all defaults"
    if field.default == "":
        return "required"
    words = {None: "`null`", True: "`true`", False: "`false`"}
    return words[field.default] if field.default is None or isinstance(field.default, bool) else f"`{field.default}`"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
