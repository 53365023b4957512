"""The benchmarks run, at tiny size; what they print has the shape that docs/benchmarks.md shows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.registry import BENCHMARKS, Row, table
from tests.distributed.ranks import ROOT, needs_deepspeed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_whole_step_at_tiny_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    options = "whole_step --shape tiny --lengths 300 --chunk-tokens 128 --timed 1 --sides oomb oomb-no-kept peer"
    monkeypatch.setattr(sys, "argv", ["run", *options.split(), "--out", str(out)])
    assert run.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["side"] for row in rows] == ["oomb", "oomb-no-kept", "peer"]
    assert all(row["seconds"] > 0 and row["tokens_per_second"] > 0 and row["torch"] for row in rows)
    assert "| benchmark | side |" in capsys.readouterr().out


@needs_deepspeed
def test_zero_at_tiny_size(tmp_path: Path) -> None:
    """In a process of its own, as it connects to a process group."""
    out = tmp_path / "rows.jsonl"
    sides = ["plain", "zero2", "zero3-unequal", "zero2-full-step"]
    options = ["--shape", "tiny", "--lengths", "300", "--chunk-tokens", "128", "--timed", "1", "--out", str(out)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "zero", "--sides", *sides, *options],
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1", "MASTER_PORT": str(free_port())},
        check=True,
        timeout=300,
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["side"] for row in rows] == sides
    assert all(row["seconds"] > 0 and row["deepspeed"] for row in rows)
    losses = [row["details"]["loss"] for row in rows[:3]]
    assert max(losses) - min(losses) < 0.01
    assert rows[1]["details"]["collectives_per_step"]


def test_every_benchmark_has_a_name_that_the_command_line_takes() -> None:
    assert {"whole_step", "profile_step", "zero"} <= set(BENCHMARKS)


def test_a_row_without_a_measurement_says_so() -> None:
    assert "| nan |" in table([Row("whole_step", "peer", 4096, note="out of memory")])
