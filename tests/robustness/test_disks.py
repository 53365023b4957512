"""Full and read-only file systems, real ones where they can be mounted, and the modes of what is written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.cli import main
from oomb_accel.writing import CannotWriteError, saying
from tests.robustness.bad_inputs import Place, refused


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a real disk that fills up takes the right to mount one; the tests with stand-ins below need none")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Leave so many bytes free."""
    path = disk / "filler"
    path.write_bytes(b"\1" * (shutil.disk_usage(disk).free - left))
    return path


@pytest.mark.parametrize("left", [2**16, 3 * 2**16, 2**18], ids=lambda left: f"{left >> 10}K")
@pytest.mark.parametrize("rank", [0, 4])
def test_a_disk_that_fills_up(
    rank: int, left: int, place: Place, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it happens: in metrics, a checkpoint's state, the adapter, the model or the tokenizer."""
    filler = fill(disk, left)
    path = place.recipe(output_dir=str(disk / "out"), max_steps=6, save_steps=1, lora_r=rank)
    refused(["train", path], 2, (f"output_dir {str(disk / 'out')!r} cannot be written: the disk is full.",), capsys)
    filler.unlink()
    assert main(["train", path, "--resume", "--save_total_limit=1"]) == 0


def fails_in_rust(*_: Any, **__: Any) -> None:
    raise Exception("No space left on device (os error 28)")


def test_a_disk_that_is_full_when_the_tokenizer_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fails_in_rust)
    refused(["train", place.recipe()], 2, ("output_dir", "cannot be written: the disk is full.", "--resume"), capsys)
    words = ["merge", str(place.run / "out"), "--output_dir", str(place.folder / "merged")]
    refused(words, 2, ("cannot be written: the disk is full.", "another folder"), capsys)
    assert not (place.folder / "merged").exists()


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError("384 requested and 96 written"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EROFS, "Read-only file system"), False),
        (Exception("Read-only file system (os error 30)"), False),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), False),
    ],
)
def test_what_is_said_of_it(error: Exception, full: bool, tmp_path: Path) -> None:
    with pytest.raises(CannotWriteError) as caught, saying("The file", tmp_path, "Use another."):
        raise error
    assert str(caught.value).startswith(f"The file cannot be written{': the disk is full' if full else ''}.\n  ")


def test_other_errors_are_not_the_disks(tmp_path: Path) -> None:
    with pytest.raises(KeyError), saying("The file", tmp_path, "Use another."):
        raise KeyError("x")


@pytest.mark.parametrize("command", ["report", "merge", "verify", "eval", "eval plots", "bench"])
def test_a_file_system_that_is_read_only(
    command: str, place: Place, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: command == "bench")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    text, json = place.write("text.txt", "some words " * 30), ["--json", str(disk / "a.json")]
    words = {
        "report": ["report", str(place.run / "out"), "--out", str(disk)],
        "merge": ["merge", str(place.run / "out"), "--output_dir", str(disk / "merged")],
        "verify": ["verify", str(place.model), *json],
        "eval": ["eval", str(place.model), "--data", text, *json],
        "eval plots": ["eval", str(place.model), "--data", text, "--plot", str(disk / "plots")],
        "bench": ["bench", "attention", *json],
    }
    refused(words[command], 2, ("cannot be written.", "Read-only file system", "folder of your own"), capsys)


@pytest.mark.parametrize("command", ["report", "verify"])
def test_a_report_for_which_there_is_no_room(
    command: str, place: Place, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(disk, 0)
    words = ["report", str(place.run / "out"), "--out", str(disk)]
    if command == "verify":
        words = ["verify", str(place.model), "--tokens", "40", "--chunk_tokens", "16", "--json", str(disk / "a.json")]
    message = refused(words, 2, ("cannot be written: the disk is full.", "No space left on device"), capsys)
    assert message.startswith(f"oomb {command}: The report")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002], ids=oct)
def test_modes_obey_the_umask(mask: int, place: Place) -> None:
    """Also of files that libraries write through temporary ones, for the owner only."""
    before = os.umask(mask)
    try:
        assert main(["train", place.recipe(max_steps=2, save_steps=1, data_cache=str(place.folder / "cache"))]) == 0
        assert main(["merge", str(place.folder / "out"), "--output_dir", str(place.folder / "merged")]) == 0
    finally:
        os.umask(before)
    found = [path for name in ("out", "merged", "cache") for path in (place.folder / name).rglob("*")]
    wrong = [(str(path), oct(path.stat().st_mode & 0o777)) for path in found
             if path.stat().st_mode & 0o777 != (0o777 if path.is_dir() else 0o666) & ~mask]  # fmt: skip
    assert len(found) > 10 and not wrong
