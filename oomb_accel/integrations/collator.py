"""Labels that are no targets are masked where batches are made.

transformers' Trainer divides by the number of labels in the whole step, over all ranks, and counts every label but
those of the first column. The first token of a later document in a row, or of a left-padded row, and padding are no
targets, so Trainer would divide by too much: each rank could take off its own surplus, not that of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from oomb_accel.data.documents import IGNORED
from oomb_accel.integrations.stream import find_documents


class TargetsOnly:
    """A collator around another one: keeps the labels of targets and masks all others."""

    def __init__(self, collator: Callable[[Any], Any]) -> None:
        self.collator = collator

    def __call__(self, examples: Any) -> Any:
        return mask_surplus_labels(self.collator(examples))


def mask_surplus_labels(batch: Any) -> Any:
    """The batch with labels at its targets only; anything that is no batch of labelled tokens as it is.

    Args:
        batch: what a collator returns; changed in place where it can be.

    Raises:
        ValueError: borders or padding that contradict each other, as the model would raise.
    """
    if not isinstance(batch, Mapping):
        return batch
    name = "shift_labels" if batch.get("shift_labels") is not None else "labels"
    labels = batch.get(name)
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return batch
    if batch.get("input_ids") is None and batch.get("inputs_embeds") is None:
        return batch
    targets = torch.zeros_like(labels, dtype=torch.bool)
    for document in find_documents(batch):
        if name == "labels":
            targets[document.row, document.start + 1 : document.end] = True
        else:  # the label behind the row's last token may be given
            end = document.end if document.end == labels.shape[1] else document.end - 1
            targets[document.row, document.start : end] = True
    masked = labels.masked_fill(~targets, IGNORED)
    if isinstance(batch, MutableMapping):
        batch[name] = masked
        return batch
    return {**batch, name: masked}
