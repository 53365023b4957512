"""What ``oomb data`` says: counts, lengths, and which tokens of a document are trained on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from oomb_accel.data.documents import IGNORED, Document
from oomb_accel.data.lengths import shortened
from oomb_accel.data.load import arrange, read
from oomb_accel.data.store import StoredDocuments
from oomb_accel.integrations.rope import trained_tokens
from oomb_accel.training.data import data_settings
from oomb_accel.training.model import load_config, load_tokenizer
from oomb_accel.training.recipe import Recipe

BARS = 40
RUN_TOKENS = 48
"""Tokens that are shown at either end of a run of trained or untrained tokens."""
RUNS = 12
"""Runs that are shown at either end of a document."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of documents."""

    documents: int
    tokens: int
    min: int
    median: int
    p95: int
    max: int
    bins: list[tuple[int, int, int]]
    """Least tokens, most tokens and documents of each bar."""

    @staticmethod
    def of(lengths: Sequence[int]) -> Lengths:
        values = np.array(lengths, np.int64)
        least, median, p95, most = (int(np.quantile(values, share, method="higher")) for share in (0, 0.5, 0.95, 1))
        return Lengths(len(values), int(values.sum()), least, median, p95, most, _bins(values))


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that there is to say."""

    data_path: str | list[str]
    cache: str
    read: Lengths
    """Documents as they are in the data."""
    used: Lengths | None
    """Sequences that would be trained on; None if they would be refused."""
    packed: bool
    targets: int
    notes: list[str]
    refusal: str | None
    positions: int | None
    """Tokens that the model's positions reach; None if its config does not say."""
    too_long: list[str]
    """Documents beyond that."""
    shown: Mask | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens in a row that are all trained on, or all not."""

    trained: bool
    tokens: int
    begin: str
    end: str
    """Text of its last tokens, where the middle is left out; empty otherwise."""
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Mask:
    """A document with its label mask, shortened."""

    number: int
    name: str
    tokens: int
    targets: int
    runs: list[Run] = field(default_factory=list)
    runs_left_out: int = 0


def describe(recipe: Recipe, *, show: int) -> Found:
    """Read the data of a recipe.

    Args:
        show: number of the document whose mask is shown, from 1; 0 for none.

    Raises:
        ValueError: data that cannot be read, or a document that there is not.
    """
    tokenizer = load_tokenizer(recipe)
    settings = data_settings(recipe)
    store = read(settings, tokenizer)
    lengths, refusal = np.diff(store.offsets).tolist(), None
    notes, documents = store.notes, StoredDocuments(store, [])
    try:
        corpus = arrange(store, settings)
    except ValueError as error:
        if not lengths:
            raise
        refusal = str(error)
    else:
        notes, documents = corpus.notes, corpus.documents
    positions = _positions(recipe)
    longest = zip([one.name for one in documents.sequences], documents.longest(), strict=True)
    if show and documents and not 0 < show <= len(documents):
        raise ValueError(
            f"There is no document {show}.\n  There are {len(documents):,} behind cutting and packing.\n"
            f"  Use --show 1 to --show {len(documents)}."
        )
    return Found(
        data_path=recipe.data_path,
        cache=str(store.folder),
        read=Lengths.of(lengths),
        used=Lengths.of(documents.num_tokens()) if documents else None,
        packed=recipe.packing,
        targets=sum(documents.num_targets()),
        notes=notes,
        refusal=refusal,
        positions=positions,
        too_long=[f"{name} ({tokens:,} tokens)" for name, tokens in longest if positions and tokens > positions],
        shown=mask_of(documents[show - 1], show, tokenizer) if show and documents else None,
    )


def _positions(recipe: Recipe) -> int | None:
    return trained_tokens(load_config(recipe).get_text_config()) or None


def mask_of(document: Document, number: int, tokenizer: Any) -> Mask:
    """The label mask of a document in runs, shortened in the middle of long runs and of many runs."""
    trained = (document.labels != IGNORED).numpy().copy()
    trained[0] = False  # a first token is never a target
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    ranges = list(pairwise(borders))
    left_out = max(len(ranges) - 2 * RUNS, 0)
    if left_out:
        ranges = [*ranges[:RUNS], *ranges[-RUNS:]]
    runs = []
    for start, end in ranges:
        ids = document.input_ids[start:end]
        middle = max(len(ids) - 2 * RUN_TOKENS, 0)
        begin = tokenizer.decode(ids[:RUN_TOKENS] if middle else ids)
        runs.append(
            Run(bool(trained[start]), len(ids), begin, tokenizer.decode(ids[-RUN_TOKENS:]) if middle else "", middle)
        )
    return Mask(number, document.name, len(document.input_ids), document.num_targets, runs, left_out)


def _bins(lengths: Any) -> list[tuple[int, int, int]]:
    """Documents by length, in powers of two."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    return [
        (1 << power, (2 << power) - 1, int((powers == power).sum())) for power in range(powers.min(), powers.max() + 1)
    ]


