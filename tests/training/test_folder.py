"""The folder of a run: other processes beside it, folders in a result, and kills while something is removed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.training.folder import RunFolder
from oomb_accel.training.progress_file import PROGRESS
from tests.training.ranks_train import Settings, recipe_of


@pytest.fixture
def out(settings: Settings) -> Path:
    folder = Path(settings["output_dir"])
    folder.mkdir()
    return folder


def make_checkpoint(out: Path, step: int) -> Path:
    folder = out / f"checkpoint-{step}"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "weights").write_text("whole")
    values: dict[str, Any] = {
        "format": 1,
        "step": step,
        "documents_per_step": 1,
        "group": 1,
        "strategy": "",
        "num_processes": 1,
    }
    values |= {name: {} for name in ("identity", "summary", "recipe", "files")}
    (folder / PROGRESS).write_text(json.dumps(values))
    return folder


def kill_in_rmtree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill when the first file of a folder is gone."""

    def gut(folder: Path, **named: Any) -> None:
        if Path(folder).exists():
            (Path(folder) / "state" / "weights").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", gut)


def gutted(out: Path) -> list[str]:
    """Checkpoints that look complete and are not."""
    return [
        path.name
        for path in out.glob("checkpoint-*")
        if (path / PROGRESS).exists() and not (path / "state" / "weights").exists()
    ]


def test_the_probe_of_another_rank_is_no_content(settings: Settings, out: Path) -> None:
    (out / ".oomb-rank1").mkdir()
    RunFolder(recipe_of(settings))
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files of something else") as caught:
        RunFolder(recipe_of(settings))
    assert "Got thesis.txt.\n" in str(caught.value)


def test_folders_of_a_result_replace_older_ones(settings: Settings, out: Path) -> None:
    """As tokenizers with named chat templates have them."""
    folder = RunFolder(recipe_of(settings))
    for text in ("old", "new"):
        templates = folder.temporary("result") / "additional_chat_templates"
        templates.mkdir(parents=True)
        (templates / f"{text}.jinja").write_text(text)
        (folder.temporary("result") / "adapter_model.safetensors").write_text(text)
        folder.publish_result()
    assert [item.name for item in (out / "additional_chat_templates").iterdir()] == ["new.jinja"]
    assert (out / "adapter_model.safetensors").read_text() == "new"
    assert not list(out.glob(".*"))


def test_a_result_that_cannot_be_published_is_kept(
    settings: Settings, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(recipe_of(settings))
    written = folder.temporary("result")
    written.mkdir()
    (written / "adapter_model.safetensors").write_text("weights")

    def fail(*arguments: Any) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RuntimeError, match="stale file handle") as caught:
        folder.publish_result()
    assert str(written) in str(caught.value)
    assert (written / "adapter_model.safetensors").read_text() == "weights"


def test_a_kill_while_old_checkpoints_are_removed(
    settings: Settings, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(recipe_of(settings | {"save_total_limit": 1}))
    make_checkpoint(out, 2)
    make_checkpoint(out, 4).rename(folder.temporary("checkpoint-4"))
    with monkeypatch.context() as patch:
        kill_in_rmtree(patch)
        with pytest.raises(KeyboardInterrupt):
            folder.publish_checkpoint(4)
    assert not gutted(out)
    (out / "config.yaml").write_text("")
    again = RunFolder(recipe_of(settings | {"resume_from_checkpoint": "latest"}))
    assert again.resume == out / "checkpoint-4"
    again.start()
    assert not list(out.glob(".*"))


def test_a_kill_while_a_run_is_replaced(settings: Settings, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        make_checkpoint(out, step)
    for name in ("config.yaml", "summary.json"):
        (out / name).write_text("{}")
    folder = RunFolder(recipe_of(settings | {"overwrite_output_dir": True}))
    with monkeypatch.context() as patch:
        kill_in_rmtree(patch)
        with pytest.raises(KeyboardInterrupt):
            folder.start()
    folder.close()  # as the end of the process does
    assert not gutted(out)
    # Nothing says that the run is finished, and it is still known to be one.
    assert not (out / "summary.json").exists() and (out / "config.yaml").exists()
    RunFolder(recipe_of(settings | {"overwrite_output_dir": True})).start()
    assert [item.name for item in out.iterdir()] == ["config.yaml"]


def test_two_runs_do_not_write_to_one_folder(settings: Settings, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes later; ranks of one run look at the same time, and a run that is over lets go."""
    recipe = recipe_of(settings | {"overwrite_output_dir": True})
    first, rank, late = RunFolder(recipe), RunFolder(recipe), RunFolder(recipe)
    first.start()
    words = r"Another run is writing to output_dir .*\n.*\n.*another output_dir"
    with pytest.raises(ValueError, match=words):
        late.start()
    with pytest.raises(ValueError, match=words):
        RunFolder(recipe)
    RunFolder(recipe, dry_run=True)
    first.close()
    late.start()
    late.close()
    rank.close()

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for _ in range(2):
        RunFolder(recipe).start()
