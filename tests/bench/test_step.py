"""`oomb bench step` from end to end on the CPU, and what it says of references."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oomb_accel.bench import step, timing
from oomb_accel.bench.models import SHAPES
from oomb_accel.bench.reference import SHIPPED, Reference, matching, read_references, regression, save_reference
from oomb_accel.cli import main

SMALL = ["--shape", "tiny", "--tokens", "1100", "--chunk_tokens", "256", "--top_k", "1", "--steps", "1"]
KNOWN = Reference(
    gpu="Some GPU",
    shape="tiny",
    attention="sparse",
    top_k=1,
    tokens=1100,
    chunk_tokens=256,
    base_dtype="model",
    liger=True,
    ratio=0.8,
    tokens_per_second=100.0,
    versions={"torch": "2.11.0", "liger-kernel": None},
    date="2026-11-30",
)


def run(arguments: list[str], tmp_path: Path) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "report.json"
    code = main(["bench", "step", *arguments, "--json", str(path)])
    return code, json.loads(path.read_text())


def test_a_step_is_measured_saved_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "new" / "own.json"
    code, report = run([*SMALL, "--save", str(saved)], tmp_path)
    out = capsys.readouterr().out
    assert code == 0 and report["reference"] is None and "no reference for 'CPU'" in out and "--save FILE" in out
    assert out.count("without Liger's kernels") == 2
    assert "On a CPU this ratio means nothing" in out
    result = report["result"]
    assert result["tokens_per_second"] == pytest.approx(1100 / result["step_seconds"])
    assert result["ceiling_seconds"] == pytest.approx(sum(part["seconds"] for part in result["parts"]))
    assert result["ratio"] == pytest.approx(result["ceiling_seconds"] / result["step_seconds"])
    assert result["loss"] > 0 and result["peak_gib"] is None
    for part in ("products, recompute", "head", "attention to selected pages", "ceiling", "step"):
        assert f"| {part} | " in out

    (entry,) = read_references(saved)
    assert entry.gpu == "CPU" and not entry.liger and entry.versions["torch"] == torch.__version__
    assert entry.ratio == pytest.approx(result["ratio"], abs=1e-4)

    save_reference(saved, dataclasses.replace(entry, ratio=100 * entry.ratio))  # as if it had been faster once
    code, report = run([*SMALL, "--reference", str(saved)], tmp_path)
    progress = capsys.readouterr().err.splitlines()
    error = progress[-3:]
    assert "step 1 of 1" in progress and "ceiling" in progress
    assert code == 1 and report["slower"] and report["reference"]["ratio"] == pytest.approx(100 * entry.ratio)
    assert error[0] == "oomb bench: The step is slower against its ceiling than it was."
    assert len(error) == 3 and torch.__version__ in error[1]


def test_timed_steps_have_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the same length warms up, and nothing is given back behind it: two timed steps are enough."""
    sizes = step.StepSizes(shape="tiny", tokens=300, chunk_tokens=128, attention="dense", top_k=None, steps=2)
    did: list[object] = []
    monkeypatch.setattr(step, "_empty_cache", lambda device: did.append("cache emptied"))

    def run_step(model: object, optimizer: object, ids: torch.Tensor, **_: object) -> float:
        did.append(ids.shape[1])
        return 1.0

    monkeypatch.setattr(step, "training_step", run_step)
    step.bench_step(sizes, lambda tasks: dict.fromkeys(tasks, 1.0), torch.device("cpu"))
    assert did == [300, 300, 300, "cache emptied"]


