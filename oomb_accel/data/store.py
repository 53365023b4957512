"""Token ids of all documents in one memory-mapped file, with borders and targets beside it.

A folder holds ``tokens.bin`` (uint32), ``offsets.npy`` (int64 ``[documents + 1]``), ``spans.npy`` (int64
``[spans, 2]``: ranges of tokens that are targets, ascending) and ``meta.json``, which is written last and says how
long the others are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from oomb_accel.data.documents import IGNORED, Document

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint32]
Range = tuple[int, int]

FORMAT = 1
"""Version of the folder; one with another number is built anew."""


class StoreWriter:
    """Writes a folder, token by token; :meth:`close` makes it whole.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokens = (folder / "tokens.bin").open("wb")
        self._offsets = [0]
        self._spans: list[Range] = []
        self._names: list[tuple[int, str]] = []
        self.num_tokens = 0

    def add(self, ids: Ids, targets: Iterable[Range]) -> None:
        """Append tokens to the document that is being written.

        Args:
            ids: uint32 ``[tokens]``.
            targets: ranges in ``ids``, ascending.
        """
        for start, end in targets:
            start, end = start + self.num_tokens, end + self.num_tokens
            if self._spans and self._spans[-1][1] == start:
                self._spans[-1] = (self._spans[-1][0], end)
            elif end > start:
                self._spans.append((start, end))
        self._tokens.write(ids.astype("<u4", copy=False).tobytes())
        self.num_tokens += len(ids)

    def end_document(self, source: int, suffix: str) -> None:
        """The document is whole. Its name is that of its source, as given at reading, with ``suffix`` behind."""
        self._names.append((source, suffix))
        self._offsets.append(self.num_tokens)

    def close(self, notes: Sequence[str]) -> None:
        """Write what belongs to the tokens, and make sure that all is on disk."""
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        self._tokens.close()
        np.save(self._folder / "offsets.npy", np.array(self._offsets, np.int64))
        np.save(self._folder / "spans.npy", np.array(self._spans, np.int64).reshape(-1, 2))
        sizes = {name: (self._folder / name).stat().st_size for name in ("tokens.bin", "offsets.npy", "spans.npy")}
        meta = {"format": FORMAT, "sizes": sizes, "notes": list(notes), "names": self._names}
        with (self._folder / "meta.json").open("w", encoding="utf-8") as file:
            json.dump(meta, file)
            file.flush()
            os.fsync(file.fileno())

    def abandon(self) -> None:
        """Let go of the file; the folder is of no use."""
        self._tokens.close()


def is_whole(folder: Path) -> bool:
    """Whether the folder was written to its end and nothing was cut off since."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        sizes = meta["sizes"].items()
        return meta["format"] == FORMAT and all((folder / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


class TokenStore:
    """A folder as written by :class:`StoreWriter`, mapped into memory.

    Args:
        folder: a whole one.
        sources: what the sources are called now.
    """

    def __init__(self, folder: Path, sources: Sequence[str]) -> None:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.folder = folder
        self.notes: list[str] = meta["notes"]
        self.names = [sources[source] + suffix for source, suffix in meta["names"]]
        self.offsets: Ints = np.load(folder / "offsets.npy")
        self.spans: Ints = np.load(folder / "spans.npy")
        empty = not self.offsets[-1]  # nothing cannot be mapped
        path = folder / "tokens.bin"
        self.tokens: Ids = np.zeros(0, np.uint32) if empty else np.memmap(path, "<u4", mode="r")
        self._before = np.concatenate([[0], np.cumsum(self.spans[:, 1] - self.spans[:, 0])]).astype(np.int64)

    def num_targets(self, start: int, end: int) -> int:
        """Targets of tokens ``[start, end)`` as a document: its first token is none."""
        return max(self._labelled(end) - self._labelled(min(start + 1, end)), 0)

    def labels(self, start: int, end: int) -> torch.Tensor:
        """int64 ``[end - start]``: the tokens that are targets, -100 elsewhere."""
        ids = torch.from_numpy(self.tokens[start:end].astype(np.int64))
        labels = torch.full_like(ids, IGNORED)
        first = int(np.searchsorted(self.spans[:, 1], start, side="right"))
        last = int(np.searchsorted(self.spans[:, 0], end, side="left"))
        for span_start, span_end in self.spans[first:last].tolist():
            inside = slice(max(span_start - start, 0), min(span_end, end) - start)
            labels[inside] = ids[inside]
        return labels

    def _labelled(self, position: int) -> int:
        """Labelled tokens before a position."""
        index = int(np.searchsorted(self.spans[:, 0], position, side="left"))
        beyond = max(int(self.spans[index - 1, 1]) - position, 0) if index else 0
        return int(self._before[index]) - beyond


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One training sequence: ranges of a store's tokens."""

    name: str
    ranges: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.ranges)


class StoredDocuments(Sequence[Document]):
    """Documents that are read from the store when they are asked for: keep none that is not in use. What is asked of
    all of them at once is known without reading."""

    def __init__(self, store: TokenStore, sequences: Sequence[TrainingSequence]) -> None:
        self.store, self.sequences = store, sequences

    def __len__(self) -> int:
        return len(self.sequences)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> StoredDocuments: ...
    def __getitem__(self, index: int | slice) -> Document | StoredDocuments:
        if isinstance(index, slice):
            return StoredDocuments(self.store, self.sequences[index])
        sequence = self.sequences[index]
        ids = np.concatenate([self.store.tokens[start:end] for start, end in sequence.ranges]).astype(np.int64)
        starts = np.cumsum([0, *(end - start for start, end in sequence.ranges)])[:-1]
        labels = torch.cat([self.store.labels(start, end) for start, end in sequence.ranges])
        labels[starts[1:]] = IGNORED
        return Document(sequence.name, torch.from_numpy(ids), labels, tuple(starts.tolist()))

    def num_tokens(self) -> list[int]:
        """Of each sequence."""
        return [sequence.num_tokens for sequence in self.sequences]

    def longest(self) -> list[int]:
        """Tokens of the longest document in each sequence: one more than its highest position."""
        return [max(end - start for start, end in sequence.ranges) for sequence in self.sequences]

    def num_targets(self) -> list[int]:
        """Of each sequence."""
        return [sum(self.store.num_targets(*part) for part in sequence.ranges) for sequence in self.sequences]


@dataclass(slots=True)
class Corpus:
    """The documents of a run, and what the user should know about how they were read."""

    documents: StoredDocuments
    notes: list[str]
