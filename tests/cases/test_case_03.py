"""Case 3: targets in the last, the first or a middle chunk only; work without targets is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oomb_accel.progress import ChunkEvent
from tests.harness.batches import Layout, documents_of, only_targets, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import check_parity, chunked, config

LENGTH = 80
PLACES = {"last": range(66, 80), "first": range(2, 15), "middle": range(35, 45), "scattered": (3, 16, 17, 48, 79)}


def layout_of(place: str) -> Layout:
    (document,) = documents_of(LENGTH)
    return padded([only_targets(document, PLACES[place])])


@pytest.mark.parametrize("embeds", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_all_gradients_are_equal(place: str, embeds: bool) -> None:
    check_parity(tiny_model(), layout_of(place), embeds=embeds)


@pytest.mark.parametrize("place", PLACES)
def test_all_gradients_are_equal_with_lora(place: str) -> None:
    check_parity(with_lora(tiny_model("qwen3")), layout_of(place), config(keep_last_graph=False))


def test_masked_chunks_still_carry_gradients() -> None:
    ours, _ = check_parity(tiny_model(), layout_of("last"), embeds=True)
    per_chunk = ours.gradients["inputs_embeds.0"].unflatten(0, (5, 16)).norm(dim=(1, 2))
    assert (per_chunk > 1e-3 * per_chunk.max()).all()


@pytest.mark.parametrize("place", PLACES)
def test_the_head_runs_on_targets_only(place: str) -> None:
    model = tiny_model()
    rows: list[int] = []

    def count(module: nn.Module, args: Any) -> None:
        rows.append(args[0].shape[:-1].numel())

    model.lm_head.register_forward_pre_hook(count)
    chunked(model, layout_of(place), config(keep_last_graph=False))
    assert sum(rows) == 2 * len(PLACES[place]), "each target once per sweep"
    chunks = -(-max(PLACES[place]) // 16)
    assert len(rows) == 2 * chunks, "the module is called once per pass, with no rows too"


@pytest.mark.parametrize(("place", "chunks"), [("last", 5), ("first", 1), ("middle", 3), ("scattered", 5)])
def test_trailing_chunks_without_targets_are_skipped(place: str, chunks: int) -> None:
    events: list[ChunkEvent] = []
    chunked(tiny_model(), layout_of(place), config(keep_last_graph=False), on_progress=events.append)
    assert [e.sweep for e in events] == ["forward"] * chunks + ["backward"] * chunks
    assert [e.chunk for e in events] == [*range(1, chunks + 1)] * 2
    assert {e.num_chunks for e in events} == {chunks}
    assert events[-1].tokens_done == events[-1].total_tokens <= 16 * chunks
    assert events[chunks - 1].tokens_done == events[-1].total_tokens
    assert {torch.device(e.device).type for e in events} == {"cpu"}
