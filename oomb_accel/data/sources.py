"""What a data path stands for: text, a table, a folder, or a dataset of the hub or on disk."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oomb_accel.data.folder import chosen, file_names, folder_chunks, list_folder, said
from oomb_accel.data.rows import READERS, Numbered, optional, read_rows
from oomb_accel.data.settings import DataSettings
from oomb_accel.data.text import BLOCK_BYTES, text_chunks, why_skipped
from oomb_accel.hub import unreachable
from oomb_accel.reading import in_a_line
from oomb_accel.spelling import called

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?")
_NAMED = 3
"""Most empty files of a list that a note names."""
_BESIDE_TABLES = {"readme", "license", "licence", "dataset_infos"}
"""Names, without suffix, of files that may lie beside tables and are no data."""


@dataclass(frozen=True, slots=True)
class Source:
    """Something that documents come from: either one text, or rows."""

    label: str
    """Name of a document of it, or its beginning."""
    digest: str
    """Of everything in it."""
    num_bytes: int
    """About so much text, for the time left."""
    chunks: Callable[[], Iterator[str]] | None = None
    """The text, from its beginning."""
    rows: Callable[[], Iterator[Numbered]] | None = None
    """The rows, from the first."""
    note: str | None = None


def find_sources(settings: DataSettings) -> list[Source]:
    """The sources of all paths, in order; of several, files with nothing in them are left out.

    Raises:
        ValueError: there is nothing at a path, or nothing that can be read.
    """
    empty = [path for path in settings.paths if _is_empty(Path(path).expanduser())]
    paths = [path for path in settings.paths if path not in empty] or settings.paths
    sources = [source for path in paths for source in _sources_of(path, settings)]
    if 0 < len(empty) < len(settings.paths):
        skipped = f"skipped {len(empty)} ({len(empty)} empty): {', '.join(empty[:_NAMED])}"
        skipped += ", ..." if len(empty) > _NAMED else ""
        sources[0] = replace(sources[0], note="; ".join(filter(None, (sources[0].note, skipped))))
    return sources


def _is_empty(path: Path) -> bool:
    """Whether it is a file of white space; what cannot be read is refused elsewhere."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            block = file.read(BLOCK_BYTES).removeprefix(codecs.BOM_UTF8)
            while block and not block.strip():
                block = file.read(BLOCK_BYTES)
    except OSError:
        return False
    return not block


def _sources_of(name: str, settings: DataSettings) -> list[Source]:
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, settings)
    if path.is_file():
        return [_file(path)]
    if path.exists():
        raise ValueError(
            f"{name!r} is neither a file nor a folder.\n  Got a pipe, a socket or a device.\n"
            "  Write the data to a file first."
        )
    hub = HUB_ID.fullmatch(name)
    if hub is not None and Path(name).suffix.lower() not in (*READERS, ".txt", ".md"):
        return [_hub(hub["name"], hub["config"], settings)]
    raise _nothing(name)


def _nothing(name: str, said: str = "") -> ValueError:
    return ValueError(
        f"There is no data at {name!r}.\n  Looked in {os.getcwd()}{said}.\n"
        f"  Set {called('data_path')} to a text file, a .jsonl file, a folder or a hub dataset (owner/name)."
    )


def _file(path: Path) -> Source:
    try:
        digest, num_bytes = _digest(path), path.stat().st_size
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read.\n  {error}.\n  Check who may read it: ls -l {shlex.quote(str(path))}"
        ) from None
    if path.suffix.lower() in READERS:
        return Source(str(path), digest, num_bytes, rows=lambda: read_rows(path))
    return Source(str(path), digest, num_bytes, chunks=lambda: text_chunks(path))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{path.suffix.lower()} {digest.hexdigest()}"


def _folder(folder: Path, settings: DataSettings) -> list[Source]:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return [_saved(folder, settings)]
    if settings.folder_as == "document":
        return [_one_document(folder, settings)]
    names, rule = file_names(folder)
    names = [name for name in names if chosen(name, settings.include, settings.exclude)]
    data = [name for name in names if not _is_beside_tables(name)]
    if settings.folder_as == "files":
        return _files(folder, names, rule)
    if data and all(Path(name).suffix.lower() in READERS for name in data):
        return _files(folder, data, rule)
    return [_one_document(folder, settings)]


