"""What a run has left in its folder, read for a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oomb_accel.memory_report import FILE as MEMORY
from oomb_accel.memory_report import Line, Peak, peaks_of
from oomb_accel.reading import Unreadable, file_text, in_a_line, json_object, shown, yaml_value

METRICS, SUMMARY, CONFIG = "metrics.jsonl", "summary.json", "config.yaml"
_OF_STEPS = ("step", "loss", "grad_norm", "tokens", "tokens_per_second", "seconds", "host_gib")


@dataclass(frozen=True, slots=True)
class RunData:
    """Files of one run. Whatever is missing is empty."""

    folder: Path
    metrics: list[dict[str, Any]]
    """A row per step."""
    memory: list[Line]
    """Samples in the order of time; see `oomb_accel.memory_report`."""
    summary: dict[str, Any]

    @property
    def peaks(self) -> dict[str, Peak]:
        """Of every tier. Samples may have been left out of the file, but not of the summary."""
        said = {name: Peak(**values) for name, values in self.summary.get("memory_peaks", {}).items()}
        found = peaks_of(self.memory)
        return found | {
            name: peak for name, peak in said.items() if name not in found or peak.num_bytes > found[name].num_bytes
        }

    def copied_by_step(self) -> dict[int, dict[str, int]]:
        """Bytes of pages copied up and down by each step; nothing where none were."""
        moved: dict[int, dict[str, int]] = {}
        before = {"up": 0, "down": 0}
        for line in self.memory:
            now = line["copied"]
            if any(now[way] < before[way] for way in now):  # a run that went on counts anew
                before = {"up": 0, "down": 0}
            sums = moved.setdefault(line["step"], {"up": 0, "down": 0})
            for way in sums:
                sums[way] += now[way] - before[way]
            before = now
        return moved if any(any(sums.values()) for sums in moved.values()) else {}

    def copied(self) -> dict[str, int]:
        """Bytes of pages copied up and down by all steps."""
        steps = self.copied_by_step().values()
        return {way: sum(sums[way] for sums in steps) for way in ("up", "down")}

    def waited(self) -> float:
        """Seconds that the device stood still for copies, in all steps."""
        total = before = 0.0
        for line in self.memory:
            now = float(line.get("waited", 0.0))
            total += now - before if now >= before else now  # a run that went on counts anew
            before = now
        return total

    def settings(self) -> dict[str, Any]:
        """Those of the run, the recurrence's as ``oomb.NAME``; nothing where it was not `oomb train`."""
        path = self.folder / CONFIG
        try:
            loaded = yaml_value(file_text(path)) if path.is_file() else None
        except Unreadable as error:
            raise ValueError(f"{path} cannot be read.\n  {error}\n  Remove it: the report goes without it.") from None
        values = loaded if isinstance(loaded, dict) else {}
        block = values.pop("oomb", None)
        block = block if isinstance(block, dict) else {}
        return values | {f"oomb.{name}": value for name, value in block.items()}

    def last_tokens_loss(self) -> dict[str, Any] | None:
        """Loss on the last tokens of the first document, ``"before"`` and ``"after"`` the run, and how many
        ``"tokens"`` that were, where it is known; None where it was not asked for."""
        found = {when: self.summary.get(f"last_tokens_loss_{when}") for when in ("before", "after")}
        if not all(isinstance(value, (int, float)) for value in found.values()):
            return None
        return {"tokens": self.settings().get("eval_last_tokens"), **found}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "folder": str(self.folder),
            "steps": self.metrics,
            "last_tokens_loss": self.last_tokens_loss(),
            "memory_peaks": {name: asdict(peak) for name, peak in self.peaks.items()},
            "copied": self.copied(),
            "waited_seconds": self.waited(),
            "copied_by_step": self.copied_by_step(),
            "summary": self.summary,
        }


def read_run(folder: Path) -> RunData:
    """Read what there is. A line that was cut short by a kill is left out.

    Raises:
        ValueError: there is no such folder, or nothing of a run in it.
    """
    if not folder.is_dir():
        raise ValueError(
            f"There is no folder {str(folder)!r}.\n  Got {'a file' if folder.exists() else 'nothing'} there.\n"
            "  Give the output_dir of a run."
        )
    metrics, memory = _lines(folder / METRICS, _OF_STEPS), _lines(folder / MEMORY, ("step",))
    if not metrics and not memory:
        found = ", ".join(sorted(item.name for item in folder.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"There is no run in {str(folder)!r}: neither {METRICS} nor {MEMORY}.\n  Found {found}.\n"
            "  Give the output_dir of a run whose first step is done."
        )
    run = RunData(folder, metrics, memory, _summary(folder / SUMMARY))
    _check_peaks(run)
    return run


def _summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json_object(path)
    except Unreadable as error:
        raise ValueError(f"{path} cannot be read.\n  {error}\n  Remove it: the report goes without it.") from None


def _check_peaks(run: RunData) -> None:
    try:
        found = run.peaks
    except (TypeError, AttributeError, ValueError):
        found = None
    if found is None:
        raise ValueError(
            f"{run.folder / SUMMARY} or {MEMORY} beside it is not what oomb train writes.\n"
            f"  Got memory_peaks {shown(run.summary.get('memory_peaks'))}.\n"
            "  Remove the file: the report goes without it."
        )


def names_of(runs: Sequence[RunData]) -> list[str]:
    """A short name for each run: the last part of its folder, or all of it where others have the same."""
    short = [run.folder.absolute().name for run in runs]
    return [name if short.count(name) == 1 else str(run.folder) for name, run in zip(short, runs, strict=True)]


def _lines(path: Path, numbers: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a file, each with these fields as numbers."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            row = json.loads(line)
            wrong = next((name for name in numbers if not isinstance(row[name], (int, float))), None)
        except (ValueError, TypeError, RecursionError) as error:
            raise _not_ours(path, number, str(error)) from None
        except KeyError as error:
            raise _not_ours(path, number, f"it has no {error}") from None
        if wrong is not None:
            raise _not_ours(path, number, f"its {wrong} is {shown(row[wrong])}")
        rows.append(row)
    return rows


def _not_ours(path: Path, number: int, why: str) -> ValueError:
    return ValueError(
        f"{path} line {number} is not what oomb train writes.\n  {in_a_line(why)}.\n  Remove that line, or the file."
    )
