"""Case 22 on two ranks: Trainer and SFTTrainer under DDP and ZeRO, against one plain process on the union."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import PeftModel

from tests.distributed import trainer_job
from tests.distributed.ranks import RanksFailed, needs_deepspeed, run_ranks
from tests.distributed.trainer_job import Trained, TrainerJob, make_trainer, run_job, whole_weights
from tests.harness.models import tiny_model, with_lora
from tests.harness.tolerance import assert_same_bits, assert_same_gradients, assert_twice_plain

NUMBERS = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
NAMES = {*NUMBERS, *(f"eval_{name}" for name in NUMBERS)}


@functools.cache
def alone(sft: bool, lora: bool, packing: bool, folder: Path) -> Trained:
    """One process without oomb_accel on the batches of both ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = {"packing": packing} if sft else {}
    job = TrainerJob(folder=str(folder), ranks=1, chunked=False, sft=sft, lora=lora, arguments=arguments)
    return run_job(0, job)


def check(results: list[Trained], wanted: Trained) -> None:
    """Every number that is reported, the weights, and that ranks agree."""
    for got in results:
        assert got.chunks > 0
        assert_same_gradients(got.weights, wanted.weights)
        assert_same_bits(got.weights, results[0].weights)
    history = results[0].history
    assert len(history) == len(wanted.history) == 4
    for ours, plain in zip(history, wanted.history, strict=True):
        assert ours.keys() == plain.keys()
        for name in NAMES & set(plain):
            assert ours[name] == pytest.approx(plain[name], rel=2e-5), name


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


def cases(*often: tuple[int | None, str], also: tuple[tuple[int | None, str], ...] = ()) -> Any:
    """Pairs of a ZeRO stage (None for DDP) and a name; ``also`` is run only when asked for."""
    made = []
    for stage, name in (*often, *also):
        marks = [pytest.mark.slow] if (stage, name) in also else []
        marks += [] if stage is None else [needs_deepspeed]
        made.append(pytest.param(stage, name, marks=marks, id=f"{'DDP' if stage is None else f'ZeRO {stage}'}-{name}"))
    return made


@pytest.mark.parametrize(
    ("stage", "trained"),
    cases((None, "lora"), (2, "lora"), (3, "full"), also=((None, "full"), (1, "lora"), (2, "full"), (3, "lora"))),
)
def test_trainer(tmp_path: Path, shared: Path, stage: int | None, trained: str) -> None:
    """Documents of one chunk on one rank and of many on the other, accumulation, clipping, evaluation."""
    lora = trained == "lora"
    job = TrainerJob(folder=str(tmp_path / "out"), stage=stage, lora=lora)
    check(run_ranks(run_job, job, folder=tmp_path), alone(False, lora, False, shared))


@pytest.mark.parametrize(("stage", "layout"), cases((None, "packed"), also=((2, "packed"), (3, "packed"))))
def test_first_tokens_of_documents_are_not_counted_on_any_rank(
    tmp_path: Path, shared: Path, stage: int | None, layout: str
) -> None:
    """Each rank's normaliser is the sum of all ranks' counts, so none of them may count too much."""
    job = TrainerJob(folder=str(tmp_path / "out"), stage=stage, is_packed=layout == "packed")
    check(run_ranks(run_job, job, folder=tmp_path), alone(False, True, False, shared))


@pytest.mark.parametrize(
    ("stage", "layout"),
    cases((2, "packed"), (3, "rows"), also=((None, "rows"), (None, "packed"), (2, "rows"), (3, "packed"))),
)
def test_sft_trainer(tmp_path: Path, shared: Path, stage: int | None, layout: str) -> None:
    pytest.importorskip("trl")
    packing = layout == "packed"
    job = TrainerJob(folder=str(tmp_path / "out"), stage=stage, sft=True, arguments={"packing": packing})
    check(run_ranks(run_job, job, folder=tmp_path, timeout_s=150), alone(True, True, packing, shared))


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_resume_in_new_processes(tmp_path: Path, stage: int) -> None:
    """In the middle of an epoch: the same losses, norms, rates and weights as without the interruption. The adapter in
    a checkpoint is whole, and plain PEFT loads it."""

    def run(folder: Path, resume: str | None) -> Trained:
        arguments = {
            "max_steps": 4,
            "gradient_accumulation_steps": 1,
            "save_strategy": "steps",
            "save_steps": 2,
            "optim": "adamw_torch",
            "learning_rate": 0.01,
            "lr_scheduler_type": "cosine",
            "eval_strategy": "no",
        }
        job = TrainerJob(folder=str(folder), stage=stage, arguments=arguments, dropout=0.1, resume=resume)
        results: list[Trained] = run_ranks(run_job, job, folder=tmp_path)
        assert_same_bits(results[1].weights, results[0].weights)
        return results[0]

    whole = run(tmp_path / "whole", None)
    again = run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-2"))
    assert len(whole.history) == 4
    assert again.history == whole.history
    assert_same_bits(again.weights, whole.weights)
    loaded = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "again" / "checkpoint-4"), is_trainable=True)
    assert_same_bits({name: p.detach() for name, p in loaded.named_parameters() if p.requires_grad}, whole.weights)


SAVING = {"max_steps": 3, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}


def _resume_another_adapter(rank: int, job: TrainerJob) -> tuple[str, bool]:
    """What is said, and whether the weights are still those of before."""
    wanted = dict(with_lora(tiny_model(), **job.adapter).named_parameters())
    made = []

    def make(job: TrainerJob) -> Any:
        made.append(make_trainer(job))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_job, "make_trainer", make)
        try:
            run_job(rank, job)
        except ValueError as error:
            weights = whole_weights(made[0][0].model)
            return str(error), all(torch.equal(weights[name], wanted[name]) for name in weights)
    return "resumed", False