def _is_beside_tables(name: str) -> bool:
    return Path(name).stem.lower() in _BESIDE_TABLES or any(part.startswith(".") for part in name.split("/"))


def _files(folder: Path, names: list[str], rule: str) -> list[Source]:
    """Each file by itself, without those that are neither text nor a table."""
    skipped: Counter[str] = Counter()
    sources = []
    for name in names:
        is_table = Path(name).suffix.lower() in READERS
        reason = None if is_table else _why_skipped(folder / name)
        if reason in (None, "minified"):  # a line may be long in a file that is a document of its own
            sources.append(_file(folder / name))
        else:
            skipped[str(reason)] += 1
    if not sources:
        globs = ", and check data_include and data_exclude" if called("data_include") else ""
        raise ValueError(
            f"The folder {str(folder)!r} holds no files to read.\n"
            f"  Skipped: {said(skipped) or 'no files'}; hidden ones are not read.\n"
            f"  Set {called('data_path')} to a folder with files{globs}."
        )
    left_out = f"; skipped {skipped.total()} ({said(skipped)})" if skipped else ""
    note = f"{folder}: {len(sources)} {'file' if len(sources) == 1 else 'files'}, each by itself{left_out}" + (
        f"; {rule}" if rule else ""
    )
    return [replace(sources[0], note=note), *sources[1:]]


def _why_skipped(path: Path) -> str | None:
    try:
        return why_skipped(path.read_bytes())
    except OSError:
        return "unreadable"


def _one_document(folder: Path, settings: DataSettings) -> Source:
    listing = list_folder(folder, settings.include, settings.exclude)
    note = listing.note() + _how_to_have_files()
    return Source(str(folder), listing.digest, listing.num_bytes, chunks=lambda: folder_chunks(listing), note=note)


def _how_to_have_files() -> str:
    name = called("folder_as")
    text = "folder_as: files" if name == "folder_as" else f"{name} files"
    return f"; {text} makes each file a document" if name else ""


def _saved(folder: Path, settings: DataSettings) -> Source:
    """A folder made by ``save_to_disk``."""
    datasets = optional("datasets", str(folder))
    try:
        return _dataset(str(folder), datasets.load_from_disk(str(folder)), settings)
    except (OSError, TypeError, KeyError) as error:
        raise ValueError(
            f"The dataset in {str(folder)!r} cannot be loaded.\n  {type(error).__name__}: {in_a_line(error)}.\n"
            "  Save it again with save_to_disk, or write it as .parquet."
        ) from None


def _hub(name: str, config: str | None, settings: DataSettings) -> Source:
    """A dataset of the hub. No code of it runs."""
    label = name if config is None else f"{name}:{config}"
    datasets = optional("datasets", label)
    kept = Path(datasets.config.HF_DATASETS_CACHE).glob(f"{name.partition('/')[0]}___*")
    if (away := unreachable()) and not any(kept):
        raise _nothing(label, f", and the hub was not reached: {away}")
    try:
        return _dataset(label, datasets.load_dataset(name, config, split=settings.split), settings)
    except Exception as error:  # of its own, of the network, of a broken file: the first line tells
        said = (str(error).splitlines() or [""])[0]
        raise _nothing(label, f", and the hub has no such dataset: {type(error).__name__}: {said}") from None


def _dataset(label: str, found: Any, settings: DataSettings) -> Source:
    if isinstance(found, dict):
        if settings.split not in found:
            first = next(iter(found), "train")
            split = called("data_split")
            remedy = f"Set {split}: {first}" if split else f"Save what you want of it as a .jsonl file: {first}, say"
            raise ValueError(f"{label!r} has no split {settings.split!r}.\n  It has {', '.join(found)}.\n  {remedy}.")
        found = found[settings.split]

    def rows() -> Iterator[Numbered]:
        return ((f" row {number}", row) for number, row in enumerate(found, start=1))

    return Source(label, f"dataset {found._fingerprint}", int(found.size_in_bytes or found.data.nbytes), rows=rows)
