"""What the grid of `test_zero_matrix` does not vary: kinds of models, loading, precision, evaluation, reductions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import (
    Job,
    Outcome,
    check_outcomes,
    steps_of,
    train,
    train_alone,
    whole_weights,
)
from tests.harness.batches import documents_of, only_targets
from tests.harness.models import tiny_model
from tests.harness.tolerance import assert_same_gradients, assert_twice_plain

pytestmark = needs_deepspeed

THRESHOLD = "stage3_param_persistence_threshold"
UNEQUAL = steps_of(((100, 37), (12,)), ((5,), (49, 3)))
"""Two steps: 9 chunks against one ordinary step, then the other way round."""


def _check(job: Job, folder: Path, ranks: int = 2) -> None:
    check_outcomes(run_ranks(train, job, folder=folder, ranks=ranks), train_alone(job), job)


@pytest.mark.parametrize("engine_by", ["oomb_accel", "deepspeed"])
@pytest.mark.parametrize("stage", [2, 3])
def test_many_small_reductions(stage: int, engine_by: str, tmp_path: Path) -> None:
    """Buckets of a few tensors: every rank must hand them over in the same order."""
    zero = {"reduce_bucket_size": 5000, "stage3_prefetch_bucket_size": 2000, "overlap_comm": True}
    _check(Job(steps=UNEQUAL, stage=stage, zero=zero, engine_by=engine_by), tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_three_ranks_of_which_one_is_empty(stage: int, tmp_path: Path) -> None:
    steps = steps_of(((90,), (12,), ()), ((), (3, 40), (17,)))
    _check(Job(steps=steps, stage=stage, lora={}), tmp_path, ranks=3)


@pytest.mark.parametrize("stage", [2, 3])
def test_steps_of_one_chunk_and_of_many_in_turn(stage: int, tmp_path: Path) -> None:
    """Where one pass is all that any rank has, it is an ordinary step of DeepSpeed's, also beside an empty rank."""
    steps = steps_of(((12,), (9,)), ((60,), (12,)), ((5,), ()), ((), (40,)))
    _check(Job(steps=steps, stage=stage, lora={}), tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_deterministic_steps_of_one_chunk_beside_an_empty_rank(stage: int, tmp_path: Path) -> None:
    """No step is ordinary then, and under ZeRO 3 no rank may keep a graph where another runs a dummy pass twice."""
    steps = steps_of(((9,), ()), ((60,), (12,)), ((), (12,)))
    _check(Job(steps=steps, stage=stage, lora={}, settings={"deterministic": True}), tmp_path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_single_rank(stage: int, tmp_path: Path) -> None:
    """ZeRO on one GPU, where it is used for its optimizer offload."""
    _check(Job(steps=steps_of(((100, 37),), ((12,),)), stage=stage, offload=True), tmp_path, ranks=1)


def test_parameters_on_the_cpu(tmp_path: Path) -> None:
    job = Job(steps=UNEQUAL, stage=3, offload=True, zero={"offload_param": {"device": "cpu"}})
    _check(job, tmp_path)


def test_adapters_that_are_not_divided(tmp_path: Path) -> None:
    """As engines have it where the config is silent; the model's largest weights are divided."""
    job = Job(steps=UNEQUAL, stage=3, lora={}, model={"hidden_size": 64}, zero={THRESHOLD: 64 * 64 - 1})
    _check(job, tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_dropout_is_that_of_plain_data_parallelism(stage: int, tmp_path: Path) -> None:
    """Dummy passes draw no numbers, and the recompute draws those of the forward sweep."""
    job = Job(steps=UNEQUAL, stage=stage, lora={"lora_dropout": 0.3})
    ours, plain = (run_ranks(train, replace(job, stage=s), folder=tmp_path)[0] for s in (stage, None))
    assert_same_gradients(ours.weights, plain.weights)


def _train_after_a_bad_batch(rank: int, job: Job) -> tuple[str, Outcome]:
    refusals: list[Exception] = []

    def meet_bad_batch(model: nn.Module, batch: dict[str, Tensor]) -> None:
        hole = batch["attention_mask"].clone()
        hole[0, rank] = 0  # rank 0 starts a token later, rank 1 has a hole
        try:
            model(**{**batch, "attention_mask": hole})
        except (RuntimeError, ValueError) as error:
            refusals.append(error)

    outcome = train(rank, job, before_training=meet_bad_batch)
    return f"{type(refusals[0]).__name__}: {refusals[0]}", outcome


def test_a_batch_that_one_rank_refuses_is_an_error_on_all(tmp_path: Path) -> None:
    """Under ZeRO 3 the others would wait for its passes. Afterwards they can go on together."""
    job = Job(steps=UNEQUAL, stage=3, lora={})
    results = run_ranks(_train_after_a_bad_batch, job, folder=tmp_path)
    assert results[0][0].startswith("RuntimeError: Another rank has refused its batch")
    assert results[1][0].startswith("ValueError: attention_mask has a hole in row 0")
    check_outcomes([outcome for _, outcome in results], train_alone(job), job)


@pytest.mark.parametrize("stage", [None, 2, 3], ids=["ddp", "zero2", "zero3"])
def test_a_micro_step_without_any_target(stage: int | None, tmp_path: Path) -> None:
    nothing = (tuple(only_targets(d, ()) for d in documents_of(40)), ())
    (data,) = steps_of(((50,), (20,)))
    _check(Job(steps=((*data, nothing), (nothing, *data)), stage=stage, lora={}), tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_lora_on_the_head_and_a_first_chunk_without_targets(stage: int, tmp_path: Path) -> None:
    """The head has nothing to do in the first chunk, whose pass is the last of the backward sweep."""
    late = [tuple(only_targets(d, range(30, 40)) for d in documents_of(40, seed=s)) for s in range(3)]
    first = tuple(only_targets(d, (1, 2)) for d in documents_of(70, seed=9))
    job = Job(
        steps=(((late[0], first),), ((late[1], late[2]),)),
        stage=stage,
        lora={"target_modules": ["q_proj", "v_proj", "lm_head"]},
    )
    _check(job, tmp_path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tied_embeddings(stage: int, tmp_path: Path) -> None:
    _check(Job(steps=UNEQUAL, stage=stage, model={"tie_word_embeddings": True}), tmp_path)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters(stage: int, tmp_path: Path) -> None:
    _check(Job(steps=UNEQUAL, stage=stage, frozen=("embed_tokens", "layers.0.", "k_proj")), tmp_path)


@pytest.mark.parametrize("engine_by", ["oomb_accel", "deepspeed"])
@pytest.mark.parametrize("lora", [{}, None], ids=["lora", "full"])
def test_mixture_of_experts_under_zero_3(lora: dict[str, object] | None, engine_by: str, tmp_path: Path) -> None:
    """Ranks route their tokens to different experts, and a dummy pass has one token only."""
    if lora is not None:
        lora = {"target_modules": ["q_proj", "o_proj"]}
    _check(Job(steps=UNEQUAL, stage=3, model_type="qwen3_moe", lora=lora, engine_by=engine_by), tmp_path)


@pytest.mark.parametrize("lora", [{}, None], ids=["lora", "full"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_is_loaded_in_shards(stage: int, lora: dict[str, object] | None, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    _check(Job(steps=UNEQUAL, stage=stage, lora=lora, saved_model=str(tmp_path / "model")), tmp_path)


@pytest.mark.parametrize("keep_last_graph", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_of_unequal_ranks(stage: int, keep_last_graph: bool, tmp_path: Path) -> None:
    """Nine chunks against an ordinary pass, before and after training."""
    (evaluation,) = steps_of(((80, 60), (9,)))[0]
    job = Job(steps=UNEQUAL, stage=stage, lora={}, evaluation=evaluation, settings={"keep_last_graph": keep_last_graph})
    _check(job, tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_with_an_empty_rank(stage: int, tmp_path: Path) -> None:
    (evaluation,) = steps_of(((), (55, 2)))[0]
    _check(Job(steps=UNEQUAL, stage=stage, evaluation=evaluation), tmp_path)


@pytest.mark.parametrize("lora", [{}, None], ids=["lora", "full"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_as_good_as_plain_bf16(stage: int, lora: dict[str, object] | None, tmp_path: Path) -> None:
    job = Job(steps=UNEQUAL[:1], stage=stage, lora=lora, bf16=True)
    ours, plain = (
        run_ranks(train, replace(job, chunked=chunked), folder=tmp_path)[0].weights for chunked in (True, False)
    )
    exact = train_alone(job).weights
    before = whole_weights(job.build())

    def added(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weights[name] - before[name] for name in before}

    assert_twice_plain(added(ours), added(plain), added(exact))


def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    """DeepSpeed's own operator for reductions on the CPU leaves a file per rank and port."""
    before = set(Path("/dev/shm").glob("deepspeed*"))
    run_ranks(train, Job(steps=UNEQUAL, stage=3, lora={}), folder=tmp_path)
    assert set(Path("/dev/shm").glob("deepspeed*")) <= before
