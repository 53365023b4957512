"""`oomb_accel.deepspeed.step`: one reduction per chunk, the same training, and no whole gradient at ZeRO 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oomb_accel
from oomb_accel.integrations import auto
from oomb_accel.integrations.attachment import attachment_of
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


def _engine(job: Job, *, oomb: dict[str, Any] | None = None, **more: Any) -> Any:
    """An engine by our own `initialize`, in training mode."""
    model = job.build()
    arguments = {"model": model, "optimizer": sgd(model, job), "config": {**job.deepspeed_config(), **more}}
    engine, *_ = oomb_accel.deepspeed.initialize(**arguments, oomb=config(self_test=False, **(oomb or {})))
    return engine


def _refusals(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    job = _job(2, 2)
    batches = [dict(batch_of(job.steps[0][0][0]).batch) for _ in range(2)]
    embeds = torch.zeros(1, 80, 64, requires_grad=True)
    with_embeds = {"inputs_embeds": embeds, "labels": torch.ones(1, 80, dtype=torch.long)}
    engine = _engine(job)
    attempts: list[tuple[Any, Any]] = [
        (engine, batches[0]),
        (engine, [batches[0], {**batches[1], "num_targets": 7}]),
        (engine, [batches[0], with_embeds]),
        (_engine(job, bf16={"enabled": True}), batches),
        (_engine(replace(job, stage=0), bf16={"enabled": True}), batches),
    ]
    hooked, asleep = _engine(job), _engine(job)
    next(hooked.module.parameters()).register_hook(lambda grad: grad)
    asleep.eval()
    said = []
    for tried, data in [*attempts, (hooked, batches), (asleep, batches)]:
        with pytest.raises(ValueError) as error:
            oomb_accel.deepspeed.step(tried, data)
        said.append(str(error.value))
    return said


def test_what_cannot_add_up_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(_refusals, folder=tmp_path):
        assert "Got 1; gradient_accumulation_steps is 2" in said[0]
        assert "Remove num_targets from the batch" in said[1]
        assert "inputs_embeds would get no gradient" in said[2]
        assert 'Set "data_types": {"grad_accum_dtype": "fp32"}' in said[3]
        assert '{"stage": 1} or higher' in said[4]
        assert "Got hooks on model.embed_tokens.weight" in said[5]
        assert "Call engine.train() first" in said[6]


def _one_has_a_bad_batch(rank: int, job: Job) -> tuple[str, Outcome]:
    """The second micro-batch of rank 1 has a hole; then the same step is run with good batches."""
    dist.init_process_group("gloo")
    engine = _engine(job)
    batches = [dict(batch_of(micro[rank]).batch) for micro in job.steps[0]]
    bad = [dict(batch) for batch in batches]
    if rank == 1:
        bad[1]["attention_mask"] = bad[1]["attention_mask"].clone()
        bad[1]["attention_mask"][0, 3] = 0
    with pytest.raises((ValueError, RuntimeError)) as error:
        oomb_accel.deepspeed.step(engine, bad)
    loss = oomb_accel.deepspeed.step(engine, batches)
    return str(error.value), Outcome([loss / dist.get_world_size()], whole_weights(engine.module), [])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_refused_batch_leaves_nothing_behind_on_any_rank(tmp_path: Path, stage: int) -> None:
    job = _job(stage, 2)
    job = replace(job, steps=job.steps[:1])
    (first, ours), (second, theirs) = run_ranks(_one_has_a_bad_batch, job, folder=tmp_path)
    assert "Another rank has refused its batch" in first and "attention_mask has a hole" in second
    check_outcomes([ours, theirs], train_alone(job), job)


def _refuses_before_settings_are_chosen(rank: int, job: Job) -> tuple[list[str], Outcome]:
    """Rank 1 cannot even choose what is "auto", in several ways; then the same step is run with good batches."""
    dist.init_process_group("gloo")
    engine = _engine(job, oomb={"chunk_tokens": "auto", "page_grad_dtype": "auto"})
    batches = [dict(batch_of(micro[rank]).batch) for micro in job.steps[0]]
    steps = oomb_accel.deepspeed.step
    said = []
    for bad in ([], None, [batches[0], {**batches[1], "num_targets": 7}]):
        said.append(_error_of(lambda bad=bad: steps(engine, bad if rank == 1 else batches)))  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(auto, "free_bytes", _lost_device)
        said.append(_error_of(lambda: steps(engine, batches)))
        said.append(_error_of(lambda: engine(**batches[0])))
    assert attachment_of(engine.module).chosen is None
    loss = steps(engine, batches)
    assert attachment_of(engine.module).chosen is not None
    return said, Outcome([loss / dist.get_world_size()], whole_weights(engine.module), [])


def _lost_device(device: torch.device) -> int:
    raise RuntimeError("the device is lost")


def _error_of(act: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError, TypeError)) as error:
        act()
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_cannot_choose_settings_lets_nobody_wait(tmp_path: Path, stage: int) -> None:
    job = _job(stage, 2)
    job = replace(job, steps=job.steps[:1])
    (first, ours), (second, theirs) = run_ranks(_refuses_before_settings_are_chosen, job, folder=tmp_path, timeout_s=60)
    assert all("Another rank has refused its batch" in said for said in first)
    for said, words in zip(second, ("Got 0;", "not iterable", "num_targets", "lost", "lost"), strict=True):
        assert words in said
    check_outcomes([ours, theirs], train_alone(job), job)


def _without_labels(rank: int) -> str:
    dist.init_process_group("gloo")
    job = _job(3, 1)
    engine = _engine(job)
    batch = dict(batch_of(job.steps[0][0][0]).batch)
    if rank == 1:
        del batch["labels"]
    with pytest.raises((ValueError, RuntimeError)) as error:
        engine(**batch)
    return str(error.value)


def test_labels_that_are_missing_on_one_rank_let_nobody_wait(tmp_path: Path) -> None:
    first, second = run_ranks(_without_labels, folder=tmp_path)
    assert "Another rank has refused its batch" in first and "without labels" in second


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
