"""The file that a command writes its report to."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path) -> None:
    """Refuse a place where no report can be written, before the work that it reports.

    Raises:
        ValueError: a folder, or a file in a folder that does not exist.
    """
    if path.is_dir():
        raise ValueError(f"The report cannot be written.\n  {path} is a folder.\n  Use --json {path / 'report.json'}.")
    if not path.parent.is_dir():
        raise ValueError(
            f"The report cannot be written.\n  There is no folder {path.parent}.\n  Use --json {path.name}, or make it."
        )
