"""The cache: built once, by one process at a time, and never half."""

import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from oomb_accel.data.cache import cached
from oomb_accel.data.load import read
from oomb_accel.data.settings import DataSettings
from oomb_accel.data.store import StoreWriter, TokenStore, is_whole

# Builds `sys.argv[1]`: says when it begins, takes its time, and leaves how often it was built. Before that it waits
# until `sys.argv[3]` processes have imported everything: how long that takes depends on what else the machine does.
BUILD = """
import os, sys, time
from pathlib import Path
import numpy as np
from oomb_accel.data.cache import cached
from oomb_accel.data.store import StoreWriter

def build(folder):
    with (Path(sys.argv[1]) / "builds").open("a") as file:
        file.write("x")
    writer = StoreWriter(folder)
    writer.add(np.arange(1000, dtype=np.uint32), [(0, 1000)])
    writer._tokens.flush()
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    writer.end_document(0, "")
    writer.close([])

ready = Path(sys.argv[1] + ".ready")
ready.mkdir(exist_ok=True)
(ready / str(os.getpid())).touch()
while len(list(ready.iterdir())) < int(sys.argv[3]):
    time.sleep(0.01)
print(cached(Path(sys.argv[1]), "key", build), flush=True)
"""


def start(root: Path, seconds: float, together: int = 1, **environment: str) -> "subprocess.Popen[str]":
    root.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, str(root), str(seconds), str(together)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)


def small(folder: Path) -> None:
    writer = StoreWriter(folder)
    writer.add(np.arange(10, dtype=np.uint32), [(2, 4)])
    writer.end_document(0, "")
    writer.close(["note"])


def test_a_killed_build_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    process = start(tmp_path, 60)
    assert process.stdout is not None and process.stdout.readline() == "building\n"
    (part,) = tmp_path.glob("key.part-*")
    assert (part / "tokens.bin").stat().st_size == 4000
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "key").exists()
    folder = cached(tmp_path, "key", small)  # at once: the lock died with its holder
    assert TokenStore(folder, ["text"]).tokens.tolist() == list(range(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["builds", "key", "key.lock"]


def test_two_processes_at_once_build_one_time(tmp_path: Path) -> None:
    """And the second process of a machine gives the first one a head start."""
    processes = [start(tmp_path, 1.0, together=3, LOCAL_RANK=rank) for rank in ("1", "0", "1")]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert (tmp_path / "builds").read_text() == "x"
    assert {output.splitlines()[-1] for output in outputs} == {str(tmp_path / "key")}
    assert [("building" in output) for output in outputs] == [False, True, False]
    assert is_whole(tmp_path / "key")


def test_waiting_has_an_end(tmp_path: Path) -> None:
    process = start(tmp_path, 60)
    assert process.stdout is not None and process.stdout.readline() == "building\n"
    with pytest.raises(RuntimeError, match=r"for too long.\n  Waited 0 s.*\n.*oomb data"):
        cached(tmp_path, "key", small, wait_s=0.3)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("what", ["tokens.bin", "offsets.npy", "spans.npy", "meta.json"])
def test_what_was_cut_off_is_built_again(tmp_path: Path, what: str) -> None:
    path = cached(tmp_path, "key", small) / what
    path.write_bytes(path.read_bytes()[:-3])
    assert not is_whole(tmp_path / "key")
    assert is_whole(cached(tmp_path, "key", small))


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        small(folder)
        raise ValueError("a wrong row")

    with pytest.raises(ValueError, match="a wrong row"):
        cached(tmp_path, "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_a_full_disk(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match=r"is full.\n.*No space left.*\n.*OOMB_CACHE=/tmp/oomb"):
        cached(tmp_path, "key", fill)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("oomb_accel.data.cache.fcntl.flock", refuse)
    with pytest.raises(ValueError, match=r"cannot be written.\n.*No locks available.*\n.*OOMB_CACHE"):
        cached(tmp_path, "key", small)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written.\n.*\n.*data_cache"):
        cached(tmp_path / "file" / "cache", "key", small)


def test_errors_of_the_data_are_not_blamed_on_the_cache(tmp_path: Path) -> None:
    def lose(folder: Path) -> None:
        (tmp_path / "data.txt").read_text()

    with pytest.raises(FileNotFoundError):
        cached(tmp_path / "cache", "key", lose)


def test_what_the_result_depends_on(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Content and settings, not the place; lengths and packing are applied behind the cache."""

    def folder(place: str = "a", content: str = "the fox", template: str = "x", **changes: Any) -> Path:
        path = tmp_path / place / "text.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        tokenizer.chat_template = template
        settings: dict[str, Any] = {"paths": (str(path),), "cache": str(tmp_path / "cache"), **changes}
        store = read(DataSettings(**settings), tokenizer)
        assert store.names == [str(path)]
        return store.folder

    before = tokenizer.chat_template
    try:
        first = folder()
        assert first == folder("b") == folder(max_length=2, truncation="split", packing=True)
        others = [folder(content="the dog"), folder(template="y"), folder(text_field="body"), folder(train_on="all")]
        assert len({first, *others}) == 5
    finally:
        tokenizer.chat_template = before


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert DataSettings(paths=(), cache="~/x").cache_folder() == Path.home() / "x"
    assert DataSettings(paths=(), cache="x").cache_folder() == Path.cwd() / "x"
    monkeypatch.setenv("OOMB_CACHE", str(tmp_path))
    assert DataSettings(paths=()).cache_folder() == tmp_path
    monkeypatch.delenv("OOMB_CACHE")
    assert DataSettings(paths=()).cache_folder() == Path.home() / ".cache" / "oomb_accel"


def test_a_waiting_thread_gets_the_result_as_soon_as_it_is_there(tmp_path: Path) -> None:
    def slowly(folder: Path) -> None:
        time.sleep(0.5)
        small(folder)

    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        both = [pool.submit(cached, tmp_path, "key", slowly) for _ in range(2)]
        assert {one.result() for one in both} == {tmp_path / "key"}
        assert time.monotonic() - started < 5
