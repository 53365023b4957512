"""The other commands, given nonsense."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oomb_accel.cli import main
from oomb_accel.evaluation.merging import check_output
from tests.robustness.bad_inputs import Bad, Place, check

MODEL = "qwen2.5-7b"


def words(*given: str) -> Callable[[Place], list[str]]:
    def typed(place: Place) -> list[str]:
        names = {"MODEL": str(place.model), "TEXT": place.write("text.txt", "some words " * 30)}
        return [names.get(word, word) for word in given]

    return typed


def empty(place: Place) -> str:
    (place.folder / "empty").mkdir()
    return str(place.folder / "empty")


def report(spoil: Callable[[Path], object], *flags: str) -> Callable[[Place], list[str]]:
    def typed(place: Place) -> list[str]:
        shutil.copytree(place.run / "out", place.folder / "out")
        spoil(place.folder / "out")
        return ["report", str(place.folder / "out"), "--no_plots", *flags]

    return typed


def spoilt_config(place: Place, **changes: Any) -> str:
    return place.write("c.json", json.dumps(json.loads((place.model / "config.json").read_text()) | changes))


def put(name: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda out: (out / name).write_bytes(text.encode() if isinstance(text, str) else text)


def merge(spoil: Callable[[Path], object], *flags: str, out: str = "merged") -> Callable[[Place], list[str]]:
    """``oomb merge`` of a copy of the adapter that something was done to."""

    def typed(place: Place) -> list[str]:
        shutil.copytree(place.run / "out", place.folder / "out")
        spoil(place.folder / "out")
        return ["merge", str(place.folder / "out"), "--output_dir", out.replace("MODEL", str(place.model)), *flags]

    return typed


def cut_adapter(keep: float) -> Callable[[Path], object]:
    def spoil(out: Path) -> None:
        path = out / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return spoil


def pickled_adapter(out: Path) -> None:
    path = out / "adapter_model.safetensors"
    torch.save(load_file(path), out / "adapter_model.bin")
    path.unlink()


def rank_of_two(out: Path) -> None:
    path = out / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 2}))


CASES = [
    Bad("estimate nothing", words("estimate"), ("model", "--help")),
    Bad("estimate no model", words("estimate", "qwen9.9-7b"), ("qwen9.9-7b",)),
    Bad("estimate a broken config", lambda p: ["estimate", p.write("config.json", "{")], ("config.json", "JSON")),
    Bad("estimate a binary", lambda p: ["estimate", p.write("config.json", b"\xff\0")], ("config.json",)),
    Bad("estimate a text size", lambda p: ["estimate", spoilt_config(p, hidden_size="x")], ("c.json", "hidden_size")),
    Bad("estimate a huge size", lambda p: ["estimate", spoilt_config(p, vocab_size=-1)], ("c.json", "vocab_size")),
    Bad("estimate a folder", lambda p: ["estimate", str(p.folder)], ("config.json",)),
    Bad("estimate an unknown option", words("estimate", MODEL, "--lenght", "1M"), ("--lenght", "--length")),
    Bad("estimate a stray word", words("estimate", MODEL, "1M"), ("1M", "--help")),
    Bad("estimate no value", words("estimate", MODEL, "--length"), ("--length",)),
    Bad("estimate no number", words("estimate", MODEL, "--length", "long"), ("'long'", "131072")),
    Bad("estimate infinite", words("estimate", MODEL, "--host_gib", "inf"), ("--host_gib", "inf")),
    Bad("estimate NaN", words("estimate", MODEL, "--price", "nan"), ("--price", "nan")),
    Bad("estimate a negative price", words("estimate", MODEL, "--price", "-1"), ("--price",)),
    Bad("estimate no memory", words("estimate", MODEL, "--gpu_gib", "0"), ("--gpu_gib", "0")),
    Bad("estimate huge", words("estimate", MODEL, "--length", "9" * 400), ("tokens",)),
    Bad("estimate digits", words("estimate", MODEL, "--lora_r", "9" * 5000), ("--lora_r",)),
    Bad("estimate a choice", words("estimate", MODEL, "--attention", "spars"), ("spars", "sparse")),
    Bad("estimate twice", words("estimate", MODEL, "--length", "1M", "--length", "2M"), ("--length", "twice")),
    Bad("verify nothing", words("verify"), ("model", "--help")),
    Bad("verify no model", words("verify", "./nowhere"), ("nowhere",)),
    Bad("verify no config", words("verify", "nowhere.json"), ("nowhere.json",)),
    Bad("verify layers", words("verify", "MODEL", "--layers", "-3"), ("-3", "--layers 2")),
    Bad("verify tokens", words("verify", "MODEL", "--tokens", "2"), ("--tokens 2", "--tokens 600")),
    Bad("verify a device", words("verify", "MODEL", "--device", "tpu9"), ("tpu9", "--device cpu")),
    Bad("verify an option", words("verify", "MODEL", "--chunk", "2"), ("--chunk", "--chunk_tokens")),
    Bad("verify a value", words("verify", "MODEL", "--tokens", "x"), ("--tokens", "'x'")),
    Bad("verify a report nowhere", words("verify", "MODEL", "--json", "/proc/no/a.json"), ("/proc", "--json a.json")),
    Bad("verify no text", words("verify", "MODEL", "--text", "nowhere.txt"), ("nowhere.txt",)),
    Bad("verify an empty folder", lambda p: ["verify", str(p.model), "--text", empty(p)], ("no text", "Set --text to")),
    Bad("verify another model", words("verify", "/"), ("config.json", "Set MODEL to")),
    Bad("verify odd rows", lambda p: ["verify", str(p.model), "--text", p.rows({"a": "b"})], ("no field", '{"text"')),
    Bad("report nothing", words("report"), ("FOLDER", "--help")),
    Bad("report no folder", words("report", "nowhere"), ("nowhere", "output_dir")),
    Bad("report no run", lambda p: ["report", str(p.folder)], ("no run",)),
    Bad("report a file", lambda p: ["report", p.write("a", "x")], ("a file",)),
    Bad("report broken metrics", report(put("metrics.jsonl", "{\n")), ("metrics.jsonl line 1",)),
    Bad("report metrics without loss", report(put("metrics.jsonl", '{"step": 1}\n')), ("metrics.jsonl line 1", "loss")),
    Bad("report binary metrics", report(put("metrics.jsonl", b"\xff\0\n")), ("metrics.jsonl",)),
    Bad("report broken memory", report(put("memory.jsonl", "[]\n")), ("memory.jsonl line 1",)),
    Bad("report broken summary", report(put("summary.json", "{")), ("summary.json",)),
    Bad("report a list as summary", report(put("summary.json", "[]")), ("summary.json",)),
    Bad("report an option", words("report", "MODEL", "--jsn"), ("--jsn", "--json")),
    Bad("data nothing", words("data"), ("recipe", "--help")),
    Bad("data without model", lambda p: ["data", p.rows({"text": "x"})], ("--model",)),
    Bad("data an empty folder", lambda p: ["data", empty(p), "--model", str(p.model)], ("no text", "Set PATH to")),
    Bad("data no model", lambda p: ["data", p.rows({"text": "x"}), "--model", "./no"], ("./no", "Set --model to")),
    Bad("data show", lambda p: ["data", p.recipe(), "--show", "x"], ("--show", "'x'")),
    Bad("data show far", lambda p: ["data", p.recipe(), "--show", "99"], ("99",)),
    Bad("data show negative", lambda p: ["data", p.recipe(), "--show", "-4"], ("-4",)),
    Bad("data two recipes", lambda p: ["data", p.recipe(), "b.yaml"], ("One recipe",)),
    Bad("data an option", lambda p: ["data", p.recipe(), "--max_lenght", "9"], ("max_lenght", "max_length")),
    Bad("bench nothing", words("bench"), ("benchmark", "--help")),
    Bad("bench an option", words("bench", "attention", "--topk", "3"), ("--topk", "--top-k")),
    Bad("bench a value", words("bench", "attention", "--top-k", "x"), ("--top-k", "'x'")),
    Bad("env a word", words("env", "all"), ("'all'", "--json")),
    Bad("run nothing", words("run"), ("script", "--help")),
    Bad("run no script", words("run", "nowhere.py"), ("nowhere.py",)),
    Bad("run an option", words("run", "--oomb.chunk", "1", "a.py"), ("--oomb.chunk", "--oomb.chunk_tokens")),
    Bad("eval nothing", words("eval"), ("model", "--help")),
    Bad("eval no data", words("eval", "MODEL"), ("--data", "--help")),
    Bad("eval an empty name", words("eval", "MODEL", "--data", ""), ("--data is empty", "book.txt")),
    Bad("eval no such data", words("eval", "MODEL", "--data", "nowhere.txt"), ("nowhere.txt", "--data")),
    Bad("eval a device", words("eval", "MODEL", "--data", "a.txt", "--device", "tpu9"), ("tpu9", "--device cpu")),
    Bad("eval a part", words("eval", "MODEL", "--data", "a.txt", "--parts", "fact"), ("fact", "facts")),
    Bad("eval a number", words("eval", "MODEL", "--data", "a.txt", "--tokens", "x"), ("--tokens", "'x'")),
    Bad("eval digits", words("eval", "MODEL", "--data", "a.txt", "--tokens", "9" * 5000), ("--tokens",)),
    Bad("eval depths", words("eval", "MODEL", "--data", "a.txt", "--depths", "nan"), ("--depths", "nan")),
    Bad("eval an adapter", words("eval", "MODEL", "--data", "TEXT", "--adapter", "no"), ("'no'", "adapter")),
    Bad("merge nothing", words("merge"), ("adapter", "--help")),
    Bad("merge no output", words("merge", "a"), ("--output_dir", "--help")),
    Bad("merge no adapter", words("merge", "nowhere", "--output_dir", "m"), ("'nowhere'", "output_dir")),
    Bad("merge a model", words("merge", "MODEL", "--output_dir", "m"), ("adapter_config.json",)),
    Bad("merge a broken config", merge(put("adapter_config.json", "{")), ("adapter_config.json", "JSON")),
    Bad("merge a config of something", merge(put("adapter_config.json", "{}")), ("model",)),
    Bad("merge an odd config", merge(put("adapter_config.json", '{"peft_type": "FOO"}')), ("--model",)),
    Bad("merge another rank", merge(rank_of_two), ("adapter",)),
    Bad("merge cut off weights", merge(cut_adapter(0.5)), ("adapter_model.safetensors",)),
    Bad("merge empty weights", merge(cut_adapter(0)), ("adapter_model.safetensors",)),
    Bad("merge pickled weights", merge(pickled_adapter), ("adapter_model.safetensors is missing",)),
    Bad("merge a broken recipe", merge(put("config.yaml", "a: [")), ("config.yaml",)),
    Bad("merge no such model", merge(put("x", ""), "--model", "./nowhere"), ("nowhere", "Set --model to")),
    Bad("merge to a file", merge(put("x", ""), out="out/x"), ("--output_dir", "file")),
    Bad("merge to nowhere", merge(put("x", ""), out="/proc/merged"), ("/proc", "another disk")),
    Bad("merge over a model", merge(put("x", ""), out="MODEL"), ("has a model already",)),
    Bad("merge a device", merge(put("x", ""), "--device", "tpu9"), ("tpu9", "--device cpu")),
    Bad("train nothing", words("train"), ("recipe", "--help")),
    Bad("train options only", words("train", "--seed", "1"), ("recipe", "--seed")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case: Bad, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    check(case, place, capsys)


@pytest.mark.parametrize("word", ["trian", "", "--version-please"])
def test_unknown_commands(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert repr(word) in capsys.readouterr().err


def test_an_unknown_command_has_its_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dta"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("oomb: Unknown command 'dta' on the command line.") and "Did you mean 'data'?" in said


def test_printed_commands_take_paths_with_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "my repo"]) == 2
    assert "oomb data 'my repo' --model" in capsys.readouterr().err
    (tmp_path / "my out").mkdir()
    (tmp_path / "my out" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--output_dir 'my out-merged'"):
        check_output(Path("my out"))
