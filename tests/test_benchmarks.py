"""The benchmarks run, at tiny size; what they print has the shape that docs/benchmarks.md shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import choices, depths, long_document, offload, run
from benchmarks.registry import BENCHMARKS, Row, table
from oomb_accel.training.data import load_corpus
from oomb_accel.training.model import load_tokenizer
from oomb_accel.training.recipe import Recipe
from tests.distributed.ranks import ROOT, needs_deepspeed
from tests.harness.ports import free_port


def test_whole_step_at_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    options = "whole_step --shape tiny --lengths 300 --chunk-tokens 128 --timed 1 --sides oomb oomb-no-kept peer"
    assert run.main([*options.split(), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["side"] for row in rows] == ["oomb", "oomb-no-kept", "peer"]
    assert all(row["seconds"] > 0 and row["tokens_per_second"] > 0 and row["torch"] for row in rows)
    assert "| benchmark | side |" in capsys.readouterr().out


def test_chunks_at_depths_add_up_to_a_step() -> None:
    device = torch.device("cpu")
    (row,) = depths.depths(
        shape="tiny", lengths=[1300], sides=["oomb-bf16-grads-no-kept"], chunk_tokens=128, timed=1, device=device
    )
    measured = row.details["seconds_of_chunk"]
    assert list(measured) == [2, 5, 10] and all(seconds > 0 for seconds in measured.values())
    assert row.seconds > 0
    # Seconds that grow by 2 from chunk to chunk, beginning with 3.
    assert depths.whole_step_seconds({2: 7.0, 5: 13.0, 10: 23.0}, 11) == pytest.approx(sum(range(3, 25, 2)))


def test_a_long_document_is_what_oomb_train_reads(tmp_path: Path) -> None:
    assert long_document.main([str(tmp_path), "--shape", "tiny", "--tokens", "700", "900"]) == 0
    document_path = str(tmp_path / "document-900.jsonl")
    model_path, out = str(tmp_path / "model"), str(tmp_path / "out")
    recipe = Recipe(model_name_or_path=model_path, data_path=document_path, output_dir=out)
    (document,) = load_corpus(recipe, load_tokenizer(recipe)).documents
    assert len(document.input_ids) == 900 and max(document.input_ids) < 512


@needs_deepspeed
def test_zero_at_tiny_size(tmp_path: Path) -> None:
    """On two ranks, with the peer that divides a document over them: the first rank's document is the same for all."""
    out = tmp_path / "rows.jsonl"
    sides = ["plain", "zero2", "zero3-unequal", "zero2-alst", "zero2-full-step", "zero3-sparse-divided"]
    options = ["--shape", "tiny", "--lengths", "300", "--chunk-tokens", "128", "--timed", "1", "--out", str(out)]
    ranks = ["--nproc_per_node", "2", "--master_port", str(free_port())]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *ranks,
            "-m",
            "benchmarks.run",
            "zero",
            "--sides",
            *sides,
            *options,
        ],
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_SIZE": "2"},
        check=True,
        timeout=300,
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["side"] for row in rows] == sides
    assert all(row["seconds"] > 0 and row["deepspeed"] for row in rows)
    losses = [row["details"]["loss"] for row in rows[:4]]
    assert max(losses) - min(losses) < 0.001
    assert [row["tokens"] for row in rows[2:4]] == [300, 150]
    assert rows[1]["details"]["collectives_per_step"]


def test_every_benchmark_has_a_name_that_the_command_line_takes() -> None:
    assert {"whole_step", "profile_step", "zero", "offload"} <= set(BENCHMARKS)


def test_a_row_without_a_measurement_says_so() -> None:
    assert "| nan |" in table([Row("whole_step", "peer", 4096, note="out of memory")])


