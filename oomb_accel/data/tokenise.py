"""From the texts of examples to token ids in a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from oomb_accel.data.examples import Example, Part, Ready
from oomb_accel.data.meter import Meter
from oomb_accel.data.pieces import can_cut, pieces
from oomb_accel.data.store import Ids, Range, StoreWriter
from oomb_accel.data.worker import Done, Task
from oomb_accel.data.workers import encode_all

SAMPLE = "Tokens of a fast tokenizer,\nas its own JSON gives them:  1234, Grüße \t\n\n  x == y\n"


class UnprovenCut(Exception):
    """A text was cut where it might have other tokens than as a whole."""


@dataclass(frozen=True, slots=True)
class Named:
    """A document to be tokenised."""

    source: int
    suffix: str
    example: Example


@dataclass(frozen=True, slots=True)
class Piece:
    """A task, and whose it is."""

    part: Part
    task: Task
    first: bool
    """Whether it is the first piece of its part."""
    last_of: Named | None = None
    """The document that ends with it."""


def description_of(tokenizer: Any) -> str | None:
    """The JSON of a fast tokenizer, which says all about how it makes tokens; None for any other one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "split_special_tokens", False):
        return None
    return str(backend.to_str())


class TextEncoder:
    """Tokenises texts as the tokenizer itself would.

    Args:
        tokenizer: of transformers. A fast one whose JSON alone gives the same tokens is used in parallel processes;
            any other one is called text by text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        description = description_of(tokenizer)
        plain = self._call(SAMPLE, special=False)
        if description is not None:
            alone = [done.ids.tolist() for done in encode_all(description, [Task(SAMPLE)], workers=1)]
            description = description if alone == [plain] else None
        self.description: str | None = description
        self.cuts = description is not None and can_cut(description)

    def write(self, documents: Iterable[Named], writer: StoreWriter, meter: Meter, *, cut: bool = True) -> None:
        """Tokenise documents one after another into a store.

        Raises:
            UnprovenCut: a text has to be tokenised without cutting it.
        """
        waiting: deque[Piece] = deque()

        def tasks() -> Iterator[Task]:
            for document in documents:
                for piece in self._pieces(document, cut and self.cuts):
                    waiting.append(piece)
                    yield piece.task

        with closing(self._encode(tasks())) as results:  # ends the processes, also after an error
            for done in results:
                piece = waiting.popleft()
                if not done.proven:
                    raise UnprovenCut
                self._write(piece, done, writer)
                meter.add(len(piece.task.text), len(done.ids))
        assert not waiting, "a task has no result"

    def _encode(self, tasks: Iterator[Task]) -> Generator[Done, None, None]:
        if self.description is not None:
            return encode_all(self.description, tasks)
        return (self._slowly(task) for task in tasks)

    def _pieces(self, document: Named, cut: bool) -> Iterator[Piece]:
        if isinstance(document.example, Ready):
            # In line with the texts around it.
            yield Piece(Part(lambda: iter(()), None), Task(""), True, document)
            return
        for number, part in enumerate(document.example, start=1):
            last = document if number == len(document.example) else None
            parts = pieces(part.chunks()) if cut else iter([("".join(part.chunks()), None)])
            position = 0
            for text, behind in parts:
                targets = None if part.targets is None else _inside(part.targets, position, position + len(text))
                task = Task(text, behind, targets)
                yield Piece(part, task, position == 0, last if behind is None else None)
                position += len(text)

    def _write(self, piece: Piece, done: Done, writer: StoreWriter) -> None:
        """Add a piece, with what stands in front of and behind its text."""
        part, document = piece.part, piece.last_of
        if document is not None and isinstance(document.example, Ready):
            writer.add(document.example.ids, document.example.targets)
            writer.end_document(document.source, document.suffix)
            return
        whole = part.targets is None
        if piece.first and part.special:
            self._add(self._framing[0], whole, writer)
        writer.add(done.ids, done.targets)
        if piece.task.behind is None:
            if part.special:
                self._add(self._framing[1], whole, writer)
            end = self._tokenizer.eos_token_id
            if part.end and end is not None and not (len(done.ids) and done.ids[-1] == end):
                self._add([end], True, writer)
        if document is not None:
            writer.end_document(document.source, document.suffix)

    def _add(self, ids: list[int], target: bool, writer: StoreWriter) -> None:
        writer.add(np.array(ids, np.uint32), [(0, len(ids))] if target and ids else [])

    def _slowly(self, task: Task) -> Done:
        """By the tokenizer itself."""
        if task.targets:
            ids, targets = self._call_with_offsets(task.text, task.targets)
        else:
            found = self._call(task.text, special=False) if task.text else []
            ids, targets = np.array(found, np.uint32), [] if task.targets == [] or not found else [(0, len(found))]
        return Done(ids, targets, True)

    def _call_with_offsets(self, text: str, ranges: list[Range]) -> tuple[Ids, list[Range]]:
        """Where the tokenizer knows no offsets, the text is cut at the borders of what is trained on."""
        ids: list[int] = []
        targets: list[Range] = []
        position = 0
        for start, end in [*ranges, (len(text), len(text))]:
            ids += self._call(text[position:start], special=False) if position < start else []
            first = len(ids)
            ids += self._call(text[start:end], special=False) if start < end else []
            targets += [(first, len(ids))] if len(ids) > first else []
            position = end
        return np.array(ids, np.uint32), targets

    def _call(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    @cached_property
    def _framing(self) -> tuple[list[int], list[int]]:
        """Special tokens in front of a text and behind it; a final end token is left out, as it is set apart. Rows that
        are tokenised have no need of them."""
        plain, framed = self._call(SAMPLE, special=False), self._call(SAMPLE, special=True)
        places = range(len(framed) - len(plain) + 1)
        at = next((i for i in places if framed[i : i + len(plain)] == plain), None)
        if at is None:
            raise ValueError(
                "The tokenizer changes a text when it adds special tokens.\n"
                f"  Got {framed[:8]}... with them and {plain[:8]}... without, for the same text.\n"
                "  Tokenise the data yourself, to rows with input_ids and labels."
            )
        suffix = framed[at + len(plain) :]
        if suffix and suffix[-1] == self._tokenizer.eos_token_id:
            suffix = suffix[:-1]
        return framed[:at], suffix


def _inside(ranges: list[Range], start: int, end: int) -> list[Range]:
    """Ranges of characters, as far as they lie in a piece, counted from its beginning."""
    cut = ((max(first, start) - start, min(last, end) - start) for first, last in ranges)
    return [(first, last) for first, last in cut if first < last]
