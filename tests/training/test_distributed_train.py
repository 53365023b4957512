"""A recipe on two real ranks: DDP and ZeRO give what one process gives on the union of the documents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.ranks import RanksFailed, needs_deepspeed, run_ranks
from tests.harness.tolerance import assert_same_bits, assert_same_gradients, assert_same_total
from tests.training.ranks_train import (
    Settings,
    Trained,
    launched,
    train_aloud,
    train_and_be_refused,
    train_and_die,
    train_and_stop,
    train_and_tell_timeouts,
    train_recipe,
    train_to_infinity,
    train_where_rank_1_is_blind,
)

pytestmark = needs_deepspeed

LENGTHS = (300, 40, 130, 20, 90, 200, 7)
"""Seven documents for steps of four: the last step of an epoch has an empty batch, and one rank may fit one chunk."""


@pytest.fixture
def rows(settings: Settings, tmp_path: Path) -> Settings:
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": ("abcdefg hij " * 40)[:length]}) for length in LENGTHS))
    block = settings["oomb"] | {"self_test": False, "progress": False}
    return settings | {"data_path": str(data), "max_steps": 4, "gradient_accumulation_steps": 2, "oomb": block}


def alone(rows: Settings, tmp_path: Path, **changes: Any) -> Trained:
    """The same steps in one process: a micro-step has the documents of both ranks."""
    settings = rows | {"output_dir": str(tmp_path / "alone"), "per_device_train_batch_size": 2} | changes
    (trained,) = run_ranks(train_recipe, settings, folder=tmp_path, ranks=1, environment=launched(None))
    return trained


def check_equal(both: list[Trained], wanted: Trained) -> None:
    first, second = both
    assert_same_bits(first.weights, second.weights)
    assert first.losses == second.losses
    for ours, theirs in zip(first.losses, wanted.losses, strict=True):
        assert_same_total(torch.tensor(ours), torch.tensor(theirs))
    # AdamW and clipping would hide a gradient that is right but for its scale.
    assert_same_gradients({"norms": torch.tensor(first.norms)}, {"norms": torch.tensor(wanted.norms)})
    assert_same_gradients(first.weights, wanted.weights)


@pytest.mark.parametrize(
    ("stage", "lora_r"),
    [
        *((None, 4), (2, 4), (3, 4), (1, 0)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 4), (1, 4), (None, 0), (0, 0), (2, 0), (3, 0))),
    ],
)
def test_ranks_equal_one_process_on_the_union(
    rows: Settings, tmp_path: Path, model_folder: Path, stage: int | None, lora_r: int
) -> None:
    """Accumulation, clipping, an empty batch; and the result loads as plain transformers and PEFT."""
    rows |= {"lora_r": lora_r, "max_grad_norm": 0.5, "learning_rate": 0.01}
    both = run_ranks(train_recipe, rows, folder=tmp_path, environment=launched(stage, tmp_path))
    check_equal(both, alone(rows, tmp_path))
    assert (both[0].num_sharded > 0) == (stage == 3)  # loaded in shards: the whole model need not fit one device
    if lora_r:
        saved = load_file(Path(rows["output_dir"]) / "adapter_model.safetensors")
        weights = {name.replace(".default", ""): tensor for name, tensor in both[0].weights.items()}
        assert_same_bits(saved, weights)
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), rows["output_dir"])
    else:
        model = AutoModelForCausalLM.from_pretrained(rows["output_dir"])
        assert_same_bits(dict(model.named_parameters()), both[0].weights)


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 3))])
def test_optimizer_offload(rows: Settings, tmp_path: Path, stage: int) -> None:
    environment = launched(stage, tmp_path, zero_optimization={"offload_optimizer": {"device": "cpu"}})
    both = run_ranks(train_recipe, rows, folder=tmp_path, environment=environment)
    check_equal(both, alone(rows, tmp_path))


@pytest.mark.parametrize(
    ("stage", "place", "precision"),
    [
        (2, "in save", "no"),
        (3, "in step", "no"),
        pytest.param(None, "in step", "no", marks=pytest.mark.slow),
        pytest.param(0, "in save", "no", marks=pytest.mark.slow),
        pytest.param(1, "in step", "no", marks=pytest.mark.slow),
        pytest.param(0, "in step", "bf16", marks=pytest.mark.slow),
        pytest.param(2, "in step", "bf16", marks=pytest.mark.slow),
        pytest.param(3, "in save", "bf16", marks=pytest.mark.slow),
    ],
)
def test_kill_9_and_go_on(rows: Settings, tmp_path: Path, stage: int | None, place: str, precision: str) -> None:
    """In new processes: bit by bit what two ranks without a stop give."""
    rows |= {"save_steps": 2, "max_steps": 5, "lora_dropout": 0.1, "eval_last_tokens": 16}
    rows |= {"mixed_precision": precision}
    environment = launched(stage, tmp_path)
    whole = run_ranks(
        train_recipe, rows | {"output_dir": str(tmp_path / "whole")}, folder=tmp_path, environment=environment
    )
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train_and_die, rows, place, 4, folder=tmp_path, environment=environment)
    rest = run_ranks(
        train_recipe, rows | {"resume_from_checkpoint": "latest"}, folder=tmp_path, environment=environment
    )
    for ours, theirs in zip(rest, whole, strict=True):
        assert len(ours.losses) == 3 and ours.losses == theirs.losses[2:]
        assert_same_bits(ours.weights, theirs.weights)


@pytest.mark.parametrize(
    ("before", "after", "lora_r"),
    [
        ((2, 2), (2, 1), 4),
        ((None, 1), (None, 2), 4),
        pytest.param((None, 2), (None, 1), 4, marks=pytest.mark.slow),
        pytest.param((0, 2), (0, 1), 4, marks=pytest.mark.slow),
        pytest.param((1, 2), (2, 2), 4, marks=pytest.mark.slow),
        pytest.param((2, 1), (1, 2), 0, marks=pytest.mark.slow),
        pytest.param((3, 2), (3, 1), 4, marks=pytest.mark.slow),
        pytest.param((3, 1), (3, 2), 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_going_on_with_another_number_of_ranks(
    rows: Settings, tmp_path: Path, before: tuple[int | None, int], after: tuple[int | None, int], lora_r: int
) -> None:
    """Stage and number of ranks; the accumulation makes up for the ranks."""
    rows |= {"lora_r": lora_r, "save_steps": 2, "learning_rate": 0.01}
    (stage, ranks), (stage_after, ranks_after) = before, after
    first = rows | {"gradient_accumulation_steps": 4 // ranks}
    wanted = run_ranks(train_recipe, first, folder=tmp_path, ranks=ranks, environment=launched(stage, tmp_path))
    resume = str(Path(rows["output_dir"]) / "checkpoint-2")
    rest = rows | {"gradient_accumulation_steps": 4 // ranks_after, "resume_from_checkpoint": resume}
    rest |= {"output_dir": str(tmp_path / "rest")}
    environment = launched(stage_after, tmp_path)
    for got in run_ranks(train_recipe, rest, folder=tmp_path, ranks=ranks_after, environment=environment):
        for ours, theirs in zip(got.losses, wanted[0].losses[2:], strict=True):
            assert_same_total(torch.tensor(ours), torch.tensor(theirs))
        assert_same_gradients(got.weights, wanted[0].weights)
    assert not list(Path(rows["output_dir"]).glob(".*"))


def test_another_kind_of_launch_is_refused(rows: Settings, tmp_path: Path) -> None:
    rows |= {"save_steps": 2, "max_steps": 3}
    run_ranks(train_recipe, rows, folder=tmp_path, environment=launched(2))
    for stage, name in ((3, "DeepSpeed ZeRO 3"), (None, "DDP or in one process")):
        again = rows | {"resume_from_checkpoint": "latest", "max_steps": 4}  # at 3 it would be done
        for text in run_ranks(train_and_be_refused, again, folder=tmp_path, environment=launched(stage)):
            assert "Go on under DeepSpeed ZeRO 2" in text and f"This run is under {name}" in text


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (None, 1, 3))])
def test_a_gradient_that_is_no_number_leaves_weights_alone(
    rows: Settings, tmp_path: Path, stage: int | None, precision: str
) -> None:
    rows |= {"mixed_precision": precision, "max_steps": 1}
    environment = launched(stage, tmp_path)
    (wanted, _) = run_ranks(train_recipe, rows, folder=tmp_path, environment=environment)
    rows |= {"max_steps": 3, "output_dir": str(tmp_path / "infinite")}
    for weights in run_ranks(train_to_infinity, rows, 2, folder=tmp_path, environment=environment):
        assert_same_bits(weights, wanted.weights)


def test_what_is_lost_without_save_steps_is_said(rows: Settings, tmp_path: Path) -> None:
    """Several ranks cannot save when one of them fails: said before, and when it happens."""
    said, _ = run_ranks(train_and_stop, rows, 3, folder=tmp_path, environment=launched(None))
    assert "save_steps is 0" in said
    assert "2 steps were finished, but nothing was saved: set save_steps" in said
    assert "no step was finished" not in said
    rows |= {"save_steps": 2, "overwrite_output_dir": True}
    said, _ = run_ranks(train_and_stop, rows, 3, folder=tmp_path, environment=launched(None))
    assert "save_steps is 0" not in said and "the last save is" in said and "checkpoint-2" in said


def test_a_finished_run_is_not_trained_again(rows: Settings, tmp_path: Path) -> None:
    rows |= {"save_steps": 2, "max_steps": 3}
    for stage, words in ((2, "done: 3 steps"), (2, "is done: 3 of 3 steps")):
        said, _ = run_ranks(train_aloud, rows, folder=tmp_path, environment=launched(stage))
        assert words in said
        rows |= {"resume_from_checkpoint": "latest"}
    assert "step 3/3" not in said


@pytest.mark.parametrize("stage", [None, 2])
def test_ranks_wait_for_the_longest_document(rows: Settings, tmp_path: Path, stage: int | None) -> None:
    """Not for one of the trained range; by their number in a step, however it is made up."""
    rows |= {"max_steps": 1, "per_device_train_batch_size": 2}
    for asked in run_ranks(train_and_tell_timeouts, rows, folder=tmp_path, environment=launched(stage)):
        assert asked[-1] == {"document_tokens": max(LENGTHS) + 1, "micro_steps": 4}


def test_an_output_folder_that_is_not_shared_is_refused(rows: Settings, tmp_path: Path) -> None:
    rows |= {"save_steps": 2}
    for text in run_ranks(train_where_rank_1_is_blind, rows, folder=tmp_path, environment=launched(None)):
        assert "not the same folder on all machines" in text and "Process 1 does not see" in text


def test_a_launch_without_a_config_file_may_call_it_none(rows: Settings, tmp_path: Path) -> None:
    environment = {**launched(2), "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}
    rows |= {"max_steps": 1}
    for trained in run_ranks(train_recipe, rows, folder=tmp_path, environment=environment):
        assert len(trained.losses) == 1


@dataclass
class Said:
    """A DeepSpeed config that does not fit the recipe, and what the error must say."""

    config: dict[str, Any]
    words: tuple[str, ...]


@pytest.mark.parametrize(
    "said",
    [
        Said({"gradient_clipping": 0.3}, ("max_grad_norm=1.0 in the recipe", "gradient_clipping=0.3 in", "ds.json")),
        Said({"gradient_accumulation_steps": 8}, ("gradient_accumulation_steps=2 in the recipe", "=8 in")),
        Said({"gradient_accumulation_steps": 1}, ("gradient_accumulation_steps=2 in the recipe", "=1 in", "ds.json")),
        Said({"train_micro_batch_size_per_gpu": 4}, ("per_device_train_batch_size=1", '"auto"')),
        Said({"train_batch_size": 7}, ("batch size x accumulation x ranks=4", "train_batch_size=7")),
        Said({"optimizer": {"type": "AdamW"}}, ("sets the optimizer", "Remove optimizer")),
        Said({"fp16": {"enabled": True}}, ("fp16 is not supported",)),
        Said({"oomb": {"chunk_tokens": 32}}, ("chunk_tokens is set in two places", "ds.json", "the recipe")),
        Said({"oomb": {"chunk_tokns": 32}}, ("Unknown key 'chunk_tokns'", "'chunk_tokens'")),
    ],
    ids=str,
)
def test_what_contradicts_the_recipe_is_refused(rows: Settings, tmp_path: Path, said: Said) -> None:
    environment = launched(2, tmp_path, **said.config)
    for text in run_ranks(train_and_be_refused, rows, folder=tmp_path, environment=environment):
        for word in said.words:
            assert word in text
    assert not Path(rows["output_dir"]).exists()
