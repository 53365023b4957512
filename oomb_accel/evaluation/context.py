"""Loss on the same last tokens of a document, with more and more of it before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from oomb_accel.evaluation.scoring import Subject
from oomb_accel.evaluation.statistics import Mean, mean_of
from oomb_accel.evaluation.windows import WHOLE, Text, within


@dataclass(frozen=True, slots=True)
class DocumentLoss:
    """Mean loss of one document at one context length."""

    name: str
    context: int
    """Tokens before the last ones."""
    loss: float


@dataclass(frozen=True, slots=True)
class ContextLoss:
    """One variant at one context length."""

    variant: str
    asked: int
    """As asked for; -1 is the whole document."""
    context: int
    """Tokens before the last ones, of the longest document."""
    num_tokens: int
    """Scored tokens of all documents."""
    mean: Mean
    documents: tuple[DocumentLoss, ...]


def loss_by_context(
    subject: Subject, texts: Sequence[Text], *, last_tokens: int, contexts: Sequence[int], seed: int
) -> list[ContextLoss]:
    """Measure every variant at every context length.

    The same tokens are scored at every length: the last ones of a document but the first of them, which has nothing
    before it without a context.

    Args:
        texts: a document counts at the lengths that it has; all are longer than ``last_tokens``.
        contexts: tokens before the last ones, ascending; -1 is the whole document.
    """
    found = []
    for variant in subject.variants:
        for asked in contexts:
            rows: list[DocumentLoss] = []
            losses: list[NDArray[np.float64]] = []
            for text in texts:
                for _, context in within([asked], len(text.ids) - text.first - last_tokens):
                    ids = text.last(last_tokens + context)
                    targets = torch.zeros(len(ids), dtype=torch.bool)
                    targets[len(ids) - last_tokens + 1 :] = True
                    subject.line.prefix = f"context, {variant}, {text.name}, {context:,} tokens | "
                    losses.append(subject.score(variant, ids, targets).losses.numpy())
                    rows.append(DocumentLoss(text.name, context, float(losses[-1].mean())))
            if rows:
                longest = max(row.context for row in rows)
                number = sum(map(len, losses))
                found.append(ContextLoss(variant, asked, longest, number, mean_of(losses, seed), tuple(rows)))
    return found


def check_lengths(texts: Sequence[Text], last_tokens: int, contexts: Sequence[int]) -> None:
    """Refuse documents that are no longer than the tokens to score, and lengths that no document has.

    Raises:
        ValueError: naming the document.
    """
    for text in texts:
        if len(text.ids) - text.first <= last_tokens:
            raise ValueError(
                f"{text.name} is too short: it must be longer than the tokens to score.\n"
                f"  It has {len(text.ids):,} tokens; --last_tokens is {last_tokens:,}.\n"
                f"  Use --last_tokens {max(2, len(text.ids) // 4)}, or longer documents (--tokens cuts them)."
            )
    longest = max(len(text.ids) - text.first for text in texts) - last_tokens
    too_long = [context for context in contexts if context != WHOLE and context > longest]
    if too_long:
        raise ValueError(
            "No document is long enough for a context that was asked for.\n"
            f"  --contexts has {max(too_long):,}; the longest document has {longest:,} tokens before its last "
            f"{last_tokens:,}.\n  Use --contexts 0,{longest}, or all for whole documents."
        )
