"""Tokenising one piece of text; also the program of the processes that do it.

Imports nothing but ``tokenizers`` and numpy, so that a process starts in a fraction of a second.
"""

from __future__ import annotations

import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

PROVEN_WORDS = 8
"""Last words of a piece that are tokenised again with what follows. One would do; more cost nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of text."""

    text: str
    behind: str | None = None
    """The text behind the piece, where it was cut; None at the end of a text."""
    targets: list[tuple[int, int]] | None = None
    """Ranges of its characters that are trained on; None is all."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a task."""

    ids: npt.NDArray[np.uint32]
    targets: list[tuple[int, int]]
    """Ranges of tokens that are trained on."""
    proven: bool
    """Whether the whole text has the same tokens before the cut, and a border at it."""


@lru_cache(maxsize=1)
def make_tokenizer(description: str) -> Any:
    """A fast tokenizer from its JSON, without truncation or padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(description)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Any, task: Task) -> Done:
    """Tokenise a piece, without special tokens, and prove its cut (see :mod:`oomb_accel.data.pieces`)."""
    encoding = tokenizer.encode(task.text, add_special_tokens=False)
    ids = np.array(encoding.ids, np.uint32)
    if task.targets is None:
        targets = [(0, len(ids))] if len(ids) else []
    else:
        targets = _tokens_of(encoding.offsets, task.targets) if task.targets else []
    proven = task.behind is None or _ends_alike(tokenizer, encoding, task.text, task.behind)
    return Done(ids, targets, proven)


def _tokens_of(offsets: list[tuple[int, int]], ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Tokens with a character in one of the ranges."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(starts, end, "left"))
        first = max(first, found[-1][1]) if found else first
        if first < last:
            found.append((first, last))
    return found


def _ends_alike(tokenizer: Any, encoding: Any, text: str, behind: str) -> bool:
    """Whether the last words of ``text`` have the same tokens with ``behind`` behind them, and end where it does."""
    words, offsets = encoding.word_ids, encoding.offsets
    if not words or None in words[-1:]:
        return False
    first, borders = len(words) - 1, 0
    while first and borders < PROVEN_WORDS:
        borders += words[first - 1] != words[first]
        first -= borders < PROVEN_WORDS
    start = offsets[first][0]
    count, length = len(words) - first, len(text) - start
    longer = tokenizer.encode(text[start:] + behind, add_special_tokens=False)
    return bool(
        len(longer.ids) > count
        and longer.ids[:count] == encoding.ids[first:]
        and longer.offsets[count][0] == length
        and longer.word_ids[count] != longer.word_ids[count - 1]
    )


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Take a tokenizer's JSON and then lists of tasks, and answer each list, until the other side closes."""
    tokenizer = make_tokenizer(pickle.load(requests))
    while True:
        try:
            tasks = pickle.load(requests)
        except EOFError:
            return
        pickle.dump([encode(tokenizer, task) for task in tasks], replies, protocol=5)
        replies.flush()


def main() -> None:
    """The program: requests from standard input, replies to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which then closes the pipe
    with suppress(BrokenPipeError, pickle.UnpicklingError):  # the other side was killed
        serve(sys.stdin.buffer, sys.stdout.buffer)
