"""Going on from a checkpoint: the same run as without the stop, whatever stopped it; nothing else is accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from oomb_accel.cli import main
from oomb_accel.training import train
from oomb_accel.training.folder import RunFolder
from oomb_accel.training.progress_file import PROGRESS
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.harness.tolerance import assert_same_bits, assert_same_gradients
from tests.training.ranks_train import Settings, launched, recipe_of, train_and_die

NUM_STEPS = 7
CLOCKS = {
    "seconds",
    "tokens_per_second",
    "host_gib",
    "peak_gpu_gib",
    "pageable_gib",
    "waited_seconds",
    "copy_stall",
    "mfu",
}


@pytest.fixture
def rows(settings: Settings, tmp_path: Path) -> Settings:
    """Five documents, two epochs and a half, dropout, a learning rate that moves."""
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"row {n} " * (4 + 9 * n)}) for n in range(5)))
    return settings | {
        "data_path": str(data),
        "max_steps": NUM_STEPS,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "lora_dropout": 0.1,
        "save_steps": 2,
    }


def metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what a clock or the machine says."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCKS} for line in lines]


def adapter(folder: str | Path) -> dict[str, Any]:
    return load_file(Path(folder) / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def whole_run(rows: Settings, tmp_path: Path, kept: Path) -> Settings:
    """The same run without a stop: trained once, and a copy for each test."""
    data = kept / "rows.jsonl"
    uninterrupted = rows | {"data_path": str(data)}
    if not data.exists():
        shutil.copy(rows["data_path"], data)
        train(recipe_of(uninterrupted | {"output_dir": str(kept / "whole")}))
    shutil.copytree(kept / "whole", tmp_path / "whole")
    return uninterrupted | {"output_dir": str(tmp_path / "whole")}


@pytest.mark.parametrize("lora_r", [4, 0], ids=["lora", "full"])
def test_going_on_equals_never_stopping(rows: Settings, tmp_path: Path, lora_r: int) -> None:
    rows |= {"lora_r": lora_r, "lora_dropout": 0.1 if lora_r else 0.0}
    before = rows | {"output_dir": str(tmp_path / "whole")}
    train(recipe_of(before))
    after = rows | {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-4")}
    summary = train(recipe_of(after))
    assert metrics(after["output_dir"]) == metrics(before["output_dir"])[4:]
    name = "adapter_model.safetensors" if lora_r else "model.safetensors"
    ours, theirs = (load_file(Path(some["output_dir"]) / name) for some in (after, before))
    assert_same_bits(ours, theirs)
    whole_summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    for key in ("steps", "tokens", "trained_tokens", "first_loss", "last_loss", "waiting"):
        assert getattr(summary, key) == whole_summary[key], key
    assert summary.seconds > 0


@pytest.mark.parametrize(("place", "step", "left"), [("in step", 6, 4), ("in save", 4, 2), ("in state", 4, 2)])
def test_kill_9_and_go_on(
    rows: Settings, whole_run: Settings, tmp_path: Path, place: str, step: int, left: int
) -> None:
    out = Path(rows["output_dir"])
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train_and_die, rows, place, step, folder=tmp_path, ranks=1, environment=launched(None))
    assert {path.name for path in out.glob("checkpoint-*")} == {f"checkpoint-{n}" for n in range(2, left + 1, 2)}
    assert bool(list(out.glob(".saving-*"))) == (place != "in step")
    train(recipe_of(rows | {"resume_from_checkpoint": "latest"}))
    assert metrics(out) == metrics(whole_run["output_dir"])
    assert_same_bits(adapter(out), adapter(whole_run["output_dir"]))
    assert not list(out.glob(".*"))


def test_an_interrupt_saves_what_it_takes_to_go_on(
    rows: Settings, whole_run: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a step, behind its dropout."""
    from oomb_accel.training import step as step_module

    check, calls = step_module._check_finite, []

    def interrupt(run: Any, number: int, *rest: Any) -> None:
        calls.append(number)
        if number == 4 and len(calls) < 10:
            raise KeyboardInterrupt
        check(run, number, *rest)

    monkeypatch.setattr(step_module, "_check_finite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(recipe_of(rows))
    monkeypatch.setattr(step_module, "_check_finite", check)
    train(recipe_of(rows | {"resume_from_checkpoint": "latest"}))
    assert metrics(rows["output_dir"]) == metrics(whole_run["output_dir"])
    assert_same_bits(adapter(rows["output_dir"]), adapter(whole_run["output_dir"]))


@pytest.mark.parametrize("written", ["nothing", "a part", "all"])
def test_an_error_behind_a_step_loses_nothing_of_it(
    rows: Settings, whole_run: Settings, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """The step is done: its row, and the random generators behind it, belong to the checkpoint."""
    log = RunFolder.log

    def fail(folder: RunFolder, row: dict[str, Any]) -> None:
        if row["step"] != 3 or failed:
            return log(folder, row)
        failed.append(row)
        if written == "all":
            log(folder, row)
        elif written == "a part":
            with (folder.path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "ep')
        raise OSError("no space left")

    failed: list[dict[str, Any]] = []
    monkeypatch.setattr(RunFolder, "log", fail)
    with pytest.raises(OSError, match="no space"):
        train(recipe_of(rows))
    assert metrics(rows["output_dir"]) == metrics(whole_run["output_dir"])[:3]
    train(recipe_of(rows | {"resume_from_checkpoint": "latest"}))
    assert metrics(rows["output_dir"]) == metrics(whole_run["output_dir"])
    assert_same_bits(adapter(rows["output_dir"]), adapter(whole_run["output_dir"]))


@pytest.mark.parametrize("save_steps", [2, 0])
def test_a_finished_run_is_not_trained_again(
    rows: Settings, write_recipe: Any, capsys: pytest.CaptureFixture[str], save_steps: int
) -> None:
    """Also without a checkpoint; but another number of steps, or other data, is another run."""
    out = Path(rows["output_dir"])
    rows |= {"save_steps": save_steps, "max_steps": 3}
    done = train(recipe_of(rows))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert main(["train", str(write_recipe(rows)), "--resume_from_checkpoint", "latest"]) == 0
    printed = capsys.readouterr().out
    assert "is done: 3 of 3 steps" in printed and "step 3/3" not in printed.split("is done")[1]
    assert train(recipe_of(rows | {"resume_from_checkpoint": "latest"})) == done
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    again = rows | {"resume_from_checkpoint": "latest"}
    if save_steps:
        assert train(recipe_of(again | {"max_steps": 4})).steps == 4
        return
    Path(rows["data_path"]).write_text('{"text": "something else"}')
    for changes in ({"max_steps": 4}, {}):
        with pytest.raises(ValueError, match="holds another run"):
            train(recipe_of(again | changes))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_other_chunks_and_other_micro_steps(rows: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither changes what a step computes."""
    rows |= {"lora_dropout": 0.0}
    whole = rows | {"output_dir": str(tmp_path / "whole")}
    train(recipe_of(whole))
    changes: Settings = {"oomb": {"chunk_tokens": 32, "page_tokens": 8}}
    changes |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    train(recipe_of(rows | changes | {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}))
    assert "goes on with oomb.chunk_tokens=32; it was 64" in capsys.readouterr().out
    assert_same_gradients(adapter(rows["output_dir"]), adapter(whole["output_dir"]))


def test_a_chain_of_restarts_needs_no_other_command(rows: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """``latest`` begins where there is nothing, goes on where there is something, and keeps the rows of metrics."""
    rows |= {"resume_from_checkpoint": "latest", "save_total_limit": 1}
    train(recipe_of(rows | {"max_steps": 3}))
    assert "there is no checkpoint" in capsys.readouterr().out
    train(recipe_of(rows))
    assert "goes on from" in capsys.readouterr().out
    out = Path(rows["output_dir"])
    assert [row["step"] for row in metrics(out)] == list(range(1, NUM_STEPS + 1))
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-7"]


def test_more_steps_than_a_finished_run_had(rows: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """Go on from its last step, which save_steps does not divide; nothing is done again."""
    rows |= {"max_steps": 3, "resume_from_checkpoint": "latest", "eval_last_tokens": 8, "save_total_limit": 2}
    out = Path(rows["output_dir"])
    train(recipe_of(rows))
    assert capsys.readouterr().out.count(f"saved {out / 'checkpoint-3'}") == 1
    train(recipe_of(rows | {"max_steps": 4}))
    printed = capsys.readouterr().out
    assert "behind step 3" in printed and "step 3/" not in printed
    assert printed.count("saved ") == 1
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}


def test_a_run_killed_before_its_first_save_begins_anew(rows: Settings, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train_and_die, rows, "in step", 2, folder=tmp_path, ranks=1, environment=launched(None))
    train(recipe_of(rows | {"resume_from_checkpoint": "latest", "max_steps": 3}))
    assert [row["step"] for row in metrics(rows["output_dir"])] == [1, 2, 3]


def test_frozen_weights_are_not_saved(whole_run: Settings) -> None:
    trained = load_file(Path(whole_run["output_dir"]) / "checkpoint-4" / "state" / "trained.safetensors")
    assert trained and all("lora" in name for name in trained)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_r": 8}, ["another adapter", "lora_r=4, this run lora_r=8", "Set lora_r: 4"]),
        ({"lora_target_modules": ["q_proj"]}, ["another adapter", "lora_target_modules"]),
        ({"lora_r": 0, "lora_dropout": 0.0}, ["another adapter"]),
        ({"data_path": "other"}, ["another data", "rows.jsonl"]),
        ({"model_name_or_path": "other"}, ["another model", "model_name_or_path: "]),
        ({"seed": 1}, ["another seed", "seed: 42"]),
        (
            {"oomb": {"chunk_tokens": 64, "page_tokens": 8, "attention": "sparse", "top_k": 2}},
            ["another oomb.attention", "Set oomb.attention: dense to go on", "oomb merge "],
        ),
        ({"gradient_accumulation_steps": 3}, ["2 documents per step, this run 3", "gradient_accumulation_steps: 2"]),
        ({"per_device_train_batch_size": 3}, ["that divide 2"]),
        ({"max_steps": 4}, ["nothing left to train", "step 4 of 4", "max_steps=6"]),
        ({"resume_from_checkpoint": "nowhere"}, ["is not a folder", "checkpoint-4"]),
        ({"resume_from_checkpoint": "adapter"}, ["holds no state"]),
        ({"resume_from_checkpoint": "checkpoint-2"}, ["checkpoints behind", "checkpoint-4, checkpoint-6"]),
        ({"resume_from_checkpoint": None}, ["holds another run", "--resume,"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    rows: Settings,
    tmp_path: Path,
    model_folder: Path,
    whole_run: Settings,
    changes: Settings,
    words: list[str],
) -> None:
    out = Path(whole_run["output_dir"])
    if changes.get("data_path"):
        changes = {"data_path": str(tmp_path / "other.jsonl")}
        Path(changes["data_path"]).write_text(Path(rows["data_path"]).read_text().replace("row 3", "ROW 3"))
    if changes.get("model_name_or_path"):
        changes = {"model_name_or_path": str(_with_other_weights(model_folder, tmp_path / "other_model"))}
    resume = changes.get("resume_from_checkpoint", "checkpoint-4")
    if resume == "checkpoint-4":
        shutil.rmtree(out / "checkpoint-6")
        shutil.rmtree(out / "checkpoint-7")
    if resume == "adapter":
        (out / "checkpoint-4" / PROGRESS).unlink()
        resume = "checkpoint-4"
    changes = {**changes, "resume_from_checkpoint": resume and str(out / resume)}
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(ValueError) as caught:
        train(recipe_of(whole_run | changes))
    for word in words:
        assert word in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_later_checkpoints_are_dropped_on_request(whole_run: Settings) -> None:
    out = Path(whole_run["output_dir"])
    wanted = metrics(out)
    again = {"resume_from_checkpoint": str(out / "checkpoint-2"), "overwrite_output_dir": True, "save_steps": 0}
    train(recipe_of(whole_run | again))
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2"}
    assert metrics(out) == wanted


def _with_other_weights(model: Path, folder: Path) -> Path:
    """The same architecture with one value changed: the name of the folder says nothing about that."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder)
    changed = AutoModelForCausalLM.from_pretrained(model)
    changed.model.norm.weight.data[3] += 0.5
    changed.save_pretrained(folder)
    return folder


def test_another_chunk_with_sparse_attention_is_no_small_change(
    rows: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"page_tokens": 8, "attention": "sparse", "top_k": 2}
    rows |= {"lora_dropout": 0.0, "max_steps": 3, "oomb": {**block, "chunk_tokens": 64}}
    train(recipe_of(rows | {"output_dir": str(tmp_path / "whole")}))
    assert "what a token sees" not in capsys.readouterr().out
    again = rows | {"oomb": {**block, "chunk_tokens": 32}}
    train(recipe_of(again | {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}))
    assert "also changes what a token sees" in capsys.readouterr().out