def test_a_measure_takes_its_memory_when_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is in the peak of the steps before."""
    taken: list[object] = []
    monkeypatch.setattr(timing.torch, "empty", lambda *size, **_: taken.append(size))
    measure = timing.device_times(torch.device("cpu"), 1)
    assert not taken
    assert measure({}) == {} and taken


def test_dense_steps_have_a_ceiling_of_their_own(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--tokens", "300", "--chunk_tokens", "128", "--steps", "1", "--attention", "dense"]
    code, report = run(options, tmp_path)
    names = [part["name"] for part in report["result"]["parts"]]
    assert code == 0 and "attention to the past" in names and "attention to selected pages" not in names
    assert report["measured"]["top_k"] is None


def test_base_weights_in_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run([*SMALL, "--base_dtype", "float8"], tmp_path)
    assert code == 0 and report["measured"]["base_dtype"] == "float8" and report["result"]["ratio"] > 0
    assert "base weights in float8" in capsys.readouterr().out


@pytest.mark.parametrize(("ratio", "slower"), [(0.8, False), (0.761, False), (0.759, True), (2.0, False)])
def test_five_percent_are_allowed(ratio: float, slower: bool) -> None:
    said = regression(dataclasses.replace(KNOWN, ratio=ratio, date="today"), KNOWN)
    assert (said is not None) == slower
    if said is not None:
        lines = said.splitlines()
        assert len(lines) == 3 and "0.759" in lines[1] and "0.760" in lines[1] and "0.800" in lines[1]
        assert "without liger-kernel; 2026-11-30" in lines[1] and "without liger-kernel; today" in lines[1]


def test_a_reference_is_of_the_same_gpu_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    changes: list[dict[str, Any]] = [
        {"gpu": "Other GPU"}, {"shape": "qwen2.5-7b"}, {"attention": "dense"}, {"top_k": 2}, {"tokens": 9},
        {"chunk_tokens": 9}, {"base_dtype": "float8"}, {"liger": False},
    ]  # fmt: skip
    others = [dataclasses.replace(KNOWN, **change) for change in changes]
    for entry in [*others, KNOWN, dataclasses.replace(KNOWN, ratio=0.9)]:
        save_reference(path, entry)
    found = read_references(path)
    assert len(found) == 9, "a second measurement takes the place of the first"
    assert matching(found, KNOWN) == dataclasses.replace(KNOWN, ratio=0.9)
    assert matching(others, KNOWN) is None
    assert matching([KNOWN, dataclasses.replace(KNOWN, ratio=0.7)], KNOWN) == dataclasses.replace(KNOWN, ratio=0.7)


def test_references_of_the_package_can_be_read() -> None:
    entries = read_references(SHIPPED)
    assert len({entry.setting for entry in entries}) == len(entries)
    assert all(entry.shape in SHAPES and 0 < entry.ratio < 1.2 for entry in entries)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("{}", "dict, not a list"),
        ("[1]", "int, not an object"),
        ('[{"gpu": "x"}]', "no shape"),
        (json.dumps([{**dataclasses.asdict(KNOWN), "ratio": "much"}]), "'much'"),
        (json.dumps([{**dataclasses.asdict(KNOWN), "versions": 3}]), "versions"),
        (json.dumps([{**dataclasses.asdict(KNOWN), "rato": 1.0}]), "'ratio'"),
    ],
)
def test_files_that_hold_no_references(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.json"
    path.write_text(text)
    assert main(["bench", "step", *SMALL, "--reference", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "qwen2.5-7"], "'qwen2.5-7b'"),
        (["--tokns", "5"], "'--tokens'"),
        (["--shape", "tiny", "--tokens", "1"], "--tokens is too small"),
        (["--shape", "tiny", "--steps", "0"], "--steps 3"),
        (["--shape", "tiny", "--chunk_tokens", "100"], "at least one page"),
        (["--shape", "tiny", "--top_k", "0"], "top_k must be at least 1"),
        (["--shape", "tiny", "--attention", "dense", "--top_k", "4"], "Leave --top_k out"),
        (["--shape", "tiny", "--tokens", "1500"], "--tokens 1537 or more"),
        (["--shape", "tiny", "--reference", "missing.json"], "There is no file missing.json"),
        (["--shape", "tiny", "--save", "."], "Use --save report.json"),
    ],
)
def test_bad_options_are_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *options]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 3, error


def test_the_fewest_tokens_that_are_named_are_enough() -> None:
    sizes: dict[str, Any] = dict(shape="tiny", attention="sparse", steps=1)
    for chunk, top_k in ((512, 4), (128, 1), (300, 16), (8192, 64)):
        with pytest.raises(ValueError, match="too short") as raised:
            step.StepSizes(**sizes, chunk_tokens=chunk, top_k=top_k, tokens=2)
        fewest = int(str(raised.value).split("--tokens ")[-1].split()[0])
        step.StepSizes(**sizes, chunk_tokens=chunk, top_k=top_k, tokens=fewest)
        with pytest.raises(ValueError, match="too short"):
            step.StepSizes(**sizes, chunk_tokens=chunk, top_k=top_k, tokens=fewest - 1)


def test_other_shapes_need_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "step"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert "needs an NVIDIA GPU for the shape qwen2.5-7b" in error[0] and "--shape tiny" in error[2]


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(step, "lora_model", refuse)
    assert main(["bench", "step", *SMALL]) == 1
    error = capsys.readouterr().err.splitlines()[-3:]
    assert "does not fit" in error[0] and "2.00 GiB. More." in error[1] and "--chunk_tokens 128" in error[2]


@pytest.mark.gpu
def test_a_step_on_a_gpu(tmp_path: Path) -> None:
    code, report = run([*SMALL, "--save", str(tmp_path / "own.json")], tmp_path)
    assert code == 0 and report["result"]["peak_gib"] > 0 and 0 < report["result"]["ratio"] < 2
    assert report["measured"]["gpu"] == torch.cuda.get_device_name()
