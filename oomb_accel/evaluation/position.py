"""Loss and perplexity of held-out documents by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oomb_accel.evaluation.scoring import Subject
from oomb_accel.evaluation.windows import Text
from oomb_accel.integrations.sparsity_cost import position_buckets


@dataclass(frozen=True, slots=True)
class PositionLoss:
    """Mean over the tokens of all documents at some positions."""

    variant: str
    first: int
    end: int
    """Positions in the document, ``[first, end)``."""
    num_tokens: int
    num_documents: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def loss_by_position(subject: Subject, texts: Sequence[Text], *, first_bucket: int) -> list[PositionLoss]:
    """Measure every variant over whole documents, in buckets that double in length.

    Every token counts once, so long documents decide the late buckets; the last row of a variant is over all tokens.

    Args:
        first_bucket: tokens of the first bucket.
    """
    found = []
    for variant in subject.variants:
        losses = []
        for text in texts:
            subject.line.prefix = f"position, {variant}, {text.name} | "
            targets = torch.ones(len(text.ids), dtype=torch.bool)
            losses.append(subject.score(variant, text.ids, targets).losses)
        longest = max(len(text.ids) for text in texts)
        for first, end in [*position_buckets(first_bucket, longest), (0, longest)]:
            # The loss at index i is that of the token at position i + 1.
            parts = [part for values in losses if len(part := values[max(first - 1, 0) : end - 1])]
            if parts:
                together = torch.cat(parts)
                found.append(PositionLoss(variant, first, end, len(together), len(parts), float(together.mean())))
    return found
