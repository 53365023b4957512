"""Settings that become names of files: what no file system takes is refused before anything is done."""

from __future__ import annotations

import os
from typing import TypeVar

from oomb_accel.reading import shown
from oomb_accel.spelling import called

MOST_BYTES = 255
"""Of one name, on the usual file systems."""

Path = TypeVar("Path", str, list[str], None)


def checked_path(name: str, value: Path) -> Path:
    """The path or paths, with ``~`` written out.

    Args:
        name: of the setting, for messages.

    Raises:
        ValueError: no file can have this name.
    """
    if isinstance(value, list):
        return [_checked(name, item) for item in value]
    return value if value is None else _checked(name, value)


def _checked(name: str, value: str) -> str:
    problem = _problem(value)
    if problem is not None:
        raise ValueError(
            f"{called(name)} can be no name of a file.\n  Got {shown(value)}: {problem}.\n"
            f"  Set {called(name)} to a path of ordinary characters."
        )
    return os.path.expanduser(value)


def _problem(value: str) -> str | None:
    if "\0" in value:
        return "it holds a zero byte"
    try:
        longest = max(len(part.encode()) for part in value.split("/"))
    except UnicodeEncodeError:
        return "it holds half of a character"
    if longest > MOST_BYTES:
        return f"a part of it has {longest} bytes, the most is {MOST_BYTES}"
    if value.startswith("~") and os.path.expanduser(value) == value:
        return f"there is no user {value.split('/')[0]}"
    return None
