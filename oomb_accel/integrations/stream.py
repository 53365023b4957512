"""From a batch in any layout to a stream: documents one after another, padding gone, targets listed.

Rows with padding on either side and packed rows (restarted ``position_ids``, ``cu_seq_lens_q/k``, ``seq_idx``)
are the same thing here. An end-of-text token alone is no border.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from oomb_accel.data.documents import IGNORED
from oomb_accel.pages import PageRooms
from oomb_accel.schedule import ChunkSchedule

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Document:
    """One training sequence inside a batch: columns ``[start, end)`` of a row."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Stream:
    """The documents of one micro-batch as far as they matter for the loss.

    A document ends with the page of its last target, and one without targets is left out: tokens behind the
    last target have no influence on the loss.
    """

    schedule: ChunkSchedule
    document_tokens: tuple[int, ...]
    """Full length of each document that is part of the stream (RoPE scaling may depend on it)."""
    token_index_T: Tensor
    """int64 on the device: where each stream token stands in the flattened batch."""
    position_ids_1T: Tensor
    """int64 on the device; starts at 0 in each document."""
    targets_N: Tensor
    """int64 on the device: token ids of the targets, in stream order."""
    target_range: tuple[int, int]
    """Smallest and largest target."""
    target_rows_N: Tensor
    """int64 on the device: stream position that predicts each target."""
    target_index_N: Tensor
    """int64 on the device: the same position in the flattened batch."""
    overcount: int
    """Labels that transformers' Trainer counts in this batch but that are no targets."""
    rooms: PageRooms | None = None
    """How pages are divided between device and host; None where all of them stay on the device."""
    trained: tuple[nn.Parameter, ...] = ()
    """What gets gradients in this step. Looked up once for each: it may have changed since the last one."""

    @property
    def num_targets(self) -> int:
        return self.schedule.num_targets


