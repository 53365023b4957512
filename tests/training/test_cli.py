"""The command line: commands, exit codes, messages."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oomb_accel import cli
from oomb_accel.cli import data, main, run, run_guarded, train

ROOT = Path(__file__).parents[2]


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [cli._usage(), train.USAGE, run.USAGE, data.USAGE], ids=["oomb", "train", "run", "data"]
)
def test_help_is_not_folded_again(text: str) -> None:
    """It would be folded in the middle of its columns."""
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_train_needs_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train"]) == 2
    assert "path of a recipe" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    error = capsys.readouterr().err
    assert "cannot be read" in error and "Traceback" not in error


def test_train_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for words in (
        "--lora_r: a whole number (default: 16)",
        "Rank of the LoRA adapters",
        "--oomb.chunk_tokens: a whole number or 'auto' (of tokens: 131072 or 128K) (default: 8192)",
    ):
        assert words in text


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["host"]["ram total GiB"] > 0
    backends = report["attention backends"]["cpu"]
    assert backends["torch"] == "yes"
    assert backends["cudnn"] != "yes"  # the reason why not
    assert report["install"]["kind"] in ("editable", "installed", "source tree")
    assert main(["env"]) == 0
    assert "ram total GiB" in capsys.readouterr().out
    assert main(["env", "--jsn"]) == 2


def test_debug_shows_where_a_users_error_comes_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (
        ["--debug", "train", str(tmp_path)],
        ["train", str(tmp_path), "--debug"],
        ["run", "--debug", "no.py"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "Traceback" in said and ("cannot be read" in said or "does not exist" in said)
    assert main(["run", "no.py", "--debug"]) == 2  # that one is for the script
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "NOWHERE"], "There is no folder"),
        (["estimate", "NOWHERE/config.json"], "There is no file"),
        (["verify", "NOWHERE/config.json"], "There is no file"),
        (["run", "NOWHERE.py"], "does not exist"),
        (["run", "--oomb.chunk_token", "8", "x.py"], "chunk_tokens"),
        (["train", "NOWHERE.yaml", "--json"], "cannot be read"),
        (["bench", "attentoin"], "attention"),
    ],
    ids=str,
)
def test_what_a_user_got_wrong_is_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("NOWHERE", str(tmp_path / "none")) for word in words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and not captured.out


def test_a_run_says_its_end_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    from oomb_accel.cli import run as command

    script = tmp_path / "script.py"
    script.write_text("print('the script')")
    monkeypatch.setattr(command, "_into_environment", lambda *_: None)
    monkeypatch.setattr(command, "_check_requested", lambda *_: False)
    monkeypatch.setattr("oomb_accel.integrations.unmodified.install_everywhere", lambda: lambda: 0)
    monkeypatch.setattr(command, "_run", lambda words: print("the script") or 0)
    assert main(["run", "--json", str(script)]) == 0
    assert capfd.readouterr().out.splitlines() == ["the script", '{"exit_code": 0, "steps_in_chunks": 0}']


def raise_foreign_error() -> int:
    return int("x")


def raise_out_of_memory() -> int:
    raise torch.OutOfMemoryError("tried to allocate 9 GiB")


def test_defects_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(raise_foreign_error, "oomb x") == 1
    assert "Traceback" in capsys.readouterr().err
    assert run_guarded(raise_out_of_memory, "oomb x") == 1
    error = capsys.readouterr().err
    assert "oomb.chunk_tokens" in error and "9 GiB" in error and "Traceback" not in error


@pytest.mark.parametrize("script", ["launch/finetune.py", "oomb_accel"])
def test_other_ways_to_start(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "none.yaml"] if script == "oomb_accel" else ["none.yaml"]
    monkeypatch.setattr(sys, "argv", [script, *words])
    start: Any = runpy.run_module if script == "oomb_accel" else runpy.run_path
    with pytest.raises(SystemExit) as caught:
        start(script if script == "oomb_accel" else str(ROOT / script), run_name="__main__")
    assert caught.value.code == 2
    assert "cannot be read" in capsys.readouterr().err


def test_one_of_several_processes_says_that_it_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> int:
        raise KeyboardInterrupt

    for rank, said in (("0", "oomb x: interrupted\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert run_guarded(stop, "oomb x") == 130
        assert capsys.readouterr().err == said