@pytest.mark.parametrize("stage", [None, *(pytest.param(stage, marks=needs_deepspeed) for stage in (2, 3))])
def test_an_adapter_of_another_run_is_not_resumed(tmp_path: Path, stage: int | None) -> None:
    arguments = {**SAVING, "max_steps": 1, "eval_strategy": "no"}
    job = TrainerJob(folder=str(tmp_path / "out"), stage=stage, arguments=arguments)
    run_ranks(run_job, dataclasses.replace(job, adapter={"target_modules": ["q_proj"]}), folder=tmp_path)
    arguments = {**arguments, "max_steps": 2}
    checkpoint = str(tmp_path / "out" / "checkpoint-1")
    other = dataclasses.replace(job, adapter={"target_modules": ["o_proj"]}, resume=checkpoint, arguments=arguments)
    for text, unchanged in run_ranks(_resume_another_adapter, other, folder=tmp_path):
        assert re.search(r"(?s)belongs to another model or adapter.*(q_proj|o_proj)", text)
        assert unchanged


def _killed_in_save(rank: int, job: TrainerJob) -> None:
    """Rank 1 is killed when it writes the last thing of the third checkpoint, and rank 0 has written all of its own."""
    plain = torch.save

    def save(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith("checkpoint-3/rng_state_1.pth"):
            while not (Path(path).parent / "trainer_state.json").exists():
                time.sleep(0.01)
            time.sleep(0.5)  # to let it delete what it would delete
            os.kill(os.getpid(), signal.SIGKILL)
        plain(what, path, *args, **kwargs)

    setattr(torch, "save", save)  # noqa: B010
    run_job(rank, job)


@pytest.mark.parametrize("stage", [None, *(pytest.param(stage, marks=needs_deepspeed) for stage in (2, 3))])
def test_a_save_that_is_killed_on_one_rank_is_not_resumed(tmp_path: Path, stage: int | None) -> None:
    """Rank 0 has nothing left to write then, but still has the checkpoint before."""
    arguments = {**SAVING, "save_total_limit": 1, "eval_strategy": "no"}
    job = TrainerJob(folder=str(tmp_path / "whole"), stage=stage, arguments=arguments, dropout=0.1)
    whole = run_ranks(run_job, job, folder=tmp_path)[0]
    job = dataclasses.replace(job, folder=str(tmp_path / "killed"))
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(_killed_in_save, job, folder=tmp_path)
    again = run_ranks(run_job, dataclasses.replace(job, resume=True), folder=tmp_path)[0]
    assert "checkpoint-2. Not whole: checkpoint-3" in (tmp_path / "rank0.log").read_text()
    assert again.history == whole.history
    assert_same_bits(again.weights, whole.weights)
    assert [item.name for item in (tmp_path / "killed").iterdir()] == ["checkpoint-3"]


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_settings_in_the_deepspeed_config(tmp_path: Path, shared: Path, stage: int) -> None:
    """With "auto" values, which Accelerate would refuse, with the self-test, and a model that is loaded as scripts do:
    under ZeRO 3 no rank ever holds it whole."""
    tiny_model().save_pretrained(tmp_path / "model")
    job = TrainerJob(
        folder=str(tmp_path / "out"),
        stage=stage,
        block={"chunk_tokens": 16, "page_tokens": 4, "progress": "auto", "keep_outputs": "auto"},
        settings=None,
        saved_model=str(tmp_path / "model"),
    )
    check(run_ranks(run_job, job, folder=tmp_path, timeout_s=150), alone(False, True, False, shared))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_bf16(tmp_path: Path, stage: int, lora: bool) -> None:
    """Our error against fp32 is at most twice that of the same Trainer without chunks."""
    arguments = {"max_steps": 1, "eval_strategy": "no", "max_grad_norm": 0.0, "learning_rate": 0.3}

    def run(**changes: Any) -> dict[str, Any]:
        job = TrainerJob(folder=str(tmp_path / "out"), stage=stage, lora=lora, arguments=arguments)
        return run_ranks(run_job, dataclasses.replace(job, **changes), folder=tmp_path)[0].weights

    bf16 = {**arguments, "bf16": True}
    assert_twice_plain(run(arguments=bf16), run(arguments=bf16, chunked=False), run(chunked=False))


@needs_deepspeed
@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"chunk_token": 16}, r"chunk_token'.*Did you mean 'chunk_tokens'"),
        ({"span_tokens": "auto"}, r"auto.*span_tokens"),
        ({"chunk_tokens": 32, "page_tokens": 4}, r"chunk_tokens=16 in OombCallback.*chunk_tokens=32 in .*ds\.json"),
    ],
    ids=["misspelt", "auto", "contradiction"],
)
def test_a_wrong_block_is_found_when_the_trainer_is_made(tmp_path: Path, block: dict[str, Any], text: str) -> None:
    job = TrainerJob(folder=str(tmp_path / "out"), stage=2, block=block, ranks=1)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(job.deepspeed_config()), encoding="utf-8")
    with pytest.raises(RanksFailed, match=rf"(?s)make_trainer.*on_init_end.*ValueError.*{text}"):
        run_ranks(run_job, dataclasses.replace(job, arguments={"deepspeed": str(path)}), folder=tmp_path, ranks=1)
