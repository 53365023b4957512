"""``oomb data``: what it says about a recipe and about paths."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast

from oomb_accel.cli import main
from oomb_accel.cli.data_report import visible

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    """A folder with all that the command needs: no weights."""
    folder = tmp_path / "model"
    LlamaConfig(vocab_size=512, max_position_embeddings=100).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        code = main(["data", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "a\x1b[2J " + "the fox " * 90}, {"role": "assistant", "content": "jumps"}]
    items = [{"messages": chat}, *({"prompt": "the fox", "completion": " jumps" * n} for n in range(1, 8))]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def test_text(run: Run, rows: str, model: str) -> None:
    code, out, _ = run(rows, "--model", model, "--train-on", "assistant")
    assert code == 0
    for words in (
        "documents  8",
        "lengths    min ",
        "as read and trained on",
        "the model's positions reach 100 tokens; 1 longer: ",
        "document 1: ",
        "... ",
        "<|im_start|>assistant\n[[jumps<|im_end|>]]",
        "a\\x1b[2J",
    ):
        assert words in out
    assert "\x1b" not in out
    shown = run(rows, "--model", model, "--show", "3")[1]
    assert "the fox[[ jumps jumps<|end|>]]" in shown
    assert shown == run("--model", model, rows, "--show", "3")[1]
    assert "document 1" not in run(rows, "--model", model, "--show", "0")[1]


def test_json(run: Run, rows: str, model: str) -> None:
    code, out, _ = run(rows, "--model", model, "--json", "--max_length=100", "--truncation", "drop", "--packing")
    found = json.loads(out)
    assert code == 0
    assert (found["read"]["documents"], found["used"]["documents"]) == (8, 1)
    assert found["read"]["tokens"] > found["used"]["tokens"] > found["targets"] > 0
    assert sum(count for *_, count in found["read"]["bins"]) == 8
    assert found["positions"] == 100 and found["too_long"] == []
    assert "dropped" in found["notes"][-2] and "packed 7 documents into 1" in found["notes"][-1]
    assert found["shown"]["runs"][0]["trained"] is False


def test_what_training_would_refuse(run: Run, rows: str, model: str) -> None:
    code, out, _ = run(rows, "--model", model, "--max_length", "100")
    assert code == 1
    assert "documents  8" in out and "oomb train would refuse this: " in out and "truncation to drop" in out


def test_a_recipe_and_what_stands_over_it(run: Run, rows: str, model: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: nothing\ndata_path: [{rows}, {rows}]\nlora_r: 4\n")
    code, out, _ = run(str(recipe), "--model", model, "--json")
    assert code == 0 and json.loads(out)["read"]["documents"] == 16
    code, out, _ = run(str(recipe), f"--model={model}", "--json", "--data_path", f"[{rows}]")
    assert code == 0 and json.loads(out)["data_path"] == [rows]


def test_colour(run: Run, rows: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomb_accel.cli.data._has_color", lambda: True)
    assert "\x1b[2mthe fox\x1b[0m\x1b[32m jumps<|end|>\x1b[0m" in run(rows, "--model", model, "--show", "2")[1]


def test_several_paths(run: Run, rows: str, model: str) -> None:
    assert json.loads(run(rows, rows, "--model", model, "--json")[1])["read"]["documents"] == 16


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "give a recipe, or a path"),
        (["--json"], 2, "give a recipe, or a path"),
        (["ROWS"], 2, "The tokenizer for"),
        (["ROWS", "--model", "MODEL", "--show", "9"], 2, "There is no document 9"),
        (["ROWS", "--model", "MODEL", "--max_lenght", "9"], 2, "Did you mean '--max_length'"),
        (["none.txt", "--model", "MODEL"], 2, "There is no data at 'none.txt'"),
        (["none.yaml"], 2, "cannot be read"),
        (["a.yaml", "b.txt"], 2, "One recipe at a time"),
    ],
)
def test_misuse(run: Run, rows: str, model: str, words: list[str], code: int, said: str) -> None:
    found, _, err = run(*({"ROWS": rows, "MODEL": model}.get(word, word) for word in words))
    assert found == code and said in err and "Traceback" not in err


def test_help(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0 and "usage: oomb data" in out


def test_control_characters_are_written_out() -> None:
    assert visible("a\tb\n\x07\x9b") == "a\tb\n\\x07\\x9b"
