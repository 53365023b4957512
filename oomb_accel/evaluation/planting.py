"""Planted facts: codes that stand nowhere else, at known depths of a real text, and questions about them.

A fact is the sentence "Note: the pass code of the KEY is CODE." The key occurs nowhere else in the document; the code
is random, so nothing but having read that place tells it. The question is the same sentence up to the code. Both are
made of the same token ids and put between tokens of the text, so places and answers are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from oomb_accel.data.documents import IGNORED

_FIRST = """
amber azure brisk calm cedar cobalt coral crisp dusty eager early faint fallow frosty gentle golden hazel hidden
hollow humble icy ivory jade keen lilac lively lunar maple mellow misty noble olive opal pale polar proud quiet
rapid rustic sable silent silver snowy solar spicy stern sunny swift tidal umber velvet violet vivid wild
"""
_SECOND = """
anchor badger beacon bridge canyon castle comet condor crater dragon falcon forest fossil garden glacier harbor
heron island jaguar jungle kettle lagoon lantern meadow meteor mirror monsoon mountain ocean orchard otter palace
panther pebble pepper prairie python quarry rabbit raven river rocket saddle salmon temple thunder tiger tunnel
turtle valley walrus willow window wizard
"""
FIRST_WORDS, SECOND_WORDS = _FIRST.split(), _SECOND.split()
CODE_DIGITS = 6
QUESTION, ANSWER, END = "\n\nNote: the pass code of the {key} is", " {code}", ".\n\n"
Encode = Callable[[str], list[int]]
"""A text to token ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One planted sentence, in token ids."""

    key: str
    code: str
    depth: float
    """Share of the document that should stand before it, as asked for."""
    start: int
    """Place of its first token in the planted document."""
    question: tuple[int, ...]
    answer: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def statement(self) -> tuple[int, ...]:
        """The whole sentence, as it stands in the document from ``start`` on."""
        return self.question + self.answer + self.end


@dataclass(frozen=True, slots=True)
class Planted:
    """A document with facts in it."""

    ids: list[int]
    facts: tuple[Fact, ...]
    """In the order of the document."""


def plant(
    text: Sequence[int],
    plain_text: str,
    encode: Encode,
    *,
    num_tokens: int | None,
    depths: Sequence[float],
    per_depth: int,
    seed: Sequence[int],
    first: int = 0,
    name: str = "the document",
) -> Planted:
    """Plant ``per_depth`` facts at each depth.

    Args:
        text: token ids; its beginning is used.
        plain_text: the same as text; a key that occurs in it is not used.
        num_tokens: of the result; None uses the whole text, facts on top.
        depths: from 0 to 1; a fact begins at ``depth * length``, or behind the one before it.
        seed: decides keys and codes. The same arguments give the same document.
        first: tokens at the beginning that stay there, such as the start token.
        name: of the document, for the message.

    Raises:
        ValueError: the text is too short, or there are more facts than keys.
    """
    wanted = [depth for depth in sorted(depths) for _ in range(per_depth)]
    rng = np.random.default_rng([7, *seed])
    keys = _keys(len(wanted), plain_text, rng)
    codes = ["".join(map(str, rng.integers(0, 10, CODE_DIGITS))) for _ in wanted]
    sentences = [
        (tuple(encode(QUESTION.format(key=key))), tuple(encode(ANSWER.format(code=code))), tuple(encode(END)))
        for key, code in zip(keys, codes, strict=True)
    ]
    lengths = [sum(map(len, sentence)) for sentence in sentences]
    total = len(text) + sum(lengths) if num_tokens is None else num_tokens
    room = total - sum(lengths)
    _check_room(name, len(text), room, sum(lengths), first, total)
    starts, behind = [], first
    left = sum(lengths)
    for depth, length in zip(wanted, lengths, strict=True):
        starts.append(min(max(round(depth * total), behind), total - left))
        behind, left = starts[-1] + length, left - length
    ids: list[int] = []
    facts = []
    used = 0
    for index, start in enumerate(starts):
        step = start - len(ids)
        ids += text[used : used + step]
        used += step
        question, answer, end = sentences[index]
        facts.append(Fact(keys[index], codes[index], wanted[index], start, question, answer, end))
        ids += facts[-1].statement
    ids += text[used:room]
    return Planted(ids, tuple(facts))


def ask(facts: Sequence[Fact], order: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Questions with their answers, one behind the other, as they stand behind a document.

    Args:
        order: indices of the facts, as they are asked.

    Returns: token ids, and for each question in this order the first and the behind-last place of its answer in them.
    """
    ids: list[int] = []
    places = []
    for index in order:
        fact = facts[index]
        ids += fact.question
        places.append((len(ids), len(ids) + len(fact.answer)))
        ids += fact.answer + fact.end
    return ids, places


def training_row(planted: Planted, order: Sequence[int]) -> dict[str, list[int]]:
    """A document with questions at its end, whose answers alone are targets, as a row that ``oomb train`` reads."""
    ids, places = ask(planted.facts, order)
    labels = [IGNORED] * (len(planted.ids) + len(ids))
    for first, end in places:
        labels[len(planted.ids) + first : len(planted.ids) + end] = ids[first:end]
    return {"input_ids": planted.ids + ids, "labels": labels}


def _keys(count: int, plain_text: str, rng: np.random.Generator) -> list[str]:
    found: list[str] = []
    for pair in rng.permutation(len(FIRST_WORDS) * len(SECOND_WORDS)):
        if len(found) == count:
            break
        key = f"{FIRST_WORDS[pair // len(SECOND_WORDS)]} {SECOND_WORDS[pair % len(SECOND_WORDS)]}"
        if key not in plain_text:
            found.append(key)
    if len(found) < count:
        raise ValueError(
            f"There are not so many names for facts.\n"
            f"  {count:,} wanted, {len(found):,} names do not occur in the text.\n"
            "  Use fewer depths, or --facts_per_depth 1."
        )
    return found


def _check_room(name: str, text: int, room: int, facts: int, first: int, total: int) -> None:
    if room > text:
        raise ValueError(
            f"{name} is too short for planted facts at this length.\n"
            f"  It has {text:,} tokens; {total:,} wanted, {facts:,} of them facts.\n"
            f"  Use --tokens {text + facts}, or a longer text."
        )
    if room - first < facts:
        raise ValueError(
            f"{name} is too short for so many facts: they would be more than half of it.\n"
            f"  The facts have {facts:,} tokens, the document would have {total:,}.\n"
            f"  Use --tokens {max(2 * facts + first, 2 * total)}, fewer --depths or --facts_per_depth 1."
        )
