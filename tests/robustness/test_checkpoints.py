"""Checkpoints that a run cannot go on from, and folders that it cannot write to."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.cli import main
from tests.robustness.bad_inputs import Bad, Place, check, refused, train

LATEST = "checkpoint-3"
FILES = [
    "progress.json",
    "state/trained.safetensors",
    "state/optimizer.bin",
    "state/random_states_0.pkl",
]
"""What it takes to go on. The adapter beside them is a result."""


def resume(spoil: Callable[[Path], object], **changes: Any) -> Callable[[Place], list[str]]:
    """``oomb train --resume`` in a copy of the finished run that something was done to."""

    def words(place: Place) -> list[str]:
        out = place.folder / "out"
        shutil.copytree(place.run / "out", out)
        (out / "summary.json").unlink()
        changed = {"data_path": str(place.run / "text.txt"), "max_steps": 4, "save_steps": 1, **changes}
        path = place.recipe(**changed)
        spoil(out)
        return ["train", path, "--resume"]

    return words


def cut(name: str, seed: int) -> Callable[[Path], object]:
    """Cut a file of the latest checkpoint off at a random byte."""

    def spoil(out: Path) -> None:
        content = (out / LATEST / name).read_bytes()
        (out / LATEST / name).write_bytes(content[: random.Random(seed).randrange(len(content))])

    return spoil


def swap_bytes(name: str) -> Callable[[Path], object]:
    """Other bytes, as many as before."""

    def spoil(out: Path) -> None:
        path = out / LATEST / name
        path.write_bytes(random.Random(1).randbytes(path.stat().st_size))

    return spoil


def remove(name: str) -> Callable[[Path], object]:
    return lambda out: (out / LATEST / name).unlink()


def progress(**changes: Any) -> Callable[[Path], object]:
    def spoil(out: Path) -> None:
        path = out / LATEST / "progress.json"
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))

    return spoil


def nothing(out: Path) -> None:
    pass


CHECKPOINTS = [
    *(Bad(f"cut off {name} {seed}", resume(cut(name, seed)), (LATEST,)) for name in FILES for seed in (1, 2)),
    *(Bad(f"no {name}", resume(remove(name)), (LATEST, name)) for name in FILES if name != "progress.json"),
    *(Bad(f"noise in {name}", resume(swap_bytes(name)), (LATEST,)) for name in FILES),
    Bad("of a newer version", resume(progress(format=999)), (LATEST, "999")),
    Bad("without a step", resume(progress(step=None)), (LATEST, "step")),
    Bad("a step that is text", resume(progress(step="three")), (LATEST, "'three'")),
    Bad("without an identity", resume(progress(identity=None)), (LATEST, "identity")),
    Bad("a summary that is text", resume(progress(summary="x")), (LATEST, "summary")),
    Bad("files outside", resume(progress(files={"../../../etc/passwd": 1})), (LATEST, "../../../etc/passwd")),
    Bad("of another adapter", resume(nothing, lora_r=8), ("lora_r=4", "Set lora_r: 4")),
    Bad("of another seed", resume(nothing, seed=7), ("seed 42", "seed: 42")),
    Bad("no such checkpoint", train("--resume", "nowhere"), ("'nowhere'", "resume_from_checkpoint")),
    Bad("a broken summary", resume(lambda out: (out / "summary.json").write_text("{")), ("summary.json",)),
    Bad("broken metrics", resume(lambda out: (out / "metrics.jsonl").write_text("{}\nx\n")), ("metrics.jsonl",)),
]


@pytest.mark.parametrize("case", CHECKPOINTS, ids=lambda case: case.name)
def test_resume_refused(
    case: Bad, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, place, capsys)


def test_the_remedy_for_a_broken_checkpoint(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """As the message says: remove it, and go on from the one before."""
    words = resume(cut("state/optimizer.bin", 1))(place)
    message = refused(words, 2, ("Remove", "checkpoint-2"), capsys)
    assert str(place.folder / "out" / LATEST) in message.splitlines()[-1]
    shutil.rmtree(place.folder / "out" / LATEST)
    assert main(words) == 0
    assert "goes on from" in capsys.readouterr().out


def file_there(place: Place) -> list[str]:
    return ["train", place.recipe(output_dir=place.write("out", "x"))]


def other_things(place: Place) -> list[str]:
    place.write("out/thesis.txt", "mine")
    return ["train", place.recipe()]


def dangling(place: Place) -> list[str]:
    (place.folder / "out").symlink_to(place.folder / "nowhere")
    return ["train", place.recipe()]


def below_a_file(place: Place) -> list[str]:
    return ["train", place.recipe(output_dir=place.write("a", "x") + "/out")]


OUTPUT = [
    Bad("a file", file_there, ("output_dir", "file")),
    Bad("below a file", below_a_file, ("output_dir",)),
    Bad("other content", other_things, ("thesis.txt", "new or empty folder")),
    Bad("another run", lambda place: ["train", place.recipe(output_dir=str(place.run / "out"))], ("another run",)),
    Bad("a link to nothing", dangling, ("output_dir", "link")),
    Bad("a file system that takes nothing", train(output_dir="/proc/oomb"), ("'/proc/oomb'", "cannot be written")),
    Bad("a folder that takes nothing", train(output_dir="/sys/kernel"), ("/sys/kernel",)),
]


@pytest.mark.parametrize("case", OUTPUT, ids=lambda case: case.name)
def test_output_refused(case: Bad, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    check(case, place, capsys)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Inside, every write beyond so many bytes of a file fails, whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 100, 3000, 20_000])
def test_a_disk_that_fills(place: Place, capsys: pytest.CaptureFixture[str], num_bytes: int) -> None:
    """The first save fails at real writes: in the row of metrics, in a config, in weights, in optimizer states."""
    path = place.recipe(max_steps=3, save_steps=1)
    assert main(["train", path, "--dry_run"]) == 0  # token ids are in the cache then
    with largest_file(num_bytes):
        message = refused(["train", path], 2, ("output_dir", "cannot be written"), capsys)
    assert str(place.folder / "out") in message and "--resume" in message
    out = place.folder / "out"
    assert not list(out.glob("checkpoint-*")) and not list(out.glob(".saving-*"))
    assert main(["train", path, "--resume"]) == 0


def test_a_full_disk_at_the_second_save(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one stays, and the run goes on from it."""
    from oomb_accel.training import checkpoint

    save, calls = checkpoint.save_file, []

    def full(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(tensors, path)

    path = place.recipe(max_steps=3, save_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        refused(["train", path], 2, ("No space left", "is full", "--resume"), capsys)
    assert [item.name for item in (place.folder / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert main(["train", path, "--resume"]) == 0
    assert "goes on from" in capsys.readouterr().out


def test_a_kill_while_the_first_file_is_written(place: Place) -> None:
    """The half of a config that is left does not keep the run from beginning again."""
    path = place.recipe()

    def stop(*_: Any) -> None:
        os._exit(1)

    child = os.fork()
    if child == 0:
        os.replace = stop  # type: ignore[assignment]
        main(["train", path])
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    left = [item.name for item in (place.folder / "out").iterdir()]
    assert left and all(name.startswith(".") for name in left)
    assert main(["train", path]) == 0
    assert not list((place.folder / "out").glob(".*"))
