"""``oomb train RECIPE [--setting value ...]``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Sequence

from oomb_accel.config import OombConfig

USAGE = """usage: oomb train RECIPE.yaml [--setting value ...]

Options override the recipe, in either spelling: --lora_r 8, --lora-r=8, --oomb.chunk_tokens 512.
On several GPUs: accelerate launch -m oomb_accel train RECIPE.yaml
"""


def main(arguments: Sequence[str]) -> int:
    """Run a recipe.

    Returns: 0 when all steps were done, 2 when called without a recipe.

    Raises:
        ValueError, RuntimeError: as :func:`oomb_accel.training.train`.
    """
    if "-h" in arguments or "--help" in arguments:
        print(_help())
        return 0
    if not arguments or arguments[0].startswith("-"):
        print(f"{USAGE}\noomb train: give the path of a recipe first; configs/ has examples.", file=sys.stderr)
        return 2
    from oomb_accel.training.recipe import Recipe

    recipe = Recipe.from_yaml(arguments[0], arguments[1:])
    from oomb_accel.training.loop import train  # a wrong recipe is refused before transformers is imported

    train(recipe)
    return 0


def _help() -> str:
    from oomb_accel.training.recipe import Recipe

    parts = [USAGE, "settings:"]
    parts += _describe(Recipe, "--")
    parts += ["", "settings of the recurrence:", *_describe(OombConfig, "--oomb.")]
    return "\n".join(parts)


def _describe(settings: type, prefix: str) -> list[str]:
    """One paragraph per field: its name, default and the docstring under it, read from the source."""
    from oomb_accel.training.settings import Setting

    lines: list[str] = []
    kinds = Setting.of(settings)
    defaults = {
        item.name: item.default for item in dataclasses.fields(settings) if item.default is not dataclasses.MISSING
    }
    (tree,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(tree, ast.ClassDef)
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if name in defaults and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = inspect.cleandoc(str(following.value.value)).replace("``", "").replace("\n", "\n      ")
                default = "required" if defaults[name] == "" else f"default: {defaults[name]!r}"
                lines.append(f"  {prefix}{name}: {kinds[name].spell()} ({default})\n      {text}")
    return lines
