"""``oomb eval`` as a user calls it: output, files, and every error in three parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from oomb_accel.cli import main
from tests.evaluation.conftest import SIZES, report_of
from tests.harness.folders import save_tiny_model
from tests.harness.models import tiny_model, with_lora

QUICK = ["--tokens", "420", "--depths", "20,80", "--contexts", "0,100,all", "--first_bucket", "64"]


def run(*arguments: object) -> int:
    sizes = [] if "--last_tokens" in arguments else SIZES  # no option stands twice
    return main(["eval", *sizes, *map(str, arguments)])


def test_tables_plots_and_json(
    tmp_path: Path, model_folder: Path, adapter_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    second = tmp_path / "second.txt"
    second.write_text(text.read_text()[150:])
    plots = tmp_path / "new" / "plots"
    arguments = [model_folder, "--adapter", adapter_folder, "--data", text, second, *QUICK, "--plot", plots]
    report = report_of(tmp_path, *arguments)
    captured = capsys.readouterr()
    for word in ("base loss", "adapter loss", "95 % interval", "tokens back", "adapter perplexity"):
        assert word in captured.out
    assert "\x1b" not in captured.out and "bootstrap over documents" in captured.out
    assert "* the fact is not in the context" in captured.out and "in the context" in captured.out
    assert captured.out.count("by document") == 2 and str(second) in captured.out
    assert [document["tokens"] for document in report["documents"]] == [420, 420]
    assert report["settings"]["attention"] == "dense" and report["dtype"] == "float32"
    assert {path.name for path in plots.glob("*.png")} == {
        f"eval_{part}.png" for part in ("context", "facts", "position")
    }
    again = report_of(tmp_path, *arguments[:-2])
    again["seconds"] = report["seconds"]
    assert again == report  # the seed decides


def test_context_lengths_that_nobody_asked_for_are_none_too_long(
    tmp_path: Path, model_folder: Path, text: Path
) -> None:
    report = report_of(tmp_path, model_folder, "--data", text, "--parts", "context", "--tokens", "540")
    assert [row["context"] for row in report["context"]] == [0, 508]


def test_a_folder_is_said_to_be_one_document(
    tmp_path: Path, model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And how to have its files one by one."""
    folder = tmp_path / "held"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(text.read_text()[:200])
    arguments = [model_folder, "--data", folder, "--parts", "position", "--first_bucket", "64"]
    report = report_of(tmp_path, *arguments)
    said = " ".join(capsys.readouterr().out.split())  # lines are folded, by the length of paths
    assert len(report["documents"]) == 1 and len(report["notes"]) == 1
    assert "held: one document of 2 files" in said and "--folder_as files makes each file a" in said
    report = report_of(tmp_path, *arguments, "--folder_as", "files")
    assert [Path(document["name"]).name for document in report["documents"]] == ["a.txt", "b.txt"]
    assert "2 files, each by itself" in " ".join(capsys.readouterr().out.split())


def test_a_part_alone(tmp_path: Path, model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, model_folder, "--data", text, "--parts", "position", "--first_bucket", "64")
    assert report["position"] and not report["facts"] and not report["context"] and report["adapter"] is None
    assert "model perplexity" in capsys.readouterr().out


def test_rope_of_the_adapters_run_is_used(
    tmp_path: Path, model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    folder = tmp_path / "run"
    with_lora(tiny_model("llama", vocab_size=260)).save_pretrained(str(folder))
    common = [model_folder, "--adapter", folder, "--data", text, "--parts", "position"]
    plain = report_of(tmp_path, *common)
    (folder / "config.yaml").write_text(yaml.safe_dump({"rope_parameters": rope}))
    scaled = report_of(tmp_path, *common)
    assert "from the adapter's run" in capsys.readouterr().out
    assert abs(scaled["position"][-1]["loss"] - plain["position"][-1]["loss"]) > 1e-3
    given = report_of(tmp_path, model_folder, *common[3:], "--rope_parameters", json.dumps(rope))
    base = [row["loss"] for row in scaled["position"] if row["variant"] == "base"]
    assert [row["loss"] for row in given["position"]] == pytest.approx(base, rel=1e-6)


@pytest.fixture
def places(tmp_path: Path, model_folder: Path, adapter_folder: Path, text: Path) -> dict[str, str]:
    """Names of good and broken things."""
    broken, other, half, prompt = (tmp_path / name for name in ("broken", "other", "half", "prompt"))
    for folder in (broken, half, prompt):
        folder.mkdir()
        for path in adapter_folder.iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
    (broken / "adapter_config.json").write_text("{")
    (half / "adapter_model.safetensors").unlink()
    config = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    (prompt / "adapter_config.json").write_text(json.dumps(config))
    with_lora(tiny_model("llama", vocab_size=260, hidden_size=32)).save_pretrained(str(other))
    names = with_lora(tiny_model("phi3", vocab_size=260), target_modules=["qkv_proj"])
    names.save_pretrained(str(tmp_path / "names"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "x"}))
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [1, 2, 999] * 20}))
    short = save_tiny_model(tmp_path / "short", "llama", max_position_embeddings=256)
    made = {"broken": broken, "other": other, "half": half, "prompt": prompt, "names": tmp_path / "names"}
    made |= {
        "T/r.json": text / "r.json",
        "M": model_folder,
        "A": adapter_folder,
        "T": text,
        "ids": tmp_path / "ids.jsonl",
        "short": short,
    }
    made |= {name: tmp_path / name for name in ("empty", "other.jsonl")}
    return {name: str(path) for name, path in made.items()}


