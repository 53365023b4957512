"""``oomb train RECIPE [--setting value ...]``."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import difflib
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oomb_accel.cli.options import check_recipe_is_first
from oomb_accel.columns import folded
from oomb_accel.config import OombConfig, unknown_message
from oomb_accel.reading import shown

if TYPE_CHECKING:
    from oomb_accel.training.recipe import Recipe

USAGE = """usage: oomb train RECIPE.yaml [--setting value ...]

Options override the recipe, in either spelling: --lora_r 8, --lora-r=8, --oomb.chunk_tokens 512.
On several GPUs: accelerate launch -m oomb_accel train RECIPE.yaml

  --resume [CHECKPOINT]  go on from the latest checkpoint in output_dir, or from this one; the
                         same as --resume_from_checkpoint latest. A run saves its settings:
                         oomb train OUT/config.yaml --resume
  --dry_run              read recipe, data and the model's config, and say what would be done,
                         whether it fits and what to change if not; exit code 1 then. No weights
                         are loaded, nothing is written
  --gpu NAME, --gpus N   what the dry run is for, if not for this machine and launch
  --json                 the summary of the run, or the plan, as JSON on standard output; all else
                         goes to stderr
  --debug                tracebacks of all errors

Ctrl-C and SIGTERM stop a run: it saves what is done and says how to go on. A second Ctrl-C stops
it at once.
"""


def main(arguments: Sequence[str]) -> int:
    """Run a recipe.

    Returns: 0 when all steps were done, 1 when a dry run finds that it does not fit, 2 when called without a recipe.

    Raises:
        ValueError, RuntimeError: as :func:`oomb_accel.training.train`.
    """
    if "-h" in arguments or "--help" in arguments:
        print(folded(_help()))
        return 0
    if arguments and not Path(arguments[0]).is_file():
        check_recipe_is_first("oomb train", arguments)
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            "Give the path of a recipe first.\n"
            f"  Got {shown(arguments[0]) if arguments else 'nothing'}.\n"
            "  Write oomb train RECIPE.yaml; configs/recipes has examples, oomb train --help says more."
        )
    switches, words = _split(arguments[1:])
    from oomb_accel.training.recipe import Recipe

    recipe = Recipe.from_yaml(arguments[0], words)
    if switches.dry_run:
        return _dry_run(recipe, switches)
    from oomb_accel.training.loop import train  # a wrong recipe is refused before transformers is imported

    with contextlib.redirect_stdout(sys.stderr) if switches.json else contextlib.nullcontext():
        summary = train(recipe)
    atexit.register(_leave_group)
    if switches.json and _is_first_process():
        print(json.dumps(summary.to_dict(), indent=2))
    return 0


def _leave_group() -> None:
    """Before the interpreter goes: threads of the process group that outlive it have ended finished runs by SIGABRT."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@dataclasses.dataclass(slots=True)
class Switches:
    """What is said about the command, not about the run."""

    dry_run: bool = False
    json: bool = False
    gpu: str | None = None
    gpus: int | None = None


_SWITCHES = ("resume", "dry_run", "json", "gpu", "gpus")


def _split(words: Sequence[str]) -> tuple[Switches, list[str]]:
    """Switches, and the options that are settings.

    Raises:
        ValueError: a switch that is misspelt, without its value, or with one that is not allowed.
    """
    switches, settings, left = Switches(), [], list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        has_value = bool(equals) or bool(left and not left[0].startswith("--"))
        if not flag.startswith("--") or name not in _SWITCHES:
            _check_is_no_switch(flag, name)
            settings.append(word)
            if flag.startswith("--") and has_value and not equals:
                settings.append(left.pop(0))  # a value is no switch, whatever it looks like
        elif name in ("dry_run", "json"):
            setattr(switches, name, True)
        elif name == "resume":
            checkpoint = (value if equals else left.pop(0)) if has_value else "latest"
            settings.append(f"--resume_from_checkpoint={checkpoint}")
        elif not has_value:
            raise ValueError(f"{flag} on the command line has no value.\n  Got nothing behind it.\n  {_example(name)}")
        else:
            value = value if equals else left.pop(0)
            if name == "gpus" and not (value.isdecimal() and int(value)):
                raise ValueError(
                    f"{flag} on the command line has a value that is not allowed.\n  Got {value!r}.\n  {_example(name)}"
                )
            setattr(switches, name, int(value) if name == "gpus" else value)
    if not switches.dry_run and (switches.gpu or switches.gpus):
        raise ValueError(
            "--gpu and --gpus are for a dry run.\n  Got one of them without --dry_run.\n"
            "  Add --dry_run; to train on several GPUs: accelerate launch -m oomb_accel train RECIPE.yaml"
        )
    return switches, settings


def _check_is_no_switch(flag: str, name: str) -> None:
    """Refuse a misspelt switch, which would be taken for a setting that lacks its value."""
    from oomb_accel.training.other_names import OTHER_NAMES
    from oomb_accel.training.recipe import Recipe

    settings = [field.name for field in dataclasses.fields(Recipe)]
    if not flag.startswith("--") or "." in name or name in settings or name in OTHER_NAMES:
        return
    near = difflib.get_close_matches(name[:100].lower(), [*settings, *_SWITCHES], n=1)
    if near and near[0] in _SWITCHES:
        known = [f"--{known}" for known in (*settings, *_SWITCHES)]
        raise ValueError(unknown_message("option", flag, known, "on the command line", nearest=f"--{near[0]}"))


def _example(name: str) -> str:
    return "Write --gpu h100." if name == "gpu" else "Write --gpus 8."


def _dry_run(recipe: Recipe, switches: Switches) -> int:
    from oomb_accel.cli.train_plan import plan_text
    from oomb_accel.training.dry_run import plan_training

    with contextlib.redirect_stdout(sys.stderr):  # libraries may say something about tokenizers
        plan = plan_training(recipe, gpu=switches.gpu, num_gpus=switches.gpus)
    if _is_first_process():
        print(json.dumps(plan.as_dict(), indent=2) if switches.json else plan_text(plan))
    return 0 if plan.fits else 1


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _help() -> str:
    from oomb_accel.training.recipe import Recipe

    parts = [USAGE, "settings:"]
    parts += _describe(Recipe, "--")
    parts += ["", "settings of the recurrence:", *_describe(OombConfig, "--oomb.")]
    return "\n".join(parts)


def _describe(settings: type, prefix: str) -> list[str]:
    """One paragraph per field: its name, default and the docstring under it."""
    from oomb_accel.training.settings import Setting, field_docs

    kinds, docs = Setting.of(settings), field_docs(settings)
    lines: list[str] = []
    for field in dataclasses.fields(settings):
        if field.name in docs and field.default is not dataclasses.MISSING:
            default = "required" if field.default == "" else f"default: {field.default!r}"
            lines.append(f"  {prefix}{field.name}: {kinds[field.name].spell()} ({default})")
            text = docs[field.name].replace("`", "")
            lines.append(textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return lines
