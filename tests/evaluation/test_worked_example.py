"""The worked example at tiny size: the commands of docs/worked_example.md, in one process."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from oomb_accel.cli import main
from tests.harness.folders import save_tiny_model
from tests.training.conftest import fresh_accelerate  # noqa: F401  # used by every test here

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 1200


def prepare(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    script = str(ROOT / "launch" / "prepare_facts.py")
    monkeypatch.setattr("sys.argv", [script, *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    if end.value.code != 0:
        raise RuntimeError(end.value.code)


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path / "model", "llama", max_position_embeddings=2048)
    text = tmp_path / "document.txt"
    text.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(1000, 1200)))
    facts = tmp_path / "facts"
    sizes = ["--tokens", TOKENS, "--documents", 2, "--held_out", 1]
    prepare(monkeypatch, facts, "--model", model, "--text", text, *sizes)
    rows = [json.loads(line) for line in (facts / "training.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and len((facts / "held_out_0.txt").read_text()) == TOKENS
    for row in rows:  # four answers of a space and six digits; cut to its last quarter, a document has no fact
        assert sum(label != -100 for label in row["labels"]) == 28
        said = bytes(row["input_ids"][TOKENS * 3 // 4 + 64 : TOKENS])
        assert len(row["input_ids"]) > TOKENS + 4 * 40 and b"pass code" not in said
    for name, more in (("whole", []), ("truncated", ["--max_length", "256", "--truncation", "end"])):
        arguments = ["--model_name_or_path", str(model), "--data_path", str(facts / "training.jsonl")]
        arguments += ["--output_dir", str(facts / name), *more]
        assert main(["train", str(ROOT / "configs" / "worked_example.yaml"), *arguments]) == 0
        summary = json.loads((facts / name / "summary.json").read_text())
        assert summary["steps"] == 2 and summary["trained_tokens"] == 56
    arguments = [str(model), "--adapter", str(facts / "whole"), "--data", str(facts / "held_out_0.txt")]
    arguments += ["--parts", "facts", "--tokens", str(TOKENS), "--depths", "5,75", "--contexts", "256,all"]
    assert main(["eval", *arguments, "--json", str(facts / "whole.json")]) == 0
    report = json.loads((facts / "whole.json").read_text())
    assert [row["in_context"] for row in report["facts"]] == [False, False, True, True] * 2


def test_a_text_that_is_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "text.txt").write_text("short. " * 300)
    with pytest.raises(RuntimeError, match=r"(?s)too short.*2,100 tokens, 10 documents of 1,024.*--tokens 210"):
        prepare(monkeypatch, tmp_path / "facts", "--model", model, "--text", tmp_path / "text.txt")
    assert not (tmp_path / "facts").exists()
