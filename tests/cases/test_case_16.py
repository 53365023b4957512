"""Case 16: where pages lie, and when they are copied, changes no bit of loss and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from oomb_accel.pages import room as rooms
from tests.harness.batches import documents_of, packed
from tests.harness.late import LateMover
from tests.harness.models import tiny_model, twin
from tests.harness.parity import Result, chunked, config
from tests.harness.sparse import sparse
from tests.harness.tolerance import assert_same_bits

SETTINGS: dict[str, Any] = {
    "dense": config(span_tokens=8),
    "dense, all run again": config(span_tokens=16, keep_outputs=False, keep_last_graph=False),
    "sparse": sparse(),
    "causal, shared, recomputed": sparse(
        causal_selection=True, select_per="layer", keep_outputs=False, keep_last_graph=False
    ),
    "bf16 page gradients": sparse(page_grad_dtype="bfloat16"),
    "one dense layer": sparse(dense_layers=(0,), span_tokens=8),
}


def run(settings: str, **changes: Any) -> Result:
    chosen = dataclasses.replace(SETTINGS[settings], **changes)
    model = twin(tiny_model(num_hidden_layers=5))
    return chunked(model, packed(documents_of(100, 21, 70)), chosen, embeds=True)


def assert_same(ours: Result, wanted: Result) -> None:
    assert_same_bits(ours.loss, wanted.loss)
    assert_same_bits(torch.cat(ours.log_probs), torch.cat(wanted.log_probs))
    assert_same_bits(ours.gradients, wanted.gradients)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_pages_in_host_memory(settings: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest device pools, with and without room to bring pages ahead, and copies at random times."""
    wanted = run(settings)
    monkeypatch.setattr(rooms, "_AHEAD", 1 + seed)
    mover = LateMover(seed)
    monkeypatch.setattr("oomb_accel.offload.HostMover", lambda: mover)
    assert_same(run(settings, offload=True), wanted)
    assert mover.num_copies > 100 and mover.num_late > 20
