"""Batch to stream: layouts, borders, contradictions, padding, and what is counted as a target."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import oomb_accel
from oomb_accel.integrations.stream import Stream, build_stream, find_documents
from tests.harness.batches import ENCODINGS, IGNORED, Document, documents_of, only_targets, packed, padded

CPU = torch.device("cpu")


def stream_of(batch: dict[str, Any], chunk: int = 16, page: int = 4) -> Stream:
    return build_stream(batch, chunk_tokens=chunk, page_tokens=page, device=CPU)


def ids_of(batch: dict[str, Any], stream: Stream) -> Tensor:
    return batch["input_ids"].reshape(-1)[stream.token_index_T]


def check_against(batch: dict[str, Any], documents: list[Document], page: int = 4) -> Stream:
    """The stream holds each document up to its last target, its positions, and its targets."""
    stream = stream_of(batch, page=page)
    ids, positions, targets = [], [], []
    for document in documents:
        columns = document.target_columns
        if not columns.numel():
            continue
        needed = int(columns[-1]) + 1
        length = min(len(document), -(-needed // page) * page)
        ids.append(document.ids[:length])
        positions.append(torch.arange(length))
        targets.append(document.ids[columns + 1])
    assert torch.equal(ids_of(batch, stream), torch.cat(ids))
    assert torch.equal(stream.position_ids_1T[0], torch.cat(positions))
    assert torch.equal(stream.targets_N, torch.cat(targets))
    assert stream.num_targets == len(stream.targets_N) == oomb_accel.count_targets(batch)
    flat = batch["input_ids"].reshape(-1)
    assert torch.equal(flat[stream.target_index_N + 1], stream.targets_N)
    assert torch.equal(stream.token_index_T[stream.target_rows_N], stream.target_index_N)
    return stream


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_disappears(side: str) -> None:
    documents = documents_of(37, 12, 2, 5)
    stream = check_against(padded(documents, side=side).batch, documents)
    assert stream.document_tokens == (37, 12, 2, 5)


@pytest.mark.parametrize("encodings", [(e,) for e in ENCODINGS] + [ENCODINGS])
def test_packed_rows_are_documents(encodings: tuple[str, ...]) -> None:
    documents = documents_of(21, 8, 34)
    check_against(packed(documents, *encodings).batch, documents)


def test_without_any_encoding_a_row_is_one_document() -> None:
    (document,) = documents_of(30)
    document.ids[[5, 11, 12]] = 2  # EOS ids are no borders
    check_against({"input_ids": document.ids[None], "labels": document.ids[None]}, [document])


def test_packed_rows_with_padding_at_the_end() -> None:
    documents = documents_of(10, 7)
    batch = packed(documents).batch
    pad = torch.zeros(1, 5, dtype=torch.long)
    batch = {
        "input_ids": torch.cat([batch["input_ids"], pad], 1),
        "labels": torch.cat([batch["labels"], pad + IGNORED], 1),
        "position_ids": torch.cat([batch["position_ids"], pad], 1),
        "attention_mask": torch.tensor([[1] * 17 + [0] * 5]),
    }
    check_against(batch, documents)


def test_position_ids_of_left_padding_are_not_read() -> None:
    documents = documents_of(9, 4)
    layout = padded(documents, side="left")
    mask = layout.batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as transformers makes them
    check_against({**layout.batch, "position_ids": positions}, documents)


def test_one_row_of_position_ids_for_all_rows() -> None:
    documents = documents_of(9, 9)
    check_against({**padded(documents).batch, "position_ids": torch.arange(9)[None]}, documents)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    documents = documents_of(9, 4)
    layout = padded(documents)
    check_against({**layout.batch, "attention_mask": layout.batch["attention_mask"].to(dtype)}, documents)


def test_shift_labels_are_taken_as_they_are() -> None:
    documents = documents_of(21, 8)
    batch = packed(documents).batch
    shifted = torch.cat([torch.cat([d.ids[1:], torch.tensor([IGNORED])]) for d in documents])[None]
    del batch["labels"]
    check_against({**batch, "shift_labels": shifted}, documents)


def test_shift_labels_may_have_a_target_behind_the_row() -> None:
    """Input and target cut from one text, ``ids[:-1]`` and ``ids[1:]``: transformers scores the last one too."""
    (document,) = documents_of(41)
    batch = {"input_ids": document.ids[None, :-1], "shift_labels": document.ids[None, 1:]}
    stream = stream_of(batch)
    assert stream.num_targets == oomb_accel.count_targets(batch) == 40
    assert torch.equal(stream.targets_N, document.ids[1:])
    assert stream.overcount == 0


def test_tokens_behind_the_last_target_are_left_out() -> None:
    (document,) = documents_of(100)
    document = only_targets(document, [3, 21])
    stream = check_against(padded([document]).batch, [document])
    assert stream.schedule.num_tokens == 24, "position 20 predicts the last target; its page ends at 24"
    assert stream.document_tokens == (100,), "RoPE scaling depends on the whole document"


def test_a_document_without_targets_is_left_out() -> None:
    first, second = documents_of(30, 10)
    first = only_targets(first, [])
    with pytest.warns(UserWarning, match="row 0 of"):
        stream = stream_of(padded([first, second]).batch)
    assert stream.schedule.num_tokens == 10


def test_the_warning_names_every_row_without_targets() -> None:
    documents = [only_targets(d, []) for d in documents_of(4, 5, 6)]
    documents[1] = documents_of(5)[0]
    with pytest.warns(UserWarning, match="row 0, 2 of"):
        stream_of(padded(documents).batch)


def test_no_warning_for_a_row_with_targets() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream_of(padded(documents_of(4, 5)).batch)


def test_a_row_of_padding_only() -> None:
    (document,) = documents_of(6)
    batch = {k: torch.cat([v, torch.zeros_like(v)]) for k, v in padded([document]).batch.items()}
    with pytest.warns(UserWarning, match="row 1 of"):
        stream = stream_of(batch)
    assert stream.num_targets == 5


def test_labels_on_padding_are_no_targets() -> None:
    """``labels = input_ids.clone()`` also labels the padding; the attention mask says better."""
    documents = documents_of(9, 4)
    for side in ("left", "right"):
        batch = padded(documents, side=side).batch
        check_against({**batch, "labels": batch["input_ids"].clone()}, documents)


def test_a_label_on_the_first_token_is_no_target() -> None:
    for layout in (padded(documents_of(9, 4), side="left"), packed(documents_of(9, 4))):
        assert oomb_accel.count_targets(layout.batch) == 8 + 3


def test_overcount_is_what_the_trainer_counts_and_we_do_not_score() -> None:
    documents = documents_of(9, 4)
    assert stream_of(padded(documents).batch).overcount == 0, "Trainer leaves out the first column itself"
    assert stream_of(padded(documents, side="left").batch).overcount == 1
    assert stream_of(packed(documents).batch).overcount == 1
    batch = padded(documents).batch
    assert stream_of({**batch, "labels": batch["input_ids"].clone()}).overcount == 5


def test_empty_documents_in_cumulative_lengths_are_nothing() -> None:
    documents = documents_of(9, 4)
    batch = packed(documents).batch
    del batch["position_ids"]
    check_against({**batch, "cu_seq_lens_q": torch.tensor([0, 9, 9, 13])}, documents)


@pytest.mark.parametrize(("first", "second"), [("position_ids", "cu_seq_lens"), ("cu_seq_lens", "seq_idx")])
def test_contradictory_borders_name_both_encodings(first: str, second: str) -> None:
    one, other = documents_of(21, 8, 34), documents_of(21, 9, 33)
    batch = {**packed(one, first).batch}
    batch |= {k: v for k, v in packed(other, second).batch.items() if k not in ("input_ids", "labels")}
    with pytest.raises(ValueError, match=rf"(?s){first}.*29.*{second}.*30"):
        stream_of(batch)


def test_continuous_positions_contradict_borders() -> None:
    batch = packed(documents_of(21, 8), "seq_idx").batch
    with pytest.raises(ValueError, match="contradict"):
        stream_of({**batch, "position_ids": torch.arange(29)[None]})


def test_cu_seq_lens_of_queries_and_keys_must_agree() -> None:
    batch = packed(documents_of(21, 8), "cu_seq_lens").batch
    with pytest.raises(ValueError, match="contradict"):
        stream_of({**batch, "cu_seq_lens_k": torch.tensor([0, 20, 29])})


@pytest.mark.parametrize("borders", [[0, 10], [1, 29], [0, 20, 10, 29], [29], [0, 30]])
def test_cu_seq_lens_must_cover_the_row(borders: list[int]) -> None:
    batch = packed(documents_of(29), "seq_idx").batch
    with pytest.raises(ValueError, match="must rise from 0 to 29"):
        stream_of({**batch, "cu_seq_lens_q": torch.tensor(borders)})


def test_positions_that_jump_are_an_error() -> None:
    (document,) = documents_of(10)
    positions = torch.tensor([[0, 1, 2, 3, 7, 8, 9, 10, 11, 12]])
    with pytest.raises(ValueError, match=r"(?s)jump in row 0.*Column 4 goes from 3 to 7"):
        stream_of({**padded([document]).batch, "position_ids": positions})


def test_an_offset_of_all_positions_is_absorbed() -> None:
    """Left-padded rows are often numbered from the padding on. RoPE is relative, so the document starts at 0 here."""
    documents = documents_of(10, 6)
    layout = padded(documents, side="left")
    check_against({**layout.batch, "position_ids": torch.arange(10)[None].expand(2, -1)}, documents)


def test_a_mask_with_a_hole_is_an_error() -> None:
    batch = padded(documents_of(9, 9)).batch
    batch["attention_mask"][1, 4] = 0
    with pytest.raises(ValueError, match=r"(?s)hole in row 1.*Column 4 is masked"):
        stream_of(batch)


@pytest.mark.parametrize("mask", [torch.ones(1, 8), torch.ones(1, 1, 9, 9), 2 * torch.ones(1, 9)])
def test_a_mask_of_another_kind_is_an_error(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"(?s)attention_mask must be.*position_ids"):
        stream_of({**padded(documents_of(9)).batch, "attention_mask": mask})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": torch.zeros(1, 8, dtype=torch.long)}, "labels does not have the shape"),
        ({"position_ids": torch.arange(8)[None]}, "position_ids must be one per token"),
        ({"seq_idx": torch.zeros(1, 8, dtype=torch.long)}, "seq_idx must be one number per token"),
        ({"input_ids": None}, "neither"),
        ({"inputs_embeds": torch.zeros(1, 9, 4)}, "both"),
        ({"input_ids": torch.zeros(9, dtype=torch.long)}, "2 dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        stream_of({**padded(documents_of(9)).batch, **change})


def test_find_documents_lists_rows_in_order() -> None:
    documents = find_documents(padded(documents_of(3, 5), side="left").batch)
    assert [(d.row, d.start, d.end) for d in documents] == [(0, 2, 5), (1, 0, 5)]