def build_stream(batch: Mapping[str, Any], *, chunk_tokens: int, page_tokens: int, device: torch.device) -> Stream:
    """Find documents and targets of a batch and cut them into chunks.

    Args:
        batch: ``input_ids`` or ``inputs_embeds``; ``labels`` or ``shift_labels`` ``[B, L]``; and optionally
            ``attention_mask``, ``position_ids``, ``seq_idx`` ``[B, L]``, ``cu_seq_lens_q/k``.

    Raises:
        ValueError: shapes that do not fit, contradictory borders, masks with holes.
    """
    documents = find_documents(batch)
    shifted = _shifted_labels(batch)
    num_columns = shifted.shape[1]
    lengths: list[int] = []
    full_lengths: list[int] = []
    indices: list[Ints] = []
    positions: list[Ints] = []
    rows: list[Ints] = []
    rows_with_targets: set[int] = set()
    for document in documents:
        columns = _target_columns(document, shifted)
        if not columns.size:
            continue
        needed = int(columns[-1]) + 1 - document.start
        length = min(document.end - document.start, -(-needed // page_tokens) * page_tokens)
        base = document.row * num_columns + document.start
        rows_with_targets.add(document.row)
        rows.append(columns - document.start + sum(lengths))
        indices.append(np.arange(base, base + length))
        positions.append(np.arange(length))
        lengths.append(length)
        full_lengths.append(document.end - document.start)
    target_rows = _joined(rows)
    token_index = _joined(indices)
    target_index = token_index[target_rows]
    targets = shifted.reshape(-1)[target_index]
    if documents:  # a batch of padding only is the empty batch of a rank that has run out of data
        _warn_of_rows_without_targets(len(shifted), rows_with_targets)
    # No list, which takes the host 20 ms for a million targets.
    schedule = ChunkSchedule.build(lengths, target_rows.data, chunk_tokens=chunk_tokens, page_tokens=page_tokens)
    return Stream(
        schedule=schedule,
        document_tokens=tuple(full_lengths),
        token_index_T=_to(token_index, device),
        position_ids_1T=_to(_joined(positions), device)[None],
        targets_N=_to(targets, device),
        target_range=(int(targets.min(initial=0)), int(targets.max(initial=0))),
        target_rows_N=_to(target_rows, device),
        target_index_N=_to(target_index, device),
        # Trainer counts labels but for those of the first column.
        overcount=int((shifted != IGNORED).sum()) - target_rows.size,
    )


def dummy_stream(device: torch.device) -> Stream:
    """One token without targets: what a rank runs while others have chunks left."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    return Stream(
        schedule=ChunkSchedule.build([1], [], chunk_tokens=1, page_tokens=1),
        document_tokens=(1,),
        token_index_T=one,
        position_ids_1T=one[None],
        targets_N=nothing,
        target_range=(0, 0),
        target_rows_N=nothing,
        target_index_N=nothing,
        overcount=0,
    )


def check_targets(stream: Stream, vocab_size: int) -> None:
    """Refuse labels that are no token ids: a kernel would read somebody else's memory.

    Raises:
        ValueError: with the label.
    """
    smallest, largest = stream.target_range
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(
            f"A label is no token id of this model.\n  Got {wrong}; ids go from 0 to {vocab_size - 1}.\n"
            f"  Mask tokens without a loss with {IGNORED}, and check that tokenizer and model belong together."
        )


def count_targets(batch: Mapping[str, Any]) -> int:
    """Targets of a batch: labels that are not masked, not padding, and not the first token of a document.

    Pass their sum over all micro-batches of an optimizer step as ``model(**batch, num_targets=...)``, so that the
    loss is the mean over the whole step.

    Args:
        batch: as for the model: ``labels`` or ``shift_labels`` and whatever tells documents and padding.

    Raises:
        ValueError: as the model would on this batch.
    """
    shifted = _shifted_labels(batch)
    return sum(_target_columns(document, shifted).size for document in find_documents(batch))


def find_documents(batch: Mapping[str, Any]) -> list[Document]:
    """Documents of a batch in row order. All encodings of borders that are present must agree.

    Raises:
        ValueError: contradictory borders, positions that jump, or a mask with holes.
    """
    num_rows, num_columns = _shape(batch)
    begins, ends = _valid_ranges(batch, num_rows, num_columns)
    encodings = {
        name: borders
        for name, borders in (
            ("position_ids", _borders_from_positions(batch, begins, ends, num_rows, num_columns)),
            ("cu_seq_lens_q", _borders_from_lengths(batch, "cu_seq_lens_q", num_rows, num_columns)),
            ("cu_seq_lens_k", _borders_from_lengths(batch, "cu_seq_lens_k", num_rows, num_columns)),
            ("seq_idx", _borders_from_seq_idx(batch, num_rows, num_columns)),
        )
        if borders is not None
    }
    documents: list[Document] = []
    for row in range(num_rows):
        inside = {
            name: [int(c) for c in borders[row] if begins[row] < c < ends[row]] for name, borders in encodings.items()
        }
        names = list(inside)
        for other in names[1:]:
            if inside[other] != inside[names[0]]:
                raise ValueError(
                    f"Two encodings of document borders contradict each other in row {row}.\n"
                    f"  {names[0]} has borders at {inside[names[0]][:8]}, {other} at {inside[other][:8]}.\n"
                    "  Pass one of them only, or make them agree."
                )
        cuts = [int(begins[row]), *(inside[names[0]] if names else []), int(ends[row])]
        documents += [Document(row, a, b) for a, b in pairwise(cuts) if b > a]
    return documents


def _target_columns(document: Document, shifted: Ints) -> Ints:
    """Columns of the document whose next token is a target. The last column of the document predicts the next
    document's first token, which is none; only that of the row may have a target, behind it in ``shift_labels``.
    """
    end = document.end if document.end == shifted.shape[1] else document.end - 1
    inside = shifted[document.row, document.start : end]
    return np.flatnonzero(inside != IGNORED) + document.start


def _shifted_labels(batch: Mapping[str, Any]) -> Ints:
    """``[B, L]``: at each column the label of the next column."""
    num_rows, num_columns = _shape(batch)
    name = "shift_labels" if batch.get("shift_labels") is not None else "labels"
    labels = _host(batch[name])
    if labels.shape != (num_rows, num_columns):
        raise ValueError(
            f"{name} does not have the shape of the batch.\n  Got {labels.shape}, the batch is "
            f"{(num_rows, num_columns)}.\n  Pass one label per token, {IGNORED} where there is none."
        )
    if name == "shift_labels":
        return labels
    return np.concatenate([labels[:, 1:], np.full((num_rows, 1), IGNORED, np.int64)], axis=1)


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        raise ValueError(
            "Exactly one of input_ids and inputs_embeds is needed.\n"
            f"  Got {'both' if ids is not None else 'neither'}.\n  Pass input_ids of shape [batch, tokens]."
        )
    name, wanted = ("inputs_embeds", 3) if ids is None else ("input_ids", 2)
    shape = tuple(batch[name].shape)
    if len(shape) != wanted:
        raise ValueError(
            f"{name} must have {wanted} dimensions.\n  Got shape {shape}.\n  Add a batch dimension: [None]."
        )
    if not shape[0] * shape[1]:
        raise ValueError(f"The batch has no tokens.\n  {name} has shape {shape}.\n  Leave empty batches out.")
    return shape[0], shape[1]


def _valid_ranges(batch: Mapping[str, Any], num_rows: int, num_columns: int) -> tuple[Ints, Ints]:
    """First and end column of each row's tokens that are no padding."""
    if batch.get("attention_mask") is None:
        return np.zeros(num_rows, np.int64), np.full(num_rows, num_columns, np.int64)
    mask = _host(batch["attention_mask"])
    if mask.shape != (num_rows, num_columns) or not np.isin(mask, (0, 1)).all():
        raise ValueError(
            "attention_mask must be 0 for padding and 1 for tokens, one per token.\n"
            f"  Got shape {mask.shape} and values up to {mask.max(initial=0)}, the batch is "
            f"{(num_rows, num_columns)}.\n"
            "  For packed documents pass restarted position_ids, cu_seq_lens_q/k or seq_idx instead."
        )
    begins = mask.argmax(axis=1)
    counts = mask.sum(axis=1)
    ends = begins + counts
    for row in range(num_rows):
        if mask[row, begins[row] : ends[row]].sum() != counts[row]:
            hole = int(begins[row] + np.argmin(mask[row, begins[row] :]))
            raise ValueError(
                f"attention_mask has a hole in row {row}: padding between tokens.\n"
                f"  Column {hole} is masked, later columns are not.\n"
                "  Put padding at one end of the row, or make it two documents with restarted position_ids."
            )
    return begins.astype(np.int64), ends.astype(np.int64)


def _borders_from_positions(
    batch: Mapping[str, Any], begins: Ints, ends: Ints, num_rows: int, num_columns: int
) -> list[Ints] | None:
    if batch.get("position_ids") is None:
        return None
    positions = _host(batch["position_ids"])
    if positions.ndim != 2 or positions.shape[0] not in (1, num_rows) or positions.shape[1] != num_columns:
        raise ValueError(
            f"position_ids must be one per token.\n  Got shape {positions.shape}, the batch is "
            f"{(num_rows, num_columns)}.\n  Leave position_ids out for one document per row."
        )
    positions = np.broadcast_to(positions, (num_rows, num_columns))
    borders = []
    for row in range(num_rows):
        inside = positions[row, begins[row] : ends[row]]
        cuts = np.flatnonzero(np.diff(inside) != 1) + 1
        jumps = cuts[inside[cuts] != 0]
        if jumps.size:
            at = int(jumps[0])
            raise ValueError(
                f"position_ids jump in row {row}: neither the next position nor a new document.\n"
                f"  Column {int(begins[row]) + at} goes from {int(inside[at - 1])} to {int(inside[at])}.\n"
                "  Count up by one inside a document and restart at 0 for the next."
            )
        borders.append(cuts + begins[row])
    return borders


def _borders_from_lengths(batch: Mapping[str, Any], name: str, num_rows: int, num_columns: int) -> list[Ints] | None:
    if batch.get(name) is None:
        return None
    cumulative = _host(batch[name]).reshape(-1)
    fits = cumulative.size > 1 and cumulative[0] == 0 and cumulative[-1] == num_columns
    if num_rows != 1 or not fits or (np.diff(cumulative) < 0).any():
        raise ValueError(
            f"{name} does not describe this batch.\n  Got {cumulative[:8].tolist()}... for a batch of shape "
            f"{(num_rows, num_columns)}.\n  It must rise from 0 to {num_columns}, with a batch of one packed row."
        )
    return [np.unique(cumulative)]


def _borders_from_seq_idx(batch: Mapping[str, Any], num_rows: int, num_columns: int) -> list[Ints] | None:
    if batch.get("seq_idx") is None:
        return None
    numbers = _host(batch["seq_idx"])
    if numbers.shape != (num_rows, num_columns):
        raise ValueError(
            f"seq_idx must be one number per token.\n  Got shape {numbers.shape}, the batch is "
            f"{(num_rows, num_columns)}.\n  Pass the index of each token's document."
        )
    return [np.flatnonzero(np.diff(row)) + 1 for row in numbers]


def _warn_of_rows_without_targets(num_rows: int, with_targets: set[int]) -> None:
    empty = sorted(set(range(num_rows)) - with_targets)
    if empty:
        names = ", ".join(str(row) for row in empty[:8])
        warnings.warn(
            f"No target in row {names} of the batch: it adds nothing to the loss. "
            "Check the label mask and the truncation of this data.",
            stacklevel=2,
        )


def _host(values: Tensor) -> Ints:
    result: Ints = values.detach().to("cpu", torch.int64).numpy()
    return result


def _joined(pieces: list[Ints]) -> Ints:
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


def _to(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
