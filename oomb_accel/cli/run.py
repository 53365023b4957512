"""``oomb run [--oomb_config PRESET] [--oomb.NAME VALUE ...] SCRIPT [ARGUMENTS ...]``."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

from oomb_accel.columns import folded
from oomb_accel.config import unknown_message
from oomb_accel.sources import (
    PRESET_VARIABLE,
    from_deepspeed,
    from_text,
    gather,
    launched_config,
    remember_option,
    resolve,
    setting_names,
    variable_of,
)

USAGE = """usage: oomb run [--oomb_config PRESET.yaml] [--oomb.NAME VALUE ...] [--json]
                SCRIPT.py [ARGUMENTS ...]

Runs a training script unchanged, with chunk recurrence switched on for the model that it trains
with Trainer, SFTTrainer, Accelerate or DeepSpeed. Settings come from these options, from OOMB_
variables, from the preset, and from the "oomb" block of the DeepSpeed config; without any the
defaults hold. On several GPUs:
  accelerate launch --config_file configs/accelerate/zero2.yaml -m oomb_accel run SCRIPT.py ...
With --json the last line of standard output says what came of it:
  {"exit_code": 0, "steps_in_chunks": 12}
"""


def main(arguments: Sequence[str]) -> int:
    """Run a script.

    Returns: 0 when it trained in chunks, 1 when it ended without, 2 when called without a script, else the script's
    own exit code.

    Raises:
        ValueError: wrong or contradictory settings, or nothing to switch on.
    """
    if "-h" in arguments[:1] or "--help" in arguments[:1]:
        print(folded(USAGE))
        return 0
    options, as_json, words = _split(list(arguments))
    if not words:
        raise ValueError(
            "There is nothing to run.\n  Got no script.\n"
            "  Please give the path of a script behind the options; oomb run --help says more."
        )
    if not Path(words[0]).is_file():
        raise ValueError(
            f"The script {words[0]!r} does not exist.\n  Looked in {os.getcwd()}.\n"
            "  Give its path behind the options; options need a value each: --oomb.deterministic true"
        )
    _into_environment(options, os.environ)
    wanted = _check_requested(words[1:])
    from oomb_accel.integrations.unmodified import install_everywhere  # wrong settings are refused before this import

    steps = install_everywhere()
    code = _run(words)
    if code == 0 and steps() == 0 and wanted:
        print(
            f"oomb run: {words[0]} ended without a training step in chunks.\n"
            "  A model is switched on in Trainer, accelerator.prepare or deepspeed.initialize, and trains in chunks "
            "where a batch has labels; none did.\n"
            "  Use one of these, with labels in the batch.",
            file=sys.stderr,
        )
        code = 1
    if as_json:
        print(json.dumps({"exit_code": code, "steps_in_chunks": steps()}), flush=True)
    return code


def _split(arguments: list[str]) -> tuple[list[tuple[str, str]], bool, list[str]]:
    """Our options as pairs of name and text, whether the end is wanted as JSON, and the rest from the script on."""
    options: list[tuple[str, str]] = []
    as_json = False
    while arguments and arguments[0].startswith("-"):
        flag, equals, text = arguments.pop(0).partition("=")
        if flag == "--json":
            as_json = True
            continue
        name = flag.lstrip("-").replace("-", "_")
        known = ["oomb_config", *(f"oomb.{setting}" for setting in setting_names())]
        if name not in known:
            names = ["--json", *(f"--{item}" for item in known)]
            raise ValueError(unknown_message("option", flag, names, "on the command line"))
        if not equals:
            if not arguments:
                raise ValueError(
                    f"{flag} on the command line has no value.\n  Got nothing behind it.\n  Write {flag} VALUE."
                )
            text = arguments.pop(0)
        options.append((name, text))
    return options, as_json, arguments


def _into_environment(options: list[tuple[str, str]], environ: MutableMapping[str, str]) -> None:
    """Options become ``OOMB_`` variables, which every entry point reads and child processes inherit."""
    for name, text in options:
        if name == "oomb_config":
            variable, same = PRESET_VARIABLE, lambda old, new: old == new
        else:
            setting = name.removeprefix("oomb.")
            variable, same = variable_of(setting), _comparison(setting, f"--{name}")
        old = environ.get(variable)
        if old is not None and not same(old, text):
            raise ValueError(
                f"--{name} and {variable} contradict each other.\n"
                f"  Got --{name} {text} on the command line, and {variable}={old} before it.\n"
                f"  Remove one of them, or write {text} in both."
            )
        environ[variable] = text
        remember_option(variable, text, f"--{name}")


def _comparison(setting: str, place: str) -> Callable[[str, str], bool]:
    return lambda old, new: bool(from_text(setting, old, variable_of(setting)) == from_text(setting, new, place))


def _check_requested(script_arguments: list[str]) -> bool:
    """Whether chunk recurrence is to be switched on: ``enabled: false`` asks for a plain run. Contradictions between
    settings come out here, and a run without any settings is given the defaults.
    """
    configs = [launched_config()]
    # Trainer's --deepspeed ds.json and the like.
    paths = [word.partition("=")[2] or word for word in script_arguments]
    configs += [path for path in paths if path.endswith(".json") and _has_block(path)]
    requested = [source for item in configs for source in gather(item)]
    if not requested:
        os.environ[variable_of("enabled")] = "true"
        remember_option(variable_of("enabled"), "true", "oomb run")
    resolved = [resolve(*gather(item)) for item in configs]  # all of them: each may hold a contradiction
    return any(one.config.enabled for one in resolved)


def _has_block(path: str) -> bool:
    return Path(path).is_file() and _is_deepspeed(path) and bool(from_deepspeed(path))


def _is_deepspeed(path: str) -> bool:
    """Whether a JSON file looks like a DeepSpeed config; a script may read any."""
    return '"zero_optimization"' in Path(path).read_text(encoding="utf-8", errors="replace")


def _run(words: list[str]) -> int:
    """The script as ``python SCRIPT ARGUMENTS`` would run it; returns its exit code."""
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0
