"""The file that a command writes its report to."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path, option: str = "--json", example: str = "report.json") -> None:
    """Refuse a place where no report can be written, before the work that it reports.

    Args:
        option: that gave the path; for the message.
        example: name of a file, for the message.

    Raises:
        ValueError: a folder, or a file in a folder that does not exist.
    """
    if path.is_dir():
        raise ValueError(f"The report cannot be written.\n  {path} is a folder.\n  Use {option} {path / example}.")
    if not path.parent.is_dir():
        raise ValueError(
            f"The report cannot be written.\n  There is no folder {path.parent}.\n"
            f"  Use {option} {path.name}, or make it."
        )
