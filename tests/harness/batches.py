"""Documents, and batches of them in every layout that users bring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.harness.models import VOCABULARY

IGNORED = -100


@dataclass(frozen=True)
class Document:
    """One training sequence. ``labels`` are unshifted, as users pass them."""

    ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def target_columns(self) -> Tensor:
        """Positions whose next token is a target."""
        return (self.labels[1:] != IGNORED).nonzero().flatten()


@dataclass(frozen=True)
class Layout:
    """A batch and where each document stands in it: (row, first column)."""

    batch: dict[str, Any]
    documents: tuple[Document, ...]
    places: tuple[tuple[int, int], ...]

    def with_inputs(self, **inputs: Any) -> Layout:
        """The same layout with more or other inputs."""
        return replace(self, batch={**self.batch, **inputs})


def documents_of(*lengths: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[Document]:
    """Random documents in which every token is labelled (the first one too, as users do)."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]
    return [Document(i, i.clone()) for i in ids]


def only_targets(document: Document, columns: Iterable[int]) -> Document:
    """The document with labels at these tokens only."""
    labels = torch.full_like(document.labels, IGNORED)
    for column in columns:
        labels[column] = document.ids[column]
    return Document(document.ids, labels)


def padded(documents: Sequence[Document], *, side: str = "right", pad_id: int = 0) -> Layout:
    """One document per row."""
    width = max(len(d) for d in documents)
    ids = torch.full((len(documents), width), pad_id)
    labels = torch.full((len(documents), width), IGNORED)
    mask = torch.zeros(len(documents), width, dtype=torch.long)
    places = []
    for row, document in enumerate(documents):
        start = 0 if side == "right" else width - len(document)
        columns = slice(start, start + len(document))
        ids[row, columns], labels[row, columns], mask[row, columns] = document.ids, document.labels, 1
        places.append((row, start))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Layout(batch, tuple(documents), tuple(places))


ENCODINGS = ("position_ids", "cu_seq_lens", "seq_idx")


def packed(documents: Sequence[Document], *encodings: str) -> Layout:
    """All documents in one row, with the borders told by these encodings (``position_ids`` if none is named)."""
    lengths = [len(d) for d in documents]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    batch: dict[str, Any] = {
        "input_ids": torch.cat([d.ids for d in documents])[None],
        "labels": torch.cat([d.labels for d in documents])[None],
    }
    for encoding in encodings or ("position_ids",):
        if encoding == "position_ids":
            batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
        elif encoding == "cu_seq_lens":
            borders = torch.tensor(starts, dtype=torch.int32)
            batch |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders.clone()}
            batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        else:
            numbers = [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)]
            batch["seq_idx"] = torch.cat(numbers)[None]
    return Layout(batch, tuple(documents), tuple((0, start) for start in starts[:-1]))
