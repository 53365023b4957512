"""A folder or a Git checkout as one document: which files, in which order, and what lies between them."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oomb_accel.data.text import text_chunks, why_skipped
from oomb_accel.spelling import called


@dataclass(slots=True)
class Listing:
    """The files of a folder that are read, sorted by path."""

    folder: Path
    files: list[str] = field(default_factory=list)
    """Relative, with ``/``."""
    num_bytes: int = 0
    digest: str = ""
    """Of all paths and contents."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many files were left out, by reason."""
    rule: str = ""
    """How files were chosen, for a note."""

    def note(self) -> str:
        """What was read and what was not."""
        left_out = f"skipped {self.skipped.total()}" + (f" ({said(self.skipped)})" if self.skipped else "")
        rule = f"; {self.rule}" if self.rule else ""
        return f"{self.folder}: one document of {len(self.files)} files; {left_out}{rule}"


def list_folder(folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Listing:
    """Look at every file once: which ones are text, and what they hold.

    Args:
        folder: a folder; in a Git checkout only tracked files are read.
        include: globs of paths; without them all files.
        exclude: globs of paths that are left out, also where included.

    Raises:
        ValueError: there is no text.
    """
    listing = Listing(folder)
    names, listing.rule = file_names(folder)
    digest = hashlib.sha256()
    for name in names:
        if not chosen(name, include, exclude):
            listing.skipped["by include and exclude"] += 1
            continue
        try:
            data = (folder / name).read_bytes()
        except OSError:
            listing.skipped["unreadable"] += 1
            continue
        reason = why_skipped(data)
        if reason is not None:
            listing.skipped[reason] += 1
            continue
        listing.files.append(name)
        listing.num_bytes += len(data)
        digest.update(f"{name}\0{len(data)}\0".encode("utf-8", "surrogateescape"))
        digest.update(data)
    listing.digest = digest.hexdigest()
    if not listing.files:
        raise ValueError(
            f"The folder {str(folder)!r} holds no text.\n"
            f"  Skipped: {said(listing.skipped) or 'no files'}; hidden ones are not read.\n"
            f"  Set {called('data_path')} to a folder with UTF-8 text files."
        )
    return listing


def said(skipped: Counter[str]) -> str:
    """Counts by reason, the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())


def folder_chunks(listing: Listing) -> Iterator[str]:
    """The text of the document: each file behind a line with its path."""
    for number, name in enumerate(listing.files):
        yield ("\n" if number else "") + f"==== {_printable(name)} ====\n"
        yield from text_chunks(listing.folder / name)


def chosen(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a file is read: it fits one of the globs to include, if there are any, and none of those to exclude."""
    return (not include or any(matches(name, glob) for glob in include)) and not any(matches(name, g) for g in exclude)


def matches(name: str, glob: str) -> bool:
    """Whether a path fits a glob. Without a slash it is compared with each part of the path (``tests``, ``*.py``);
    with one, with the whole path or its beginning (``docs/``, ``src/*.py``); ``*`` also stands for slashes."""
    if "/" not in glob.rstrip("/"):
        parts = name.split("/")
        return any(fnmatch.fnmatchcase(part, glob.rstrip("/")) for part in (parts[:-1] if glob[-1:] == "/" else parts))
    pattern = glob.removeprefix("./").removeprefix("/")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.rstrip("/") + "/*")


def _visible_files(folder: Path) -> list[str]:
    """Paths of all files below a folder, relative, without hidden ones and hidden folders."""
    found = []

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"The folder {error.filename!r} cannot be read.\n  {error.strerror}.\n"
            f"  Make it readable, or set {called('data_path')} to the folders in it that are."
        )

    for root, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name).relative_to(folder).as_posix() for name in files if not name.startswith(".")]
    return found


def file_names(folder: Path) -> tuple[list[str], str]:
    """Paths of all files that count, sorted, and how they were chosen, for a note."""
    names, rule = _names(folder)
    return sorted(names), rule


def _in_checkout(folder: Path) -> bool:
    """Whether the folder is a Git checkout or lies in one."""
    return any((parent / ".git").exists() for parent in (folder.resolve(), *folder.resolve().parents))


def _names(folder: Path) -> tuple[list[str], str]:
    """Paths of the files to look at, and how they were chosen."""
    if not _in_checkout(folder):
        return _visible_files(folder), ""
    try:
        # A checkout's own settings may name a program to run: not here.
        command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-z", "--cached"]
        done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        reason = said.decode(errors="replace").strip().splitlines()[:1] or ["git failed"]
        return _visible_files(folder), f"all files, not only tracked ones, as Git said: {reason[0]}"
    tracked = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    if not tracked:  # a folder that the checkout around it does not know
        return _visible_files(folder), ""
    links = {name for name in tracked if (folder / name).is_symlink()}  # to Git a link is no text
    there = [name for name in dict.fromkeys(tracked) if name not in links and not (folder / name).is_dir()]
    return there, "only files tracked by Git"


def _printable(name: str) -> str:
    """A path that is no UTF-8 with question marks."""
    return name.encode("utf-8", "replace").decode()
