"""Recipes, presets and options that are wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.robustness.bad_inputs import Bad, Place, check, train, train_raw


def train_file(content: str | bytes) -> Callable[[Place], list[str]]:
    return lambda place: ["train", place.write("recipe.yaml", content)]


def preset(content: str | bytes) -> Callable[[Place], list[str]]:
    """``oomb run`` with a preset, and a script that must not run."""
    script = "import pathlib; pathlib.Path('ran').touch()"
    return lambda place: [
        *("run", "--oomb_config", place.write("preset.yaml", content)),
        place.write("script.py", script),
    ]


def deepspeed(content: str | bytes) -> Callable[[Place], list[str]]:
    """``oomb run`` of a script with a DeepSpeed config."""
    return lambda place: [
        "run",
        place.write("script.py", "raise SystemExit('it ran')"),
        *("--deepspeed", place.write("ds.json", content)),
    ]


def behind_zero(rest: str) -> Callable[[Place], list[str]]:
    """The same with a config that begins as it should."""
    return deepspeed("{" + ZERO + ", " + rest)


ZERO = '"zero_optimization": {"stage": 2}'
RUN_CODE = "!!python/object/apply:os.system ['touch /tmp/oomb_ran']"

RECIPES = [
    Bad("wrong type", train(lora_r="many"), ("lora_r", "'many'", "a whole number")),
    Bad("a number for text", train(data_split=3), ("data_split", "Got 3")),
    Bad("a list for a number", train(max_steps=[1]), ("max_steps", "[1]")),
    Bad("a mapping for text", train(data_path={"a": 1}), ("data_path", "{'a': 1}")),
    Bad("an empty list", train(data_path=[]), ("data_path", "[]")),
    Bad("empty", lambda place: ["train", place.write("r.yaml", "# nothing\n")], ("one mapping", "it is empty")),
    Bad("no file", lambda place: ["train", "no.yaml"], ("There is no file no.yaml, looked in /",)),
    Bad("a folder", lambda place: ["train", str(place.folder)], ("Is a directory",)),
    Bad("a tab", train_raw("a:\n\tb: 1"), ("Line ", "column 1", "'\\t'")),
    Bad("misspelt", train(learning_rat=0.1), ("'learning_rat'", "Did you mean 'learning_rate'")),
    Bad("misspelt in the block", train(oomb={"chunk_token": 64}), ("'chunk_token'", "'chunk_tokens'")),
    Bad("in the wrong block", train(chunk_tokens=64), ("'chunk_tokens'", "oomb.chunk_tokens")),
    Bad("of another trainer", train(micro_batch_size=2), ("micro_batch_size", "per_device_train_batch_size")),
    Bad("a key that is a number", train_raw("1: 2"), ("'1'",)),
    Bad("a key that is null", train_raw("null: 2"), ("'None'",)),
    Bad("a key that is a list", train_raw("? [a, b]\n: 2"), ("recipe.yaml", "yaml")),
    Bad("the block is text", train(oomb="sparse"), ("oomb must be a mapping", "'sparse'")),
    Bad("contradictory lengths", train(num_train_epochs=2), ("max_steps=1", "num_train_epochs=2")),
    Bad("truncation without length", train(truncation="start"), ("truncation=start",), remedy=True),
    Bad("packing without length", train(packing=True), ("packing=true",), remedy=True),
    Bad("dropout of all", train(lora_dropout=1.0), ("lora_dropout=1.0",), remedy=True),
    Bad("dora without lora", train(lora_r=0, use_dora=True), ("use_dora=True",), remedy=True),
    Bad("an endless warm-up", train(warmup_steps=9), ("warmup_steps=9",), remedy=True),
    Bad("chunk below page", train(oomb={"chunk_tokens": 8}), ("chunk_tokens=8", "page_tokens=128")),
    Bad("sparse settings without sparse", train(oomb={"top_k": 8}), ("top_k=8", "attention='sparse'")),
    Bad("negative", train(max_steps=-1), ("max_steps=-1",), remedy=True),
    Bad("NaN", train(learning_rate=float("nan")), ("learning_rate=nan",), remedy=True),
    Bad("infinite", train(max_grad_norm=float("inf")), ("max_grad_norm=inf",), remedy=True),
    Bad("a huge seed", train(seed=10**30), ("seed", str(2**32 - 1)), remedy=True),
    Bad("a huge rank", train(lora_r=10**12), ("lora_r",), remedy=True),
    Bad("huge steps", train(max_steps=10**30), ("max_steps",), remedy=True),
    Bad("a huge whole number as a number", train(lora_alpha=10**400), ("lora_alpha",)),
    Bad("a number of 5000 digits", train_raw("seed: " + "9" * 5000), ("recipe.yaml",)),
    Bad("a date that is none", train_raw("run_name: 2026-99-99"), ("recipe.yaml", "month")),
    Bad("a huge chunk", train(oomb={"chunk_tokens": 10**30}), ("chunk_tokens",)),
    Bad("a huge timeout", train(oomb={"timeout_minutes": 10**18}), ("timeout_minutes",)),
    Bad("a key twice", train_raw("max_steps: 2"), ("'max_steps' stands twice",)),
    Bad("a key twice in the block", train_raw("rope_parameters: {a: 1, a: 2}"), ("'a' stands twice",)),
    Bad("a tag that runs code", train_raw(f"run_name: {RUN_CODE}"), ("python/object/apply", "os.system")),
    Bad("tabs", train_raw("oomb2:\n\tchunk_tokens: 1"), ("not valid yaml", "\\t")),
    Bad("nested deeply", train_raw("run_name: " + "[" * 5000), ("recipe.yaml",)),
    Bad(
        "aliases that explode",
        train_raw("x:\n" + "\n".join(f"- &x{n} [{', '.join([f'*x{n - 1}' if n else '1'] * 9)}]" for n in range(9))),
        ("'x'",),
    ),
    Bad(
        "a value that explodes",
        train_raw(
            f"run_name: [&a0 [{'1,' * 9}], " + ", ".join(f"&a{n} [{f'*a{n - 1},' * 9}]" for n in range(1, 12)) + "]"
        ),
        ("run_name",),
    ),
    Bad("an empty file", train_file(""), ("recipe.yaml", "one mapping")),
    Bad("a list", train_file("- a\n- b\n"), ("one mapping", "list")),
    Bad("wrong encoding", train_file("run_name: gr\xfcn\n".encode("latin1")), ("recipe.yaml", "0xfc")),
    Bad("UTF-16", train_file("seed: 1\n".encode("utf-16")), ("recipe.yaml", "0xff")),
    Bad("binary", train_file(b"\x00\x01\x02seed: 1"), ("recipe.yaml",)),
    Bad("a folder", lambda place: ["train", str(place.folder)], ("cannot be read", "directory")),
    Bad("no file", lambda place: ["train", str(place.folder / "no.yaml")], ("no.yaml", "configs/")),
    Bad("a NUL in the path", lambda place: ["train", "a\0b.yaml"], ("a\\x00b",)),
    Bad("a NUL in output_dir", train(output_dir="a\0b"), ("output_dir", "\\x00")),
    Bad("a NUL in data_path", train(data_path="a\0b"), ("data_path", "\\x00")),
    Bad("half a character in output_dir", train_raw('run_name: "\\ud83d"'), ("run_name",)),
    Bad("a long name", train(output_dir="x" * 300), ("output_dir", "255")),
    Bad("nobody's home", train(output_dir="~nobody_here/out"), ("output_dir", "~nobody_here")),
    Bad("no model named", train(model_name_or_path=None), ("lacks model_name_or_path", "Example")),
    Bad("no output named", train(output_dir=""), ("lacks output_dir",)),
    Bad("an unknown RoPE", train(rope_parameters={"rope_type": "foo"}), ("'foo'", "yarn")),
    Bad("RoPE without a factor", train(rope_parameters={"rope_type": "yarn"}), ("factor", "Example")),
    Bad("no such module", train(lora_target_modules=["q_projj"]), ("q_projj", "q_proj")),
]

FLAGS = [
    Bad("an unknown flag", train("--learning_rat", "1"), ("learning_rat", "Did you mean '--learning_rate'")),
    Bad("an unknown flag of the block", train("--oomb.chunk", "1"), ("oomb.chunk", "--oomb.chunk_tokens")),
    Bad("the block as a flag", train("--oomb", "{}"), ("oomb",)),
    Bad("no value", train("--learning_rate"), ("--learning_rate", "no value")),
    Bad("a flag for a value", train("--learning_rate", "--seed", "3"), ("--learning_rate", "no value")),
    Bad("an empty value", train("--max_steps="), ("--max_steps", "''")),
    Bad("not a number", train("--max_steps", "1e3x"), ("--max_steps", "'1e3x'")),
    Bad("NaN as a flag", train("--learning_rate", "nan"), ("learning_rate=nan",), remedy=True),
    Bad("digits without end", train("--seed", "9" * 5000), ("--seed",)),
    Bad("twice", train("--seed", "1", "--seed", "2"), ("--seed", "twice", "1", "2")),
    Bad("twice in both spellings", train("--lora-r=1", "--lora_r", "2"), ("lora_r", "twice")),
    Bad("a stray word", train("fast"), ("'fast'", "--name value")),
    Bad("one dash", train("-seed", "1"), ("'-seed'",)),
    Bad("not a list", train("--lora_target_modules", "[q_proj"), ("--lora_target_modules",)),
    Bad("code in a list", train("--data_include", f"[{RUN_CODE}]"), ("--data_include",)),
    Bad("no GPUs", train("--dry_run", "--gpus", "none"), ("--gpus", "'none'", "--gpus 8")),
    Bad("an unknown GPU", train("--dry_run", "--gpu", "h2000"), ("h2000", "h200")),
]

PRESETS = [
    Bad("preset: a tag that runs code", preset(f"chunk_tokens: {RUN_CODE}"), ("preset.yaml", "os.system")),
    Bad("preset: empty", preset(""), ("one mapping", "it is empty")),
    Bad("preset: twice", preset("chunk_tokens: 64\nchunk_tokens: 128"), ("stands twice",)),
    Bad("preset: misspelt", preset("chunk_token: 64"), ("chunk_token", "chunk_tokens")),
    Bad("preset: wrong encoding", preset(b"a: \xfc"), ("preset.yaml", "0xfc")),
    Bad("preset: digits without end", preset("chunk_tokens: " + "9" * 5000), ("preset.yaml",)),
    Bad("preset: a list as key", preset("? [a]\n: 1"), ("preset.yaml",)),
    Bad("preset: nested deeply", preset("a: " + "[" * 5000), ("preset.yaml",)),
    Bad("JSON: twice", behind_zero('"oomb": {"top_k": 1, "top_k": 2}}'), ("'top_k' stands twice",)),
    Bad("JSON: misspelt", behind_zero('"oombb": {}}'), ("'oombb'", "Did you mean 'oomb'")),
    Bad("JSON: broken", behind_zero('"oomb": {'), ("ds.json", "JSON")),
    Bad("JSON: a list", deepspeed(f"[{{{ZERO}}}]"), ("one mapping", "list")),
    Bad("JSON: wrong type", behind_zero('"oomb": {"chunk_tokens": "x"}}'), ("chunk_tokens='x'",)),
    Bad("JSON: NaN", behind_zero('"oomb": {"device_pages_gib": NaN}}'), ("device_pages_gib=nan",)),
    Bad("JSON: wrong encoding", deepspeed(("{" + ZERO + ', "a": "\xfc"}').encode("latin1")), ("ds.json", "0xfc")),
    Bad("JSON: nested deeply", behind_zero('"a": ' + "[" * 50_000), ("ds.json", "nested")),
    Bad("JSON: digits without end", behind_zero('"a": ' + "9" * 5000 + "}"), ("ds.json",)),
]


@pytest.mark.parametrize("case", [*RECIPES, *FLAGS, *PRESETS], ids=lambda case: case.name)
def test_refused(case: Bad, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # oomb run writes to it
    check(case, place, capsys)
    assert not Path("/tmp/oomb_ran").exists()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OOMB_CHUNK_TOKEN", "64", ("OOMB_CHUNK_TOKEN", "OOMB_CHUNK_TOKENS")),
        ("OOMB_CHUNK_TOKENS", "many", ("OOMB_CHUNK_TOKENS", "many")),
        ("OOMB_CHUNK_TOKENS", "", ("OOMB_CHUNK_TOKENS", "''")),
        ("OOMB_CHUNK_TOKENS", "9" * 5000, ("OOMB_CHUNK_TOKENS",)),
        ("OOMB_CHUNK_TOKENS", "128", ("OOMB_CHUNK_TOKENS", "chunk_tokens=64")),
        ("OOMB_TOP_K", "7", ("top_k=7", "attention='sparse'")),
        ("OOMB_CONFIG", "nowhere.yaml", ("nowhere.yaml", "chunk_tokens: 8192")),
        ("OOMB_CACHE", "/proc/cache", ("/proc/cache", "data_cache")),
        ("WORLD_SIZE", "two", ("WORLD_SIZE", "'two'")),
    ],
)  # fmt: skip
def test_environment(
    name: str,
    value: str,
    says: tuple[str, ...],
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Bad(name, train("--oomb.enabled=true", "--dry_run"), says)
    if name == "OOMB_CHUNK_TOKENS" and value == "128":
        case = Bad(name, train("--oomb.chunk_tokens=64", "--dry_run"), says)
    monkeypatch.setenv(name, value)
    check(case, place, capsys)


@pytest.mark.parametrize("value", ["", "-1", "99", "GPU-nonsense", "0,0"])
def test_odd_visible_devices(
    value: str, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is refused for them where a CPU does."""
    from oomb_accel.cli import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert main(["env", "--json"]) == 0
    assert "versions" in json.loads(capsys.readouterr().out)
    assert main(["train", place.recipe(), "--dry_run"]) == 0
