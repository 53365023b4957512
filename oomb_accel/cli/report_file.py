"""Where a command writes its report as JSON: a file, or standard output."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

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
        target.write_text(text, encoding="utf-8")


def check_writable(path: Path | None) -> None:
    """Refuse a place where no report can be written, before the work that it reports.

    Raises:
        ValueError: a folder, or a file in a folder that does not exist.
    """
    if path is None or path == STDOUT:
        return
    if path.is_dir():
        raise ValueError(f"The report cannot be written.\n  {path} is a folder.\n  Use --json {path / 'report.json'}.")
    if not path.parent.is_dir():
        raise ValueError(
            f"The report cannot be written.\n  There is no folder {path.parent}.\n  Use --json {path.name}, or make it."
        )
