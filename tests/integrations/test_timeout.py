"""Timeouts of process groups: long enough for the longest document, for all groups, never shortened by themselves."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oomb_accel import OombConfig
from oomb_accel.integrations import timeout
from oomb_accel.integrations.timeout import MIN_MINUTES, set_timeout, step_minutes
from tests.distributed.ranks import run_ranks
from tests.harness.models import tiny_model


def _minutes(**settings: int) -> int:
    return step_minutes(tiny_model(), **settings)


def test_a_short_step_gets_the_minimum() -> None:
    assert _minutes() == MIN_MINUTES == _minutes(document_tokens=1)


def test_time_grows_with_the_square_of_the_length_and_with_micro_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeout, "_SLOW_CPU", 1e9)
    monkeypatch.setattr(timeout, "_SLOW_GPU", 1e9)
    once = _minutes(document_tokens=1_000_000)
    attention = 4 * 0.5e12 * 3 * 64 * 4.5 / 1e9 / 60  # fp operations of 3 layers with 4 heads of 16
    assert attention < once < 1.1 * attention + 1
    assert 3.9 < _minutes(document_tokens=2_000_000) / once < 4
    assert _minutes(document_tokens=1_000_000, micro_steps=4) == pytest.approx(4 * once, abs=4)


def test_the_default_length_is_the_trained_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeout, "_SLOW_CPU", 1e6)
    monkeypatch.setattr(timeout, "_SLOW_GPU", 1e6)
    model = tiny_model(max_position_embeddings=4096)
    assert step_minutes(model) == step_minutes(model, document_tokens=4096) > step_minutes(model, document_tokens=2048)


def test_windows_cost_their_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeout, "_SLOW_CPU", 1e9)
    monkeypatch.setattr(timeout, "_SLOW_GPU", 1e9)
    windowed = step_minutes(tiny_model("mistral"), document_tokens=1_000_000)
    assert windowed < 0.1 * step_minutes(tiny_model("mistral", sliding_window=None), document_tokens=1_000_000)


def _set(rank: int, minutes: int | str, before: int, after: int) -> list[timedelta]:
    dist.init_process_group("gloo", timeout=timedelta(minutes=before))
    groups = [dist.group.WORLD, dist.new_group([0], timeout=timedelta(minutes=before))]
    note = set_timeout(tiny_model(), OombConfig(timeout_minutes=minutes))  # type: ignore[arg-type]
    assert note is not None and note.startswith("timeout ") and f" {after} minutes" in note
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None]


@pytest.mark.parametrize(
    ("minutes", "before", "after"),
    [("auto", 10, MIN_MINUTES), ("auto", 600, 600), (45, 10, 45), (45, 600, 45)],
)
def test_every_group_of_the_process_is_set(minutes: int | str, before: int, after: int, tmp_path: Path) -> None:
    (got,) = run_ranks(_set, minutes, before, after, folder=tmp_path, ranks=1)
    assert got == [timedelta(minutes=after)] * 2


def _set_for_document(rank: int, tokens: int) -> timedelta:
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeout, "_SLOW_CPU", 1e9)
        patch.setattr(timeout, "_SLOW_GPU", 1e9)
        model = tiny_model()
        set_timeout(model, OombConfig(), document_tokens=tokens, micro_steps=2)
        wanted = timedelta(minutes=step_minutes(model, document_tokens=tokens, micro_steps=2))
    assert wanted > timedelta(minutes=MIN_MINUTES)
    (group,) = dist.distributed_c10d._world.pg_map
    got: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return got - wanted


def test_the_longest_document_counts(tmp_path: Path) -> None:
    assert run_ranks(_set_for_document, 1_000_000, folder=tmp_path, ranks=1) == [timedelta()]


def test_without_processes_there_is_nothing_to_set() -> None:
    assert set_timeout(tiny_model(), OombConfig()) is None
