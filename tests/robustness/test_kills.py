"""A run that saves after every step, is killed at a random moment and goes on, ends as one that was not killed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.training import train
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.harness.tolerance import assert_same_bits
from tests.robustness.kills import train_and_be_killed, train_and_count
from tests.training.ranks_train import Settings, launched, recipe_of
from tests.training.test_resume import adapter, metrics

NUM_STEPS = 4
IN_CI = 5


@dataclass(frozen=True, slots=True)
class Whole:
    """The same run without a kill."""

    settings: Settings
    seconds: float
    changes: int
    """To its folder."""


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    data = folder / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"row {n} " * (4 + 9 * n)}) for n in range(5)))
    settings = {
        "model_name_or_path": str(model_folder),
        "data_path": str(data),
        "output_dir": str(folder / "out"),
        "max_steps": NUM_STEPS,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.02,
        "warmup_steps": 2,
        "lora_r": 4,
        "lora_dropout": 0.1,
        "save_steps": 1,
        "save_total_limit": 2,
        "oomb": {"chunk_tokens": 64, "page_tokens": 16},
    }
    ((seconds, changes),) = run_ranks(
        train_and_count, settings, folder=folder / "rank", ranks=1, environment=launched(None)
    )
    return Whole(settings, seconds, changes)


@pytest.mark.parametrize("number", range(IN_CI))
def test_killed_at_a_random_moment(number: int, whole: Whole, tmp_path: Path) -> None:
    check_kill(number, whole, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(IN_CI, 50))
def test_killed_at_many_random_moments(number: int, whole: Whole, tmp_path: Path) -> None:
    check_kill(number, whole, tmp_path)


def check_kill(number: int, whole: Whole, tmp_path: Path) -> None:
    draw = random.Random(number)
    seconds, change = None, None
    if number % 2:
        seconds = draw.uniform(0, whole.seconds)
    else:
        change = draw.randrange(whole.changes)  # most of them within a save
    out = tmp_path / "out"
    settings: dict[str, Any] = {**whole.settings, "output_dir": str(out)}
    moment = (seconds, change)
    try:
        run_ranks(train_and_be_killed, settings, *moment, folder=tmp_path, ranks=1, environment=launched(None))
    except RanksFailed as stopped:
        assert "SIGKILL" in str(stopped)
    else:
        assert seconds is not None, "the change was never made"  # a run may be faster than the one that was measured
    train(recipe_of(settings | {"resume_from_checkpoint": "latest"}))
    before = Path(whole.settings["output_dir"])
    assert metrics(out) == metrics(before)
    assert_same_bits(adapter(out), adapter(before))
    names = {path.name for path in before.iterdir()}
    assert {path.name for path in out.iterdir()} == names, "something is left, or missing"
