"""`oomb_accel.deepspeed.step`: one reduction per chunk, the same training, and no whole gradient at ZeRO 2 and 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import oomb_accel
from oomb_accel.progress import ChunkEvent
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import Job, Outcome, batch_of, check_outcomes, sgd, train_alone, whole_weights
from tests.harness.batches import documents_of
from tests.harness.parity import config

pytestmark = needs_deepspeed


def _train(rank: int, job: Job) -> tuple[Outcome, int]:
    """Train by `step`; also the most elements of whole gradients that were left behind by a pass."""
    import deepspeed

    dist.init_process_group("gloo")
    model = job.build()
    left = [0]

    def look(event: ChunkEvent) -> None:
        if event.sweep == "backward" and event.chunk < event.num_chunks:
            left.append(sum(p.grad.numel() for p in model.parameters() if p.grad is not None))

    oomb_accel.enable(model, config(**job.settings), on_progress=look)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model, job), config=job.deepspeed_config())
    losses = []
    for step in job.steps:
        loss = oomb_accel.deepspeed.step(engine, [batch_of(micro[rank]).batch for micro in step])
        losses.append(loss / dist.get_world_size())  # the outcome has each rank's part
    return Outcome(losses, whole_weights(model), []), max(left)


def _job(stage: int, accumulation: int, **settings: object) -> Job:
    long, short, middle, tiny = documents_of(80, 30, 50, 12)
    micro = [((long,), (short,)), ((), (middle, tiny))][:accumulation]
    steps = (tuple(micro), tuple(reversed(micro)))
    return Job(steps=steps, stage=stage, clip=0.5, rate=2.0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_equals_one_process_on_the_union(tmp_path: Path, stage: int, accumulation: int) -> None:
    job = _job(stage, accumulation)
    results = run_ranks(_train, job, folder=tmp_path)
    check_outcomes([outcome for outcome, _ in results], train_alone(job), job)
    for _, left in results:
        assert (left == 0) == (stage >= 2)


def test_lora_with_optimizer_offload(tmp_path: Path) -> None:
    job = _job(2, 2, lora={}, offload=True)
    check_outcomes([outcome for outcome, _ in run_ranks(_train, job, folder=tmp_path)], train_alone(job), job)


def _refusals(rank: int) -> list[str]:
    import deepspeed

    dist.init_process_group("gloo")
    job = _job(2, 2)
    said = []
    model = oomb_accel.enable(job.build(), config())
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model, job), config=job.deepspeed_config())
    with pytest.raises(ValueError) as error:
        oomb_accel.deepspeed.step(engine, batch_of(job.steps[0][0][0]).batch)
    said.append(str(error.value))
    model = oomb_accel.enable(job.build(), config())
    low = {**job.deepspeed_config(), "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model, job), config=low)
    with pytest.raises(ValueError) as error:
        oomb_accel.deepspeed.step(engine, [batch_of(job.steps[0][0][0]).batch] * 2)
    said.append(str(error.value))
    return said


def test_what_cannot_add_up_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(_refusals, folder=tmp_path):
        assert "Got 1; gradient_accumulation_steps is 2" in said[0]
        assert '"grad_accum_dtype": "fp32"' in said[1]


def _one_refuses(rank: int) -> str:
    import deepspeed

    dist.init_process_group("gloo")
    job = _job(3, 1)
    model = oomb_accel.enable(job.build(), config())
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model, job), config=job.deepspeed_config())
    batch = dict(batch_of(job.steps[0][0][0]).batch)
    if rank == 1:
        batch["labels"] = torch.full_like(batch["labels"], 10**6)
    with pytest.raises((ValueError, RuntimeError)) as error:
        engine(**batch)
    return str(error.value)


def test_a_rank_that_refuses_its_batch_lets_nobody_wait(tmp_path: Path) -> None:
    first, second = run_ranks(_one_refuses, folder=tmp_path)
    assert "Another rank has refused its batch" in first
    assert "no token id" in second
