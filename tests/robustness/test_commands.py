"""The other commands, given nonsense."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.cli import main
from tests.robustness.bad_inputs import Bad, Place, check

MODEL = "qwen2.5-7b"


def words(*given: str) -> Callable[[Place], list[str]]:
    return lambda place: [word.replace("MODEL", str(place.model)) for word in given]


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
    Bad("verify a report nowhere", words("verify", "MODEL", "--json", "/nowhere/a.json"), ("/nowhere",)),
    Bad("verify no text", words("verify", "MODEL", "--text", "nowhere.txt"), ("nowhere.txt",)),
    Bad("report nothing", words("report"), ("folder", "--help")),
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
