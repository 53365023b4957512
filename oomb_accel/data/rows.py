"""Rows of tables: .jsonl, .json, .csv, .tsv, .parquet and .arrow files, one row at a time."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oomb_accel.data.text import check_block, not_utf8
from oomb_accel.reading import Unreadable, json_value, kind_of

Row = dict[str, Any]
Numbered = tuple[str, Row]
"""Where the row stands in its file, such as `` line 3``, and the row."""

ROW_EXAMPLE = '{"text": "..."}, {"prompt": "...", "completion": "..."}, {"messages": [...]} or {"input_ids": [...]}'
BATCH_ROWS = 16


def read_rows(path: Path) -> Iterator[Numbered]:
    """The rows of a table.

    Raises:
        ValueError: a row that cannot be read, naming file and row.
    """
    return READERS[path.suffix.lower()](path)


def _jsonl(path: Path) -> Iterator[Numbered]:
    for number, line in _lines(path):
        if line.strip():
            yield f" line {number}", _object(f"{path} line {number}", line)


def _json(path: Path) -> Iterator[Numbered]:
    """An array of objects, or one object per line."""
    lines = _lines(path)
    first = next((line for _, line in lines if line.strip()), "")
    lines.close()
    if not first.lstrip().startswith("["):
        try:
            _object(str(path), first)
        except ValueError:
            pass  # one object over several lines, or a wrong first line
        else:
            yield from _jsonl(path)
            return
    whole = _parse(str(path), "".join(line for _, line in _lines(path)))
    for number, row in enumerate(whole if isinstance(whole, list) else [whole], start=1):
        yield f" row {number}", _checked(f"{path} row {number}", row)


def _lines(path: Path) -> Any:
    """Numbered lines of a file, decoded one by one; a line may be as long as memory."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                check_block(path, line, 0)
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(f"{path} line {number}", str(error), line if number == 1 else b"") from None


def _object(name: str, text: str) -> Row:
    return _checked(name, _parse(name, text))


def _parse(name: str, text: str) -> Any:
    try:
        return json_value(text, lambda pairs: _without_duplicates(name, pairs))
    except json.JSONDecodeError as error:
        message = f"{name} is not valid JSON.\n  {error}\n  Each line is one object: {ROW_EXAMPLE}."
        raise ValueError(message) from None
    except Unreadable as error:
        message = f"{name} cannot be read.\n  {error}\n  Use rows like {ROW_EXAMPLE}."
        raise ValueError(message) from None


def _without_duplicates(name: str, pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(
            f"{name} has the key {double!r} twice.\n  Got the keys {', '.join(map(repr, keys[:8]))}.\n"
            "  Keep one of them: which one counts is not defined."
        )
    return row


def _checked(name: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{name} is not an object.\n  Got {kind_of(row)}.\n  Use rows like {ROW_EXAMPLE}.")
    return row


def _csv(path: Path) -> Iterator[Numbered]:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        number = 1
        try:
            header = next(reader, [])
            if not header or len(set(header)) < len(header):
                raise ValueError(
                    f"{path} has no usable first line.\n  Got the columns {header}.\n"
                    "  Name each column once, for example: prompt,completion."
                )
            number = reader.line_num + 1
            for values in reader:
                if values and len(values) != len(header):
                    raise ValueError(
                        f"{path} line {number} has {len(values)} values.\n"
                        f"  The first line names {len(header)} columns: {', '.join(header)}.\n"
                        "  Put values with the separator or a newline in them into double quotes."
                    )
                if values:
                    yield f" line {number}", dict(zip(header, values, strict=True))
                number = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"{path} line {number} is not valid {path.suffix[1:].upper()}.\n  {error}.\n"
                "  Close every double quote, and write one inside of a value twice."
            ) from None
        except UnicodeDecodeError as error:
            with path.open("rb") as beginning:
                raise not_utf8(f"{path} line {number}", str(error), beginning.read(4)) from None
    if number == 2:
        raise ValueError(f"{path} is a table without rows.\n  Got {header} only.\n  Add rows below the first line.")


def _parquet(path: Path) -> Iterator[Numbered]:
    parquet = optional("pyarrow.parquet", str(path))
    with _names_file(path, "Parquet"), parquet.ParquetFile(path) as file:
        yield from _numbered(file.iter_batches(batch_size=BATCH_ROWS))


def _arrow(path: Path) -> Iterator[Numbered]:
    arrow = optional("pyarrow", str(path))
    with _names_file(path, "Arrow"), arrow.memory_map(str(path)) as source:
        with path.open("rb") as file:
            is_file = file.read(6) == b"ARROW1"
        if is_file:
            opened = arrow.ipc.open_file(source)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            batches = iter(arrow.ipc.open_stream(source))
        yield from _numbered(part for batch in batches for part in _slices(batch))


def _slices(batch: Any) -> Iterator[Any]:
    """A batch of an Arrow file may be all of it."""
    return (batch.slice(start, BATCH_ROWS) for start in range(0, batch.num_rows, BATCH_ROWS))


def _numbered(batches: Any) -> Iterator[Numbered]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f" row {number}", row


@contextmanager
def _names_file(path: Path, kind: str) -> Iterator[None]:
    """Says which file an error of pyarrow is about."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] != "pyarrow":
            raise
        raise ValueError(
            f"{str(path)!r} is no {kind} file that can be read.\n  {str(error).splitlines()[0]}.\n"
            "  Write it again, or convert it to .jsonl."
        ) from None


def optional(module: str, what: str) -> Any:
    """A module of the ``data`` extra.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(
            f"Reading {what!r} needs the package {package}.\n  It is not installed here.\n"
            '  Install it: pip install "oomb_accel[data]", or convert the data to .jsonl.'
        ) from None


READERS: dict[str, Callable[[Path], Iterator[Numbered]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
