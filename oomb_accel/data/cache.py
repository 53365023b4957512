"""A cache of folders that are built once: whole or not there, whoever is killed and however many build at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from oomb_accel.data.store import is_whole
from oomb_accel.sources import CACHE_VARIABLE
from oomb_accel.spelling import called
from oomb_accel.writing import is_full

WAIT_S = 2 * 3600.0
"""Longest wait for another process that builds the same."""

HEAD_START_S = 2.0
"""So much later than the first process of a machine the others try to build themselves."""


def cached(root: Path, key: str, build: Callable[[Path], None], *, wait_s: float = WAIT_S) -> Path:
    """The folder of a key, built if it is not there.

    One process builds, holding a lock that the kernel takes from it when it dies; the others wait. A build happens in
    a folder of its own that gets its name at the end, so what has the name is whole.

    Args:
        root: folder of the cache.
        key: names what is built, with everything that it depends on.
        build: fills an empty folder.
        wait_s: longest wait for somebody else's build.

    Raises:
        ValueError: the cache cannot be written, or is full.
        RuntimeError: somebody else builds for too long.
    """
    final = root / key
    if is_whole(final):
        return final
    with _says_where(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f"{key}.lock").open("w")
    with lock, _says_where(root):
        if not _wait(lock.fileno(), final, wait_s):
            return final
        _remove_leftovers(root, key)
        folder = root / f"{key}.part-{os.getpid()}"  # others may use a shared cache, as far as the umask lets them
        folder.mkdir()
        try:
            build(folder)
            folder.rename(final)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return final


def _wait(lock: int, final: Path, wait_s: float) -> bool:
    """True with the lock held, when there is something to build; False when somebody else has built it."""
    started = time.monotonic()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The first process of each machine builds, and shows how far it is; any other one only if that one fails.
        while time.monotonic() - started < HEAD_START_S and not is_whole(final):
            time.sleep(0.1)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not is_whole(final)
        except BlockingIOError:
            if is_whole(final):
                return False
        if time.monotonic() - started > wait_s:
            raise RuntimeError(
                "Another process has been tokenising the same data for too long.\n"
                f"  Waited {wait_s:.0f} s for {str(final)!r}.\n"
                "  Run `oomb data RECIPE.yaml` once before training, or set "
                f"{called('data_cache')} to a folder of its own."
            )
        time.sleep(0.2)


def _remove_leftovers(root: Path, key: str) -> None:
    """Under the lock: what killed builds left, and a result that something was cut off from."""
    for path in root.glob(f"{key}.part-*"):
        shutil.rmtree(path, ignore_errors=True)
    if (root / key).exists():
        shutil.rmtree(root / key)


@contextmanager
def _says_where(root: Path) -> Iterator[None]:
    """Errors of the file system, as far as they are about the cache."""
    try:
        yield
    except OSError as error:
        place = str(getattr(error, "filename", None) or root)
        if not place.startswith(str(root)):
            raise
        what = "is full" if is_full(error, root) else "cannot be written"
        places = " or ".join(dict.fromkeys([called("data_cache"), CACHE_VARIABLE]))
        raise ValueError(
            f"The cache of token ids {what}.\n  {error} (in {str(root)!r}).\n"
            f"  Set {places} to a folder with room, for example {CACHE_VARIABLE}=/tmp/oomb."
        ) from None
