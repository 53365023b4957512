"""Where a command writes: its report as JSON, into a file or to standard output, and its plots, into a folder."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from oomb_accel.writing import refusal_of, saying

STDOUT = Path("-")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """``--json [FILE]``."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the report as JSON to this file beside the table, or without a file (as the last option, or as "
        "--json=-) to standard output instead",
    )


def tables_beside(target: Path | None) -> AbstractContextManager[Any]:
    """Inside, what is printed for people goes to stderr where standard output is for JSON."""
    return contextlib.redirect_stdout(sys.stderr) if target == STDOUT else contextlib.nullcontext()


def write_json(report: Any, target: Path | None) -> None:
    """Write where it was asked for, if it was."""
    text = json.dumps(report, indent=2) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
    elif target is not None:
        with saying("The report", target.parent, f"Use --json {target.name}, or a folder of your own."):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a place where no report can be written, before the work that it reports. A folder that is missing is no
    reason: it is made when there is something to write.

    Args:
        option: that names the place.

    Raises:
        ValueError: a folder, or a file in a folder that cannot be made or written.
    """
    if path is None or path == STDOUT:
        return
    if path.is_dir():
        raise ValueError(
            f"The report cannot be written.\n  {path} is a folder.\n  Use {option} {path / 'report.json'}."
        )
    _check_folder(path.parent, "report", f"{option} {path.name}")


def check_plots(folder: Path, option: str, without: str) -> None:
    """Refuse plots that cannot be drawn, or not be written into a folder, which need not be there yet.

    Args:
        option: that names the folder.
        without: how to do without plots, as a sentence goes on.

    Raises:
        ValueError: matplotlib is not installed, or the folder cannot be made or written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"The plots cannot be drawn: matplotlib is not installed.\n  Wanted in {folder}.\n"
            f"  Install it with pip install 'oomb_accel[report]', or {without}."
        )
    _check_folder(folder, "plots", f"{option} .")


def _check_folder(folder: Path, what: str, remedy: str) -> None:
    """Whether a folder, or the nearest one above it, takes new files."""
    refusal = refusal_of(folder)
    if refusal is not None:
        raise ValueError(f"The {what} cannot be written.\n  {refusal}.\n  Use {remedy}, or a folder of your own.")
