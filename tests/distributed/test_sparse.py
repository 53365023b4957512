"""Sparse attention on two ranks: the same as in one process, for the strategies by which gradients reach parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oomb_accel
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import (
    Job,
    Outcome,
    batch_of,
    check_outcomes,
    sgd,
    steps_of,
    train,
    whole_weights,
)
from tests.harness.batches import documents_of
from tests.harness.parity import switched_on
from tests.harness.sparse import recorded_selections
from tests.harness.tolerance import assert_same_gradients

pytestmark = needs_deepspeed

SPARSE = {"attention": "sparse", "top_k": 2, "sink_pages": 1, "recent_pages": 1, "q_block": 64, "dense_layers": (1,)}
LENGTHS = (((120, 37), (12,)), ((9,), (100,)))
"""Of each rank in both steps: with pages to choose from on one rank at a time."""


def job(engine: str, **more: Any) -> Job:
    stage = None if engine == "DDP" else int(engine[-1])
    return Job(steps=steps_of(*LENGTHS), stage=stage, lora={}, settings=SPARSE, **more)


def train_alone_in_chunks(wanted: Job) -> Outcome:
    """One process that runs the batches of all ranks one after another."""
    model = wanted.build()
    optimizer = sgd(model, wanted)
    losses = []
    with switched_on(model, wanted.config()), recorded_selections() as calls:
        for step in wanted.steps:
            batches = [batch_of(documents).batch for micro in step for documents in micro]
            total = sum(oomb_accel.count_targets(batch) for batch in batches)
            parts = [model(**batch, num_targets=total).loss for batch in batches]
            for part in parts:
                part.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.stack(parts).sum().detach())
    assert {call.layer for call in calls} == {0, 2}
    return Outcome(losses, whole_weights(model))


@pytest.mark.parametrize("engine", ["DDP", "ZeRO 2", "ZeRO 3"])
def test_sparse_attention_equals_one_process(engine: str, tmp_path: Path) -> None:
    """Evaluation, before and after, is that of dense attention."""
    evaluation = () if engine == "DDP" else (tuple(documents_of(90, seed=5)), tuple(documents_of(20, seed=6)))
    wanted = job(engine, evaluation=evaluation)
    outcomes = run_ranks(train, wanted, folder=tmp_path)
    check_outcomes(outcomes, train_alone_in_chunks(wanted), wanted)
    assert max(outcomes[0].num_chunks) > 5


def _chunked_step(rank: int) -> dict[str, torch.Tensor]:
    """One step of `oomb_accel.deepspeed.step`, which reduces chunk by chunk."""
    wanted = job("ZeRO 2")
    model: nn.Module = wanted.build()
    settings = {**wanted.deepspeed_config(), "data_types": {"grad_accum_dtype": "fp32"}}
    engine, *_ = oomb_accel.deepspeed.initialize(
        model=model, optimizer=sgd(model, wanted), config=settings, oomb=wanted.config()
    )
    oomb_accel.deepspeed.step(engine, batch_of(wanted.steps[0][0][rank]).batch)
    return whole_weights(engine.module)


def test_sparse_attention_reduced_chunk_by_chunk_equals_one_process(tmp_path: Path) -> None:
    first, second = run_ranks(_chunked_step, folder=tmp_path)
    wanted = job("ZeRO 2")
    alone = train_alone_in_chunks(Job(steps=wanted.steps[:1], stage=2, lora={}, settings=SPARSE))
    assert_same_gradients(first, alone.weights)
    assert_same_gradients(second, alone.weights)
