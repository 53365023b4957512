"""Documents, and the batches that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

IGNORED = -100
"""Label of a token that is no target."""


@dataclass(frozen=True, slots=True)
class Document:
    """One training sequence: a document, or several short ones that were packed and do not see each other."""

    name: str
    """Where it came from, for messages."""
    input_ids: torch.Tensor
    """int64 ``[tokens]``."""
    labels: torch.Tensor
    """int64 ``[tokens]``: the token itself where it is a target, -100 elsewhere; not shifted. The first token of a
    packed document is no target."""
    starts: tuple[int, ...] = (0,)
    """First token of each document in the sequence."""

    @property
    def num_targets(self) -> int:
        """Targets of this sequence: labelled tokens, the first one excepted."""
        return int((self.labels[1:] != IGNORED).sum())

    def position_ids(self) -> torch.Tensor:
        """int64 ``[tokens]``: 0 at the first token of each document."""
        ends = [*self.starts[1:], len(self.input_ids)]
        return torch.cat([torch.arange(end - start) for start, end in zip(self.starts, ends, strict=True)])


def collate(documents: Sequence[Document], pad_token_id: int) -> dict[str, torch.Tensor]:
    """A micro-batch, padded on the right. Without documents it is the empty batch: one token of padding, for a rank
    that has nothing to do in a micro-step and still takes part in it.

    Where one of them is packed, all lie in one row without padding, one behind another: borders are then where
    ``position_ids`` start again. Chunk recurrence keeps them apart.

    Returns: ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[documents, longest]``; for packed documents
        ``input_ids``, ``position_ids`` and ``labels``, int64 ``[1, all tokens]``.
    """
    if not documents:
        row = torch.full((1, 1), pad_token_id)
        return {"input_ids": row, "attention_mask": torch.zeros_like(row), "labels": torch.full_like(row, IGNORED)}
    if any(len(document.starts) > 1 for document in documents):
        return _one_row(documents)
    rows = [document.input_ids for document in documents]

    def pad(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    return {
        "input_ids": pad(rows, pad_token_id),
        "attention_mask": pad([torch.ones_like(row) for row in rows], 0),
        "labels": pad([document.labels for document in documents], IGNORED),
    }


def _one_row(documents: Sequence[Document]) -> dict[str, torch.Tensor]:
    labels = []
    for document in documents:
        labels.append(document.labels.clone())
        labels[-1][0] = IGNORED  # the shift would make it a target of the document before
    return {
        "input_ids": torch.cat([document.input_ids for document in documents])[None],
        "position_ids": torch.cat([document.position_ids() for document in documents])[None],
        "labels": torch.cat(labels)[None],
    }


def last_tokens_batch(document: Document, num_tokens: int) -> dict[str, torch.Tensor]:
    """The whole document as context, only its last ``num_tokens`` as targets; shapes as in :func:`collate`."""
    labels = document.labels.clone()
    labels[: max(len(labels) - num_tokens, 0)] = IGNORED
    return collate([Document(document.name, document.input_ids, labels, document.starts)], pad_token_id=0)


def within_vocabulary(documents: Iterable[Document], vocab_size: int) -> Iterator[Document]:
    """The same documents, without ready ``input_ids`` that the model has no embedding for.

    Raises:
        ValueError: naming the document and the id.
    """
    for document in documents:
        highest, lowest = int(document.input_ids.max()), int(document.input_ids.min())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"{document.name} has a token that the model does not know.\n"
                f"  Got id {wrong}; the model's vocabulary has {vocab_size} ids, from 0.\n"
                "  Tokenise the data with this model's own tokenizer."
            )
        yield document


def check_vocabulary(documents: Iterable[Document], vocab_size: int) -> None:
    """Read documents for nothing but :func:`within_vocabulary`."""
    for _ in within_vocabulary(documents, vocab_size):
        pass