def test_offload_at_tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pool that a model of two layers can do with."""
    monkeypatch.setattr(offload, "POOL_SHARE", 0.7)
    sides = ["offload-dense", "offload-dense-kept", "offload-sparse-16-budget-128"]
    device = torch.device("cpu")
    rows = list(offload.offload(shape="tiny", lengths=[900], sides=sides, chunk_tokens=128, timed=1, device=device))
    assert [(row.side, row.details["device_pages_gib"] == "all") for row in rows] == [
        (side, resident) for side in sides for resident in (True, False)
    ]
    for resident, small in zip(rows[::2], rows[1::2], strict=True):
        assert small.details["same_loss"] and small.details["against_resident"] > 0 and "x resident" in small.note
        assert resident.details["copied_gib"] == {"up": 0.0, "down": 0.0}
        assert len(small.details["host_memory_made_in"]) == 1


def test_a_pool_that_is_too_small_is_said_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "POOL_SHARE", 0.01)
    resident, small = offload.offload(
        shape="tiny", lengths=[600], sides=["offload-dense"], chunk_tokens=128, timed=1, device=torch.device("cpu")
    )
    assert resident.seconds > 0 and not small.seconds > 0 and small.note.startswith("The device has too little memory")


def refusal(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code and message of the command line on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = run.main(words.split())
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_a_benchmark_accepts_its_own_defaults(name: str) -> None:
    """Without a GPU."""
    options = choices.asked([name])
    sides, lengths = BENCHMARKS[name].default_sides, BENCHMARKS[name].default_lengths
    assert options.sides == list(sides) and options.lengths == list(lengths) and sides and lengths


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_a_real_shape_needs_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would take forever on a CPU."""
    code, (what, seen, remedy) = refusal(name, monkeypatch, capsys)
    assert code == 1 and "needs a CUDA device for the shape qwen2.5-7b" in what and "0 CUDA devices" in seen
    assert "--shape tiny" in remedy


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"zero"}))
def test_what_a_machine_without_a_gpu_is_told_to_run_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, (_, _, remedy) = refusal(name, monkeypatch, capsys)
    words = remedy.partition("try it with ")[2].removesuffix(".")
    assert run.main([name, *words.split(), "--timed", "1"]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {name} | {side} |" in printed for side in BENCHMARKS[name].default_sides), printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("whole_step --sides oomb-no-kep", ["'oomb-no-kep' of whole_step", "Did you mean 'oomb-no-kept'?"]),
        ("whole_step --sides zero2", ["'zero2' of whole_step"]),
        ("zero --sides oomb", ["'oomb' of zero", "plain"]),
        ("depths --sides peer", ["'peer' of depths"]),
        ("whole_step --shape qwen2.5-7", ["Unknown shape", "Did you mean 'qwen2.5-7b'?"]),
        ("whole_stp", ["'whole_stp'", "Did you mean 'whole_step'?"]),
        ("whole_step --lengths 8X", ["must be a number of tokens, such as 4096 or 4K, got '8X'"]),
        ("whole_step --lengths 8K 1", ["--lengths is too small", "Got 1.", "Use 2 or more."]),
        ("depths --lengths 16K", ["--lengths is too small", "Got 16,384", "Use 24,577 or more"]),
        ("whole_step --chunk-tokens 0.3K", ["must be a number of tokens"]),
        ("whole_step --chunk-tokens 64", ["page_tokens"]),
        ("whole_step --timed 0", ["--timed is too small", "Use 1 or more."]),
        ("whole_step --out docs", ["docs is a folder"]),
        ("whole_step --side oomb", ["Did you mean '--sides'?"]),
    ],
)
def test_what_a_benchmark_does_not_know(
    words: str, said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = refusal(words, monkeypatch, capsys)
    assert code == 2 and len(lines) == 3 and all(part in "\n".join(lines) for part in said), lines


@pytest.mark.parametrize("word", ["8K", "8192", "8,192", "8_192", "8k"])
def test_tokens_are_written_as_for_oomb(word: str) -> None:
    options = choices.asked(["whole_step", "--lengths", word, "1.5M", "--chunk_tokens", word])
    assert options.lengths == [8192, 1572864] and options.chunk_tokens == 8192


def test_a_longer_document_than_there_are_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is no number of tokens."""
    monkeypatch.setattr(long_document, "_words", lambda: iter(["few", "words"]))
    for word, said in (("4K", "The installed packages have 2 words only."), ("soon", "must be a number of tokens")):
        assert long_document.main([str(tmp_path), "--shape", "tiny", "--tokens", word]) == 2
        lines = capsys.readouterr().err.splitlines()[-3:]
        assert lines[0].startswith("benchmarks.long_document: ") and said in lines[0] + lines[1], lines


def test_help_names_each_side_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "5000")  # names are folded at their hyphens
    with pytest.raises(SystemExit) as stop:
        run.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split()).partition("There are, for")[2]
    assert text.count("oomb-bf16-grads-no-kept") == text.count("zero3-full-offload-step") == 1
