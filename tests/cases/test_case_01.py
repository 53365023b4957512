"""Case 1: documents of every awkward length, for several chunk and page sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import oomb_accel
from tests.harness.batches import documents_of, padded
from tests.harness.models import tiny_model
from tests.harness.parity import assert_same_result, check_parity, chunked, config, reference
from tests.harness.tolerance import assert_same_bits

LENGTHS = (2, 3, 4, 5, 15, 16, 17, 31, 33, 47, 49, 200)
SIZES = ((16, 4), (12, 5), (64, 4))


@contextmanager
def nan_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: whatever is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(("chunk", "page"), SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_parity(length: int, chunk: int, page: int) -> None:
    layout = padded(documents_of(length))
    assert oomb_accel.count_targets(layout.batch) == length - 1
    ours, _ = check_parity(tiny_model(), layout, config(chunk, page), embeds=length % 2 == 0)
    assert ours.log_probs[0].numel() == length - 1 and (ours.log_probs[0] < 0).all()


@pytest.mark.parametrize(("chunk", "page"), SIZES)
def test_a_document_of_one_token_costs_nothing_and_breaks_nothing(chunk: int, page: int) -> None:
    events: list[object] = []
    layout = padded(documents_of(1))
    with pytest.warns(UserWarning, match="row 0"):
        ours = chunked(tiny_model(), layout, config(chunk, page), on_progress=events.append)
    assert ours.loss.item() == 0.0 and not events
    assert all(not g.any() for g in ours.gradients.values())


def test_a_document_of_one_token_beside_others() -> None:
    documents = documents_of(1, 33)
    with pytest.warns(UserWarning, match="row 0"):
        both = chunked(tiny_model(), padded(documents), config())
    assert_same_result(both, reference(tiny_model(), documents))


@pytest.mark.parametrize("keep_outputs", [True, False])
@pytest.mark.parametrize("length", [5, 17, 31, 33, 47])
def test_garbage_in_unused_memory_changes_nothing(length: int, keep_outputs: bool) -> None:
    settings = config(keep_outputs=keep_outputs)
    layout = padded(documents_of(length))
    clean = chunked(tiny_model(), layout, settings)
    with nan_memory():
        dirty = chunked(tiny_model(), layout, settings)
    assert_same_bits(dirty.log_probs[0], clean.log_probs[0])
    assert_same_bits(dirty.gradients, clean.gradients)


@pytest.mark.parametrize("window", [3, 5, 20])
def test_garbage_in_unused_memory_changes_nothing_with_windows(window: int) -> None:
    layout = padded(documents_of(47, 18))
    clean = chunked(tiny_model("mistral", sliding_window=window), layout)
    with nan_memory():
        dirty = chunked(tiny_model("mistral", sliding_window=window), layout)
    assert_same_bits(dirty.gradients, clean.gradients)
