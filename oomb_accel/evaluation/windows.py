"""The last tokens of a document with a part of what stands before them, and the context lengths to ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = -1
"""Context length that stands for all there is."""
FIRST, FACTOR = 512, 4


@dataclass(frozen=True, slots=True)
class Text:
    """A held-out document, ready to be cut."""

    name: str
    ids: Tensor
    """int64 ``[T]``, without an end token."""
    has_start: bool
    """Whether its first token is the tokenizer's start token, which every cut keeps: models lean on it."""

    @property
    def first(self) -> int:
        """Tokens at the beginning that every cut keeps."""
        return int(self.has_start)

    def last(self, num_tokens: int) -> Tensor:
        """The start token, if there is one, and the last ``num_tokens`` of what follows it."""
        return last_tokens(self.ids, num_tokens, self.first)


def last_tokens(ids: Tensor, num_tokens: int, first: int) -> Tensor:
    """The first ``first`` tokens and the last ``num_tokens`` of the rest."""
    begin = max(len(ids) - num_tokens, first)
    return torch.cat((ids[:first], ids[begin:]))


def default_contexts(longest: int) -> tuple[int, ...]:
    """None, 512, and four times as many until all of the longest document is in."""
    found = [0]
    while (following := FIRST if found[-1] == 0 else found[-1] * FACTOR) < longest:
        found.append(following)
    return (*found, WHOLE)


def within(contexts: Sequence[int], available: int) -> list[tuple[int, int]]:
    """Context lengths as asked for and as they are for one document: what is longer than it is left out."""
    return [
        (asked, available if asked == WHOLE else asked) for asked in contexts if asked == WHOLE or asked <= available
    ]
