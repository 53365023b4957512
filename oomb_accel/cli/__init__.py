"""The command line: ``oomb COMMAND ...``. Each command is a module with ``main(arguments) -> exit code``."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from oomb_accel.cli.quiet import hide_noise, wants_everything
from oomb_accel.columns import aligned, folded
from oomb_accel.config import unknown_message
from oomb_accel.reading import in_a_line
from oomb_accel.writing import CannotWriteError

COMMANDS = {
    "train": "fine-tune a model as a recipe says",
    "run": "run a training script unchanged, with chunk recurrence switched on in it",
    "data": "what a recipe would train on: documents, lengths, label masks",
    "eval": "loss by context length and position, and planted facts, with and without an adapter",
    "merge": "write a model with its adapter merged in",
    "estimate": "memory, time and cost of a training step, and what fits, without a GPU",
    "report": "what a run did: loss, speed and memory as a table and as plots",
    "verify": "check chunk recurrence against full attention on your own model",
    "bench": "measure kernels and whole training steps on this GPU",
    "env": "versions, devices and limits: what a bug report needs",
}
"""Name of each command, which is also the module in this package, and what it does."""

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done; the run or a check failed; something that the user gave is wrong; Ctrl-C (143: SIGTERM)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: those behind the program's name; ``sys.argv`` when None.

    Returns: the exit code: 0 done, 1 failed, 2 wrongly called or with wrong settings or data, 130 interrupted.
    """
    debug, words = _take_debug(list(sys.argv[1:] if arguments is None else arguments))
    if not words or words[0] in ("-h", "--help"):
        print(folded(_usage()))
        return OK if words else MISUSED
    if words[0] not in COMMANDS:
        print(f"oomb: {unknown_message('command', words[0], list(COMMANDS), 'on the command line')}", file=sys.stderr)
        return MISUSED

    debug = debug or wants_everything(os.environ)
    if not debug and words[0] != "run":  # what a script of the user's own hears is its own affair
        hide_noise()

    def command() -> int:  # the import as well: it takes seconds, in which somebody may press Ctrl-C
        return int(importlib.import_module(f"oomb_accel.cli.{words[0]}").main(words[1:]))

    return run_guarded(command, f"oomb {words[0]}", debug=debug)


def run_guarded(command: Callable[[], int], name: str, *, debug: bool = False) -> int:
    """Run ``command`` and turn its errors into messages and exit codes.

    An error that this package raised on purpose is for the user: its message is printed alone. Anything else
    is a defect, here or elsewhere, and keeps its traceback.

    Args:
        debug: show the traceback of every error.
    """
    try:
        return command()
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":  # of several processes one says it
            print(f"{name}: interrupted", file=sys.stderr)
        return int(getattr(stop, "exit_code", INTERRUPTED))
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        message = _message(error)
        if debug or message is None:
            traceback.print_exc()
        if message is not None:
            print(f"{name}: {message}", file=sys.stderr)
        return MISUSED if message is not None and isinstance(error, (ValueError, CannotWriteError)) else FAILED


def _message(error: Exception) -> str | None:
    """What the user needs to know; None for a defect."""
    if _is_of_ours(error):
        return str(error)
    if _is_out_of_memory(error):
        return _OUT_OF_MEMORY.format(error=in_a_line(error))
    if isinstance(error, (ValueError, RuntimeError)) and _raised_here(error):
        return str(error)
    return None


def _take_debug(words: list[str]) -> tuple[bool, list[str]]:
    """Whether tracebacks are wanted, and the other words. What stands behind the script of ``oomb run`` is the
    script's own."""
    end = 2 if words[:1] == ["run"] else len(words)
    rest = [word for index, word in enumerate(words) if word != "--debug" or index >= end]
    return len(rest) < len(words), rest


_OUT_OF_MEMORY = """The GPU ran out of memory.
  {error}
  Set a smaller oomb.chunk_tokens, oomb.keep_outputs: false, or oomb.page_grad_dtype: bfloat16."""


def _is_of_ours(error: Exception) -> bool:
    """Whether the error is of a type that this package made, such as that of memory that ran out within a step."""
    return type(error).__module__.split(".")[0] == "oomb_accel"


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _raised_here(error: Exception) -> bool:
    """Whether the innermost frame belongs to these packages."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).split(".")[0] in (
        "oomb_accel",
        "oomb_kernels",
    )


def _usage() -> str:
    return (
        "usage: oomb COMMAND ...\n\ncommands:\n"
        + aligned([(f"  {name}", what) for name, what in COMMANDS.items()], left=(0, 1))
        + (
            "\n\noomb COMMAND --help says more. All commands take --json and --debug (tracebacks of all\n"
            "errors, and all that libraries say; also OOMB_DEBUG=1).\n"
            "exit codes: 0 done, 1 the run or a check failed, 2 wrong settings, files, options or a place\n"
            "that cannot be written, 130 Ctrl-C, 143 SIGTERM"
        )
    )
