"""`oomb bench attention` as it is typed; on a GPU at small size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from oomb_accel.bench import figures
from oomb_accel.cli import bench_attention, main
from oomb_kernels.page_tiles import Kernel
from tests.bench.sizes import TINY


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu(monkeypatch)
    assert main(["bench", "attention", "--quick"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert "needs an NVIDIA GPU" in error[0] and torch.__version__ in error[1] and "oomb env" in error[2]


def test_a_misspelt_benchmark_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "atention"]) == 2
    assert "'attention'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--flex"],
        ["--q-block", "64", "--head-dim", "64", "--dtype", "float16"],
        ["--page-grad-dtype", "float32", "bfloat16"],
    ],
)
def test_quick_run_on_a_gpu(tmp_path: Path, extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert main(["bench", "attention", "--quick", "--json", str(path), *extra]) == 0
    assert "| random | 4 | 8,192 |" in capsys.readouterr().out
    report = json.loads(path.read_text())
    grads = extra[1:] if "--page-grad-dtype" in extra else ["float32"]
    found = [(row["lists"], row["page_grads"]) for row in report["rows"]]
    assert found == [(kind, dtype) for kind in ("random", "zipf", "hot page") for dtype in grads]
    for row in report["rows"]:
        assert all(row[name] > 0 for name in ("forward_ms", "backward_ms", "index_ms", "selection_ms"))
        assert row["alone_ms"] > 0
        assert row["forward_ratio"] > 0 and row["backward_ratio"] > 0
        assert (row["flex_forward_ms"] is not None) == ("--flex" in extra)


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    assert main(["bench", "attention", "--quick", "--tune", "--page-tokens", "32", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["tuning"]
    assert {result["kernel"] for result in results} == set(get_args(Kernel))
    assert all(result["ms"] or not result["is_chosen"] for result in results)


def test_a_benchmark_is_named_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2 and main(["bench", "--quick", "attention"]) == 2
    assert "oomb bench attention or oomb bench step" in capsys.readouterr().err
    assert main(["bench", "--help"]) == 0
    assert "attention  " in capsys.readouterr().out


def test_page_gradients_are_fp32_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    read = bench_attention._parser().parse_args
    assert read([]).page_grad_dtype == ["float32"]
    assert read(["--page-grad-dtype", "float32", "bfloat16"]).page_grad_dtype == ["float32", "bfloat16"]
    with pytest.raises(ValueError, match="bfloat16"):
        read(["--page-grad-dtype", "float16"])
    plain = bench_attention._plain(replace(TINY, page_grad_dtypes=(torch.bfloat16,)))
    assert json.loads(json.dumps(plain))["page_grad_dtypes"] == ["torch.bfloat16"]


def test_full_sizes_are_those_of_the_documented_table() -> None:
    """What is printed in docs/benchmarks.md is what the command does without options."""
    assert bench_attention._FULL["top_k"] == [16, 32, 64] and bench_attention._FULL["past"] == [
        2**17,
        2**18,
        2**19,
        2**20,
    ]
    assert figures.FLOOR_FLOPS_PER_SECOND == 700e12
