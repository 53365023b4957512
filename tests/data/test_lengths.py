"""Cutting to length, leaving out, packing: nothing silent, nothing lost."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import oomb_accel
from oomb_accel.config import OombConfig
from oomb_accel.data.documents import Document, collate
from oomb_accel.data.pack import first_fit_decreasing
from oomb_accel.training.identity import data_digest
from tests.data.conftest import Load


def write_rows(path: Path, lengths: list[int]) -> Path:
    """Rows of ready tokens that all differ."""
    number = itertools.count(1)
    rows = [{"input_ids": [next(number) for _ in range(length)]} for length in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("policy", "lengths", "first", "note"),
    [
        ("start", [4, 3, 4, 4], 1, ": kept the start, 12 of 21 tokens"),
        ("end", [4, 3, 4, 4], 2, ": kept the end, 12 of 21 tokens"),
        ("drop", [3], 6, ": dropped, 21 tokens, longer than max_length=4"),
        ("split", [4, 3, 4, 3, 4, 4], 1, ": 21 tokens split into 7 documents"),  # two parts of one token are left out
    ],
)
def test_policies(load_paths: Load, tmp_path: Path, policy: Any, lengths: list[int], first: int, note: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [5, 3, 7, 9])
    corpus = load_paths(path, max_length=4, truncation=policy)
    assert [len(one.input_ids) for one in corpus.documents] == lengths
    assert int(corpus.documents[0].input_ids[0]) == first
    assert corpus.notes[0] == f"3 of 4 documents ({path} line 1, {path} line 3, {path} line 4){note}"


def test_too_long(load_paths: Load, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [5, 3, 7, 9])
    with pytest.raises(ValueError, match=r"line 4 is longer.*\n.*9 tokens.*3 of 4 documents.*\n.*max_length=9"):
        load_paths(path, max_length=4)


def test_split_loses_no_token(load_paths: Load, tmp_path: Path) -> None:
    corpus = load_paths(write_rows(tmp_path / "a.jsonl", [5, 3, 7]), max_length=2, truncation="split")
    found = [token for one in corpus.documents for token in one.input_ids.tolist()]
    assert found == [token for token in range(1, 16) if token not in (5, 8, 15)]  # last ones, alone in their part
    assert "left out 3 documents without a target: " in corpus.notes[1]


def test_long_lists_are_shortened(load_paths: Load, tmp_path: Path) -> None:
    corpus = load_paths(write_rows(tmp_path / "a.jsonl", [5] * 2000), max_length=4, truncation="start")
    note = corpus.notes[0].replace(str(tmp_path), "")
    assert "line 3, ... and 1,997 more)" in note and len(note) < 300


@given(lengths=st.lists(st.integers(1, 50), max_size=60), spare=st.integers(0, 30))
def test_first_fit_decreasing(lengths: list[int], spare: int) -> None:
    capacity = max(lengths, default=1) + spare
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in items) <= capacity for items in bins)
    # As the plain search would do it.
    plain: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        room = (items for items in plain if sum(lengths[i] for i in items) + lengths[item] <= capacity)
        items = next(room, None)
        if items is None:
            plain.append([item])
        else:
            items.append(item)
    assert bins == sorted(sorted(items) for items in plain)


def test_many_items_take_no_time() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 50_000).tolist()
    bins = first_fit_decreasing(lengths, 4096)
    assert sum(lengths) / (len(bins) * 4096) > 0.98


def test_packing(load_paths: Load, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [5, 3, 2, 6, 4])
    alone, packed = load_paths(path), load_paths(path, max_length=8, packing=True)
    assert "packed 5 documents into 3 sequences of up to 8 tokens, 83.3% full" in packed.notes[-1]
    assert [len(one.input_ids) for one in packed.documents] == [8, 8, 4]
    assert [one.starts for one in packed.documents] == [(0, 5), (0, 2), (0,)]
    assert sum(one.num_targets for one in packed.documents) == sum(one.num_targets for one in alone.documents)
    assert packed.documents.longest() == [5, 6, 4] and alone.documents.longest() == [5, 3, 2, 6, 4]
    assert data_digest(packed.documents) != data_digest(alone.documents)
    first = packed.documents[0]
    assert first.position_ids().tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert first.labels.tolist() == [1, 2, 3, 4, 5, -100, 7, 8]
    borders_differ = Document(first.name, first.input_ids, first.labels, (0, 4))
    assert data_digest([first]) != data_digest([borders_differ])


def test_packed_documents_do_not_see_each_other(load_paths: Load, tmp_path: Path) -> None:
    """The loss of packed sequences in one micro-batch is the mean over the targets of the documents alone."""
    path = write_rows(tmp_path / "a.jsonl", [9, 14, 5, 21, 2])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, initializer_range=0.2
    )
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 16
    model = LlamaForCausalLM(config)
    alone, packed = load_paths(path).documents, load_paths(path, max_length=24, packing=True).documents
    with torch.no_grad():
        sums = [float(model(**collate([one], 0)).loss) * one.num_targets for one in alone]
    targets = sum(one.num_targets for one in alone)
    oomb_accel.enable(model, OombConfig(chunk_tokens=8, page_tokens=4))
    model.train()
    loss = float(model(**collate(list(packed), 0)).loss.detach())
    assert len(packed) == 3 and any(len(one.starts) > 1 for one in packed)
    assert loss == pytest.approx(sum(sums) / targets, rel=1e-5)


def test_documents_are_read_from_the_file(load_paths: Load, tmp_path: Path) -> None:
    documents: Any = load_paths(write_rows(tmp_path / "a.jsonl", [5, 3])).documents
    assert isinstance(documents.store.tokens, np.memmap) and documents.store.tokens.dtype == np.uint32
    assert documents.store.offsets.dtype == np.int64
    assert documents[0].input_ids.dtype == documents[0].labels.dtype == torch.int64
    assert (len(documents), documents.num_tokens(), documents.num_targets()) == (2, [5, 3], [4, 2])
    assert [one.name for one in documents[1:]] == [documents[-1].name]
    with pytest.raises(IndexError):
        documents[2]