ERRORS: list[tuple[str, tuple[str, ...]]] = [
    ("M --data nowhere.txt", ("There is no data at 'nowhere.txt'", "Set --data to")),
    ("M --data empty", ("holds no text", "Set --data to")),
    ("M --data other.jsonl", ("has no field to train on", "or set --text_field")),
    ("nowhere/at/all --data T", ("The model 'nowhere/at/all' cannot be loaded", "Set MODEL to")),
    (
        "M --data T --parts context --last_tokens 700",
        ("too short", "700 tokens", "--last_tokens 175"),
    ),
    ("M --data T --parts context --contexts 0,5000", ("No document is long enough", "5,000", "--contexts 0,668")),
    ("M --data T --contexts 0,half", ("--contexts", "'0,half'", "--contexts 0,4096,all")),
    ("M --data T --depths 5,200", ("--depths", "'5,200'", "--depths 5,50,95")),
    ("M --data T --parts context,fact", ("'fact'", "Did you mean 'facts'?")),
    ("M --data T --parts ,", ("names nothing",)),
    ("M --data T --tokens one", ("--tokens", "'one'", "whole number from 2")),
    ("M --data T --questions_per_pass 0", ("--questions_per_pass", "'0'", "from 1 on")),
    ("M --data T --tokens 900 --parts facts --depths 50", ("too short for planted facts", "--tokens")),
    ("M --data T --tokens 300 --parts facts", ("more than half of it", "--tokens")),
    ("M --data ids --parts position", ("a token that the model does not know", "Got id 999")),
    ("short --data T --parts position", ("longer than the range", "700 tokens", "--tokens 256,", "factor: 3.0")),
    (
        "short --data T --parts facts --tokens 300 --depths 50",
        ("longer than the range", "55 of", "--tokens 201,"),
    ),
    ("M --data T --rope_parameters yarn", ("must be a mapping", "'yarn'", "rope_type: yarn")),
    ("M --data T --adapter nowhere", ("holds no adapter", "adapter_config.json is missing", "no folder")),
    ("M --data T --adapter half", ("adapter_model.safetensors is missing",)),
    ("M --data T --adapter broken", ("is not a config of PEFT",)),
    ("M --data T --adapter other", ("belongs to another model", "shape", "Use the model")),
    ("M --data T --adapter names", ("belongs to another model", "qkv_proj", "that it was trained on")),
    ("M --data T --adapter prompt", ("a kind that is not supported", "PROMPT_TUNING", "Use LoRA")),
    ("M --data T --json T/r.json", ("The report cannot be written", "Not a directory", "Use --json r.json")),
    ("M --data T --plot T", ("The plots cannot be written", "Not a directory", "--plot .")),
    ("M --data T --top_k 4", ("top_k has no meaning with dense attention",)),
    ("M --data T --attention sparse --q_block 96", ("q_block", "96")),
]


@pytest.mark.parametrize(("line", "words"), ERRORS, ids=[line for line, _ in ERRORS])
def test_errors(line: str, words: tuple[str, ...], places: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*(places.get(word, word) for word in line.split())) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and captured.out == "", captured.err
    message = captured.err.split("oomb eval: ", 1)[1]
    assert 2 <= len(message.splitlines()) <= 4, message
    assert all(word in message for word in words), message
