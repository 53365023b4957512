"""The study's documents: the installed transformers' model files, Python's help texts, and planted facts.

A code document is a row of model files, each cut to a part of the document: later files repeat much of earlier ones,
so a model that reads far back predicts them better. Which files are held out is decided by the hash of the model's
folder, so the split does not depend on the machine. Everything is seeded.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.sparsity.material import Encode
from oomb_accel.data.documents import IGNORED
from oomb_accel.evaluation.planting import FIRST_WORDS, SECOND_WORDS

Ids = NDArray[np.int32]
FILES_PER_DOCUMENT = 6
HELD_OUT_SHARE = 6
"""One model folder in this many is held out."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of whole texts."""

    training: list[Ids]
    held_out: list[Ids]
    prose: Ids
    """Python's help texts, one after another."""
    digest: str
    """Of the source texts."""


def load_texts(encode: Encode, *, max_files: int | None = None, cache: Path | None = None) -> Texts:
    """Read and encode everything once.

    Args:
        max_files: of each split, for tests.
        cache: file that another process has filled, or that this one fills.
    """
    if cache is None:
        return _encoded_texts(encode, max_files)
    if not cache.is_file():
        texts = _encoded_texts(encode, max_files)
        temporary = cache.with_suffix(".part.npz")
        np.savez(
            temporary,
            digest=np.array(texts.digest),
            counts=np.array([len(texts.training), len(texts.held_out)]),
            lengths=np.array([len(ids) for ids in [*texts.training, *texts.held_out]]),
            ids=np.concatenate([*texts.training, *texts.held_out]),
            prose=texts.prose,
        )
        temporary.replace(cache)
        return texts
    stored = np.load(cache)
    files = np.split(stored["ids"], np.cumsum(stored["lengths"])[:-1])
    training = int(stored["counts"][0])
    return Texts(files[:training], files[training:], stored["prose"], str(stored["digest"]))


def _encoded_texts(encode: Encode, max_files: int | None) -> Texts:
    split: dict[bool, list[str]] = {False: [], True: []}
    for path in _model_files():
        held_out = int(hashlib.sha256(path.parent.name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0
        name = f"transformers/models/{path.parent.name}/{path.name}"
        split[held_out].append(f"# ==== {name} ====\n{path.read_text(encoding='utf-8')}\n")
    prose = "\n\n".join(f"==== {name} ====\n\n{topics[name].strip()}" for name in sorted(topics)) + "\n"
    training, held_out_texts = split[False][:max_files], split[True][:max_files]
    digest = hashlib.sha256("\0".join([*training, *held_out_texts, prose]).encode()).hexdigest()[:16]
    return Texts(encode(training), encode(held_out_texts), encode([prose])[0], digest)


def _model_files() -> list[Path]:
    """All modeling files of the installed transformers, which is not imported for this."""
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    return sorted(Path(found.origin).parent.glob("models/*/modeling_*.py"))


def code_document(files: Sequence[Ids], num_tokens: int, seed: Sequence[int]) -> Ids:
    """Different files in random order, each cut to a sixth of the document, until it is full."""
    rng = np.random.default_rng(list(seed))
    most = -(-num_tokens // FILES_PER_DOCUMENT)
    taken: list[Ids] = []
    total = 0
    for index in rng.permutation(len(files)):
        taken.append(files[index][:most])
        total += len(taken[-1])
        if total >= num_tokens:
            return np.concatenate(taken)[:num_tokens]
    raise ValueError(
        f"There are not enough files for a document.\n  {total:,} tokens in all, {num_tokens:,} wanted.\n"
        f"  Ask for {total:,} tokens or fewer."
    )


def held_out_documents(texts: Texts, kind: str, num_tokens: int, count: int) -> list[Ids]:
    """The evaluation documents: ``code`` (held-out files; each document shares no file with its neighbours as long as
    the files last) or ``prose`` (disjoint pieces of Python's help)."""
    if kind == "prose":
        pieces = [texts.prose[start : start + num_tokens] for start in range(0, len(texts.prose), num_tokens)]
        return [piece for piece in pieces if len(piece) == num_tokens][:count]
    most = -(-num_tokens // FILES_PER_DOCUMENT)
    order = np.random.default_rng(12345).permutation(len(texts.held_out))
    documents: list[Ids] = []
    pile: list[Ids] = []
    for index in np.tile(order, -(-count * FILES_PER_DOCUMENT * 2 // len(order)) + 1):
        pile.append(texts.held_out[index][:most])
        if sum(map(len, pile)) >= num_tokens:
            documents.append(np.concatenate(pile)[:num_tokens])
            pile = []
        if len(documents) == count:
            break
    return documents


# ---- planted facts ----


@dataclass(frozen=True, slots=True)
class FactDocument:
    """A real text with facts in it, and questions about some of them at its end."""

    ids: Ids
    labels: NDArray[np.int64]
    """The ids where a token belongs to an answer, else `IGNORED`."""
    answers: list[tuple[int, int]]
    """First and behind-last token of each answer."""
    depths: list[int]
    """Position of the fact that each answer repeats."""


def fact_document(
    texts: Texts, encode: Encode, num_tokens: int, seed: Sequence[int], *, facts: int, questions: int, held_out: bool
) -> FactDocument:
    """``facts`` random codes under random names at random depths of a code document, ``questions`` of them asked.

    A code is six random digits, so nothing but its place in the text tells it.
    """
    rng = np.random.default_rng([7, *seed])
    pairs = rng.permutation(len(FIRST_WORDS) * len(SECOND_WORDS))[:facts]
    names = [f"{FIRST_WORDS[pair // len(SECOND_WORDS)]} {SECOND_WORDS[pair % len(SECOND_WORDS)]}" for pair in pairs]
    codes = ["".join(map(str, rng.integers(0, 10, 6))) for _ in names]
    asked = rng.permutation(facts)[:questions]
    stated = encode(
        [f"\n# NOTE: the pass code of the {name} is {code}.\n" for name, code in zip(names, codes, strict=True)]
    )
    prompts = encode([f"\n# QUESTION: what is the pass code of the {names[i]}?\n# ANSWER: it is " for i in asked])
    replies = encode([f"{codes[i]}" for i in asked])
    room = num_tokens - sum(map(len, [*stated, *prompts, *replies]))
    text = code_document(texts.held_out if held_out else texts.training, room, seed)
    places = np.sort(rng.integers(0, room, facts))
    pieces: list[Ids] = []
    starts = np.zeros(facts, np.int64)
    length = before = 0
    for fact, place in enumerate(places):
        pieces += [text[before:place], stated[fact]]
        starts[fact] = length + place - before
        length = int(starts[fact]) + len(stated[fact])
        before = int(place)
    pieces.append(text[before:])
    length += room - before
    answers = []
    for prompt, reply in zip(prompts, replies, strict=True):
        answers.append((length + len(prompt), length + len(prompt) + len(reply)))
        pieces += [prompt, reply]
        length = answers[-1][1]
    ids = np.concatenate(pieces)
    labels = np.full(len(ids), IGNORED, np.int64)
    for first, end in answers:
        labels[first:end] = ids[first:end]
    return FactDocument(ids, labels, answers, [int(starts[i]) for i in asked])


def describe(texts: Texts) -> dict[str, Any]:
    """Sizes and digest, for the results."""
    return {
        "texts": texts.digest,
        "training_tokens": sum(map(len, texts.training)),
        "held_out_tokens": sum(map(len, texts.held_out)),
        "prose_tokens": len(texts.prose),
    }