def text_report(found: Found, *, color: bool) -> str:
    """Everything as text; without colour, what is trained on stands in double brackets."""
    same = found.used == found.read
    lines = ["as read and trained on" if same else "as read", *_lengths(found.read, "documents")]
    if found.used is not None:
        share = found.targets / found.used.tokens
        lines += (
            [] if same else ["", "as trained on", *_lengths(found.used, "sequences" if found.packed else "documents")]
        )
        lines.append(f"  targets    {found.targets:,} ({share:.1%} of the tokens)")
    lines += ["", *(f"note: {note}" for note in found.notes)] if found.notes else []
    if found.positions is not None and found.used is not None:
        beyond = f"{len(found.too_long):,} longer: {shortened(found.too_long)}" if found.too_long else "none is longer"
        lines += [f"the model's positions reach {found.positions:,} tokens; {beyond}"]
    if found.shown is not None:
        lines += ["", *_mask_lines(found.shown, color)]
    lines += ["", f"token ids are kept in {found.cache}"]
    if found.refusal is not None:
        lines += ["", f"oomb train would refuse this: {found.refusal}"]
    return "\n".join(lines)


def _lengths(lengths: Lengths, what: str) -> list[str]:
    rows = [
        f"  {what}  {lengths.documents:,}",
        f"  tokens     {lengths.tokens:,}",
        f"  lengths    min {lengths.min:,}, median {lengths.median:,}, 95 % {lengths.p95:,}, max {lengths.max:,}",
    ]
    if lengths.documents == 1:
        return rows
    most = max(count for *_, count in lengths.bins)
    width = len(f"{lengths.bins[-1][1]:,}")
    for least, up_to, count in lengths.bins:
        bar = "#" * (-(-BARS * count // most))
        rows.append(f"  {least:>{width},} to {up_to:>{width},}  {count:>{len(f'{most:,}')},} {bar}".rstrip())
    return rows


def _mask_lines(mask: Mask, color: bool) -> list[str]:
    legend = "green is trained on, dim is context" if color else "[[...]] is trained on, the rest is context"
    head = f"document {mask.number}: {mask.name}, {mask.tokens:,} tokens, {mask.targets:,} targets; {legend}"
    parts = [_run_text(run, color) for run in mask.runs]
    if mask.runs_left_out:
        parts.insert(RUNS, f"\n... {mask.runs_left_out:,} more runs ...\n")
    return [head, "".join(parts)]


def _run_text(run: Run, color: bool) -> str:
    text = visible(run.begin)
    if run.left_out:
        text += f"\n... {run.left_out:,} tokens ...\n" + visible(run.end)
    if not color:
        return f"[[{text}]]" if run.trained else text
    style = "\x1b[32m" if run.trained else "\x1b[2m"
    return f"{style}{text}\x1b[0m"


def visible(text: str) -> str:
    """Without what would drive the terminal: control characters are written out."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)
