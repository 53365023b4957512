"""Sparse attention on two ranks: the same as in one process, for the strategies by which gradients reach parameters."""

from __future__ import annotations

from dataclasses import replace
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
    train_alone_in_chunks,
    whole_weights,
)
from tests.harness.batches import documents_of
from tests.harness.sparse import recorded_selections
from tests.harness.tolerance import assert_same_gradients

pytestmark = needs_deepspeed

SPARSE = {"attention": "sparse", "top_k": 2, "sink_pages": 1, "recent_pages": 1, "q_block": 64, "dense_layers": (1,)}
LENGTHS = (((120, 37), (12,)), ((9,), (100,)))
"""Of each rank in both steps: with pages to choose from on one rank at a time."""


def job(engine: str, **more: Any) -> Job:
    stage = None if engine == "DDP" else int(engine[-1])
    return Job(steps=steps_of(*LENGTHS), stage=stage, lora={}, settings=SPARSE, **more)


def alone(wanted: Job) -> Outcome:
    with recorded_selections() as calls:
        outcome = train_alone_in_chunks(replace(wanted, evaluation=()))
    assert {call.layer for call in calls} == {0, 2}
    return outcome


@pytest.mark.parametrize("engine", ["DDP", "ZeRO 2", "ZeRO 3"])
def test_sparse_attention_equals_one_process(engine: str, tmp_path: Path) -> None:
    """Evaluation, before and after, is that of dense attention."""
    evaluation = () if engine == "DDP" else (tuple(documents_of(90, seed=5)), tuple(documents_of(20, seed=6)))
    wanted = job(engine, evaluation=evaluation)
    outcomes = run_ranks(train, wanted, folder=tmp_path)
    check_outcomes(outcomes, alone(wanted), wanted)
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
    one_process = alone(Job(steps=wanted.steps[:1], stage=2, lora={}, settings=SPARSE))
    assert_same_gradients(first, one_process.weights)
    assert_same_gradients(second, one_process.weights)
