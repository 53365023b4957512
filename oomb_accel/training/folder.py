"""The folder of one run: what is in it, and how files get there so that a kill never leaves half of one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from oomb_accel.memory_report import FILE as MEMORY
from oomb_accel.memory_report import check_lines, keep_lines
from oomb_accel.reading import Unreadable, json_object
from oomb_accel.training.progress_file import PROGRESS, check_whole, step_of
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.resolved import resolved_yaml
from oomb_accel.writing import CannotWriteError, saying

METRICS, RECIPE, SUMMARY = "metrics.jsonl", "config.yaml", "summary.json"
REPORTS = ("report_*.png", "report.html")
"""What `oomb report` makes."""
LOGS = "logs"
"""Folder of trackers that write files."""
LATEST = "latest"
RESULTS = ("adapter_*", "model*.safetensors", "model.safetensors.index.json")
PRODUCTS = (SUMMARY, METRICS, MEMORY, LOGS, *REPORTS, "checkpoint-*", *RESULTS, RECIPE)
"""What a run leaves and a replacing run removes; other files in the folder are not touched. In this order: first goes
what says that the run is done, last what says that there is a run."""
LEFTOVERS = ".saving-*"
"""What a run leaves that is killed while it saves or removes."""
PROBE = ".oomb-"
"""Prefix of folders that ranks make for a moment to see whether they can; no content."""


class RunFolder:
    """Nothing is written or removed before :meth:`start`, so a run that cannot begin leaves no trace.

    Args:
        recipe: its ``output_dir``, ``overwrite_output_dir``, ``resume_from_checkpoint`` and ``save_total_limit`` count.
        dry_run: nothing will be written: what is in the folder is no reason to refuse, but noted.

    Raises:
        ValueError: the folder holds something else, or cannot be written, or there is no such checkpoint.
    """

    def __init__(self, recipe: Recipe, *, dry_run: bool = False) -> None:
        self.path = Path(recipe.output_dir)
        self.last_saved: Path | None = None
        self.origins: dict[str, str] = {}
        """Place of each setting of the recurrence that somebody wrote down, for the resolved recipe."""
        self.refusal: str | None = None
        """In a dry run, why a run would be refused for what is in the folder."""
        self._recipe = recipe
        self._started = False
        if self.path.is_symlink() and not self.path.exists():
            raise ValueError(
                f"output_dir {str(self.path)!r} is a link to nothing.\n  It points to {str(self.path.readlink())!r}.\n"
                "  Set output_dir to a new folder, or remove the link."
            )
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"output_dir {str(self.path)!r} is a file.\n  Got a file.\n  Set output_dir to a new folder."
            )
        self._unlock: Callable[[], object] | None = None
        """Lets other runs have the folder, from when this one writes to it."""
        if self.path.is_dir() and not dry_run:
            self._take(fcntl.LOCK_SH)()  # ranks of one run look at the same time
        self.resume = self._checkpoint_to_resume()
        """The checkpoint that the run goes on from."""
        self.finished = self._summary_to_resume()
        """The summary of the run that is in the folder from its first step to its last, if it is to go on."""
        if self.resume is not None:
            check_whole(self.resume, self._complete())
        self._resume_step = -1 if self.resume is None else step_of(self.resume)
        self._goes_on = self.resume is not None and self.resume.parent.resolve() == self.path.resolve()
        if self._goes_on:
            for name in (METRICS, MEMORY):
                check_lines(self.path / name)
            self._check_later_checkpoints()
        elif self._content():
            try:
                self._check_replaceable()
            except ValueError as error:
                if not dry_run:
                    raise
                self.refusal = str(error)
        self.parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        """The folder itself, or the nearest one above it that exists."""
        try:
            with tempfile.TemporaryDirectory(prefix=PROBE, dir=self.parent):
                pass
        except OSError as error:
            raise ValueError(
                f"output_dir {str(self.path)!r} cannot be written.\n  {error}.\n"
                "  Set output_dir to a folder of your own."
            ) from None

    def start(self) -> None:
        """Make the folder, remove the run it replaces, or what of a run that goes on came after its checkpoint; save
        the resolved recipe. Later calls do nothing."""
        if self._started:
            return
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._unlock = self._take(fcntl.LOCK_EX)
            self._start()
        self._started = True

    def close(self) -> None:
        """Nothing more is written: another run may have the folder."""
        if self._unlock is not None:
            self._unlock()

    def _take(self, kind: int) -> Callable[[], object]:
        """Lock the folder itself; the kernel unlocks it when the process dies. File systems without locks go without.

        Returns: what gives it back.

        Raises:
            ValueError: another run has it.
        """
        handle = os.open(self.path, os.O_RDONLY)
        unlock = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            unlock()
            raise ValueError(
                f"Another run is writing to output_dir {str(self.path)!r}.\n  It is still going on.\n"
                "  Set another output_dir, or stop that run first."
            ) from None
        except OSError:
            pass
        return unlock

    def _start(self) -> None:
        patterns: tuple[str, ...] = (LEFTOVERS, *PRODUCTS)
        if self._goes_on:
            patterns = (LEFTOVERS, SUMMARY)
            for name in (METRICS, MEMORY):
                keep_lines(self.path / name, self._resume_step)
        for item in [*self._later_checkpoints(), *(item for pattern in patterns for item in self.path.glob(pattern))]:
            self._remove(item)
        text = resolved_yaml(self._recipe, self.origins)
        self._replace(RECIPE, lambda path: path.write_text(text, encoding="utf-8"))

    def log(self, row: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, in a single write: a kill behind it cannot lose it."""
        line = (json.dumps(row) + "\n").encode()
        with self.writing():
            handle = os.open(self.path / METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                if os.write(handle, line) < len(line):  # of what there was room for
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / METRICS))
            finally:
                os.close(handle)

    def log_again(self, row: dict[str, Any]) -> None:
        """:meth:`log` for a row of which nobody knows whether it, or a part of it, was written."""
        keep_lines(self.path / METRICS, row["step"] - 1)
        self.log(row)

    def temporary(self, name: str) -> Path:
        """Where the files of a save are written before they get their names."""
        return self.path / LEFTOVERS.replace("*", name)

    def publish_checkpoint(self, step: int) -> Path:
        """Give the temporary folder ``checkpoint-<step>`` its name: it is there whole or not at all. Afterwards the
        oldest checkpoints beyond ``save_total_limit`` are removed."""
        final = self.path / f"checkpoint-{step}"
        os.replace(self.temporary(final.name), final)
        self.last_saved = final
        limit = self._recipe.save_total_limit
        for old in self._checkpoints()[:-limit] if limit else []:
            self._remove(old)
        return final

    def publish_result(self) -> None:
        """Move the result into the folder. Weights come last: where they are, everything else is too.

        Raises:
            CannotWriteError: something could not be moved. It stays where it was written.
        """
        written = self.temporary("result")
        try:
            for item in sorted(written.iterdir(), key=lambda item: item.suffix == ".safetensors"):
                target = self.path / item.name
                if item.is_dir() or target.is_dir():
                    self._remove(target)  # a folder with something in it is not replaced by a rename
                os.replace(item, target)
            written.rmdir()
        except OSError as error:
            raise CannotWriteError(
                f"The result could not be moved into {str(self.path)!r}.\n  {error}.\n"
                f"  What is left of it is in {str(written)!r}: move that by hand before another run starts here."
            ) from error
        self.last_saved = self.path

    def save_summary(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2) + "\n"
        with self.writing():
            self._replace(SUMMARY, lambda path: path.write_text(text, encoding="utf-8"))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, something is written to the folder.

        Raises:
            CannotWriteError: the file system did not take it.
        """
        remedy = "Make room there, and go on with --resume; or set another output_dir."
        with saying(f"output_dir {str(self.path)!r}", self.path, remedy):
            yield

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        temporary = self.temporary(name)
        try:
            write(temporary)
            os.replace(temporary, self.path / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def refuse_another_run(self) -> None:
        """To be called when the run that is here turns out to be none that is finished: it was let pass until then.

        Raises:
            ValueError: it would be replaced without having been asked for.
        """
        if self.finished is not None and self.resume is None and not self._recipe.overwrite_output_dir:
            self._say_another_run()

    def _content(self) -> list[str]:
        """Names of what is in the folder, without what other ranks are trying out there and what a kill has left."""
        if not self.path.is_dir():
            return []
        passing = (PROBE, LEFTOVERS.removesuffix("*"))
        return sorted(item.name for item in self.path.iterdir() if not item.name.startswith(passing))

    def _remove(self, item: Path) -> None:
        """Remove a file or a folder, if it is there. A folder loses its name first, so that a kill leaves no part of
        it under that name."""
        if item.is_symlink() or item.is_file():
            item.unlink()
        elif item.is_dir():
            if not item.match(LEFTOVERS):
                nameless = self.temporary(f"old-{item.name}")
                shutil.rmtree(nameless, ignore_errors=True)
                os.replace(item, nameless)
                item = nameless
            shutil.rmtree(item)

    def _summary_to_resume(self) -> dict[str, Any] | None:
        there = (self.path / SUMMARY).is_file() and (self.path / RECIPE).is_file()
        if self._recipe.resume_from_checkpoint != LATEST or not there:
            return None
        try:
            return json_object(self.path / SUMMARY)
        except Unreadable as error:
            raise ValueError(
                f"{str(self.path / SUMMARY)!r} cannot be read, so nobody knows whether that run is done.\n  {error}\n"
                "  Remove that file: --resume then goes on from the latest checkpoint."
            ) from None

    def _checkpoint_to_resume(self) -> Path | None:
        wanted = self._recipe.resume_from_checkpoint
        if wanted is None:
            return None
        if wanted == LATEST:
            return self.latest()
        complete = self._complete()
        if not (Path(wanted) / PROGRESS).is_file():
            state = "is there, but holds no state of training" if Path(wanted).is_dir() else "is not a folder"
            there = ", ".join(str(path) for path in complete) or "none"
            raise ValueError(
                f"There is no checkpoint to go on from at {wanted!r}.\n  It {state}; in output_dir there is {there}.\n"
                "  Set resume_from_checkpoint: latest, or to a checkpoint-N folder with progress.json."
            )
        return Path(wanted)

    def latest(self) -> Path | None:
        """The latest checkpoint in the folder that a run can go on from."""
        complete = self._complete()
        return complete[-1] if complete else None

    def _complete(self) -> list[Path]:
        return [path for path in self._checkpoints() if (path / PROGRESS).is_file()]

    def _check_replaceable(self) -> None:
        if not (self.path / RECIPE).is_file():
            raise ValueError(
                f"output_dir {str(self.path)!r} holds files of something else.\n"
                f"  Got {', '.join(self._content()[:5])}.\n"
                "  Set output_dir to a new or empty folder."
            )
        # A run that was stopped before its first save has left nothing that could be lost; a job that is started
        # again and again with `latest` begins anew.
        worth = any(item for pattern in ("checkpoint-*", *RESULTS) for item in self.path.glob(pattern))
        begins_anew = self._recipe.resume_from_checkpoint == LATEST and not worth
        if not (self._recipe.overwrite_output_dir or begins_anew or self.finished is not None):
            self._say_another_run()

    def _say_another_run(self) -> NoReturn:
        raise ValueError(
            f"output_dir {str(self.path)!r} holds another run.\n  Found its {RECIPE}.\n"
            "  Set another output_dir, go on with --resume, "
            "or replace that run with --overwrite_output_dir."
        )

    def _check_later_checkpoints(self) -> None:
        later = self._later_checkpoints()
        if later and not self._recipe.overwrite_output_dir:
            raise ValueError(
                f"output_dir {str(self.path)!r} has checkpoints behind {str(self.resume)!r}.\n"
                f"  Found {', '.join(path.name for path in later)}.\n"
                "  Set resume_from_checkpoint: latest, another output_dir, or drop them with --overwrite_output_dir."
            )

    def _checkpoints(self) -> list[Path]:
        """Checkpoints in the order of their steps."""
        found = [path for path in self.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
        return sorted(found, key=_number)

    def _later_checkpoints(self) -> list[Path]:
        return [path for path in self._checkpoints() if self._goes_on and _number(path) > self._resume_step]


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))
