"""Planted facts, asked for at the end of a document with more and more of it as context, by teacher forcing.

A fact that is not in the context can only be known from the weights: with an adapter that was trained on the document
that is what training has left, without one it is guessing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oomb_accel.evaluation.planting import Planted, ask, plant
from oomb_accel.evaluation.scoring import Subject
from oomb_accel.evaluation.windows import Text, last_tokens, within


@dataclass(frozen=True, slots=True)
class Answer:
    """One question, asked once."""

    variant: str
    document: str
    asked: int
    """Context length as asked for; -1 is the whole document."""
    context: int
    """Tokens of the document before the questions."""
    depth: float
    """Share of the document that stands before the fact, as asked for."""
    start: int
    """Place of the fact in the document, in tokens."""
    tokens_back: int
    """Tokens from there to the end of the document."""
    in_context: bool
    """Whether the whole fact was in the context."""
    key: str
    num_tokens: int
    loss: float
    """Mean per token of the answer, given those before it."""
    exact: bool
    """Whether every token of the answer was the likeliest one."""


@dataclass(frozen=True, slots=True)
class PlantedText:
    """A document with facts, ready to be cut."""

    name: str
    planted: Planted
    first: int
    """Tokens at the beginning that every cut keeps."""


def plant_all(
    texts: Sequence[Text],
    tokenizer: Any,
    *,
    num_tokens: int | None,
    depths: Sequence[float],
    per_depth: int,
    seed: int,
) -> list[PlantedText]:
    """Plant facts in every document, others in each.

    Raises:
        ValueError: a text is too short.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return [
        PlantedText(
            text.name,
            plant(
                text.ids.tolist(),
                tokenizer.decode(text.ids),
                encode,
                num_tokens=num_tokens,
                depths=depths,
                per_depth=per_depth,
                seed=[seed, number],
                first=text.first,
                name=text.name,
            ),
            text.first,
        )
        for number, text in enumerate(texts)
    ]


def recall(
    subject: Subject, texts: Sequence[PlantedText], *, contexts: Sequence[int], questions_per_pass: int, seed: int
) -> list[Answer]:
    """Ask for all facts of every document, at every context length, of every variant.

    Args:
        contexts: tokens of the document before a question, ascending; -1 is the whole document.
        questions_per_pass: so many questions stand one behind the other, in random order, each with its answer. With 1
            every question sees the document alone; more save time on long documents, but answers are then followed by
            questions of the same form, which helps a model that can look back and misleads one that must remember.
    """
    found: list[Answer] = []
    for variant in subject.variants:
        for number, text in enumerate(texts):
            order = np.random.default_rng([13, seed, number]).permutation(len(text.planted.facts)).tolist()
            for asked, context in within(contexts, len(text.planted.ids) - text.first):
                for start in range(0, len(order), questions_per_pass):
                    subject.line.prefix = f"facts, {variant}, {text.name}, {context:,} tokens, question {start + 1} | "
                    chosen = order[start : start + questions_per_pass]
                    found += _one_pass(subject, variant, text, chosen, asked, context)
    return found


def _one_pass(
    subject: Subject, variant: str, text: PlantedText, chosen: Sequence[int], asked: int, context: int
) -> Iterator[Answer]:
    """Ask for some facts in one pass."""
    facts, document = text.planted.facts, torch.tensor(text.planted.ids)
    kept = last_tokens(document, context, text.first)
    questions, places = ask(facts, chosen)
    targets = torch.zeros(len(kept) + len(questions), dtype=torch.bool)
    for first, end in places:
        targets[len(kept) + first : len(kept) + end] = True
    scores = subject.score(variant, [*kept.tolist(), *questions], targets, hits=True)
    behind = 0
    for index, (first, end) in zip(chosen, places, strict=True):
        fact, part = facts[index], slice(behind, behind + end - first)
        behind = part.stop
        yield Answer(
            variant=variant,
            document=text.name,
            asked=asked,
            context=context,
            depth=fact.depth,
            start=fact.start,
            tokens_back=len(document) - fact.start,
            in_context=fact.start >= len(document) - context,
            key=fact.key,
            num_tokens=end - first,
            loss=float(scores.losses[part].mean()),
            exact=bool(scores.hits[part].all()),
        )
