"""Writing to file systems that may refuse: one error for users whatever library wrote, and the modes people expect."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oomb_accel.reading import in_a_line

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_IN_WORDS = ("No space left", "requested and")
"""Without a number; the second is numpy's, of a file that became shorter than its array."""
_NEARLY_FULL = 1 << 20
"""Free bytes below which a write that failed without a reason failed for room."""
_OF_TORCH = ("PytorchStreamWriter", "unexpected pos")
"""What torch says when it cannot write; it leaves out why."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers end the message of an error of the system."""


class CannotWriteError(RuntimeError):
    """A file system did not take what was to be written. The command line exits with 2: the user has to change it."""


def is_of_file_system(error: BaseException) -> bool:
    """Whether a write failed, also through torch, safetensors or tokenizers, which raises a plain ``Exception``."""
    if isinstance(error, (OSError, CannotWriteError)) or type(error).__name__ == "SafetensorError":
        return True
    return any(words in str(error) for words in _OF_TORCH) or _OF_RUST.search(str(error)) is not None


def is_full(error: BaseException, place: Path) -> bool:
    """Whether it failed for room.

    Args:
        place: where it was written, with what there is of it still there.
    """
    number = getattr(error, "errno", None)
    found = _OF_RUST.search(str(error))
    if number is None and found is not None:
        number = int(found[1])
    if number in _FULL or any(words in str(error) for words in _FULL_IN_WORDS):
        return True
    if number is not None:
        return False
    try:
        return shutil.disk_usage(nearest(place)).free < _NEARLY_FULL
    except OSError:
        return False


def reason_of(error: OSError) -> str:
    """Why the system refused, without its numbers, and which file where it is known."""
    file = f" ({error.filename})" if isinstance(error.filename, str) else ""
    return f"{error.strerror or str(error)}{file}"


def nearest(place: Path) -> Path:
    """The place, or the nearest folder above it that exists."""
    return next(folder for folder in (place, *place.absolute().parents) if folder.exists())


def refusal_of(folder: Path) -> str | None:
    """Why a folder, or the nearest one above it, takes no new files; None where it does. Leaves no trace."""
    there = nearest(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".oomb-", dir=there):
            return None
    except OSError as error:
        return f"{there}: {error.strerror}"


@contextmanager
def saying(what: str, place: Path, remedy: str) -> Iterator[None]:
    """Inside, something is written.

    Args:
        what: with its verb's subject, as in ``"The report"``.
        remedy: as a sentence.

    Raises:
        CannotWriteError: the file system did not take it.
    """
    try:
        yield
    except Exception as error:  # tokenizers raises nothing narrower
        if not is_of_file_system(error):
            raise
        full = ": the disk is full" if is_full(error, place) else ""
        raise CannotWriteError(f"{what} cannot be written{full}.\n  {place}: {_why(error)}.\n  {remedy}") from error


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return reason_of(error)
    # A message of ours has the reason in its second line.
    said = str(error).splitlines()[1:2] if isinstance(error, CannotWriteError) else [in_a_line(error)]
    return "".join(said).strip().removesuffix(".")


def give_usual_modes(folder: Path) -> None:
    """Let the files in a folder, and below, have the mode that new files get here: what a library writes through a
    temporary file of its own is for the owner only, whatever the umask says."""
    probe = folder / f".oomb-mode-{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for item in folder.rglob("*"):
        if item.is_file() and not item.is_symlink():
            item.chmod(mode)
