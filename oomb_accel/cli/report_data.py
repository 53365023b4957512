"""What a run has left in its folder, read for a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from oomb_accel.memory_report import FILE as MEMORY
from oomb_accel.memory_report import Line, Peak, peaks_of

METRICS, SUMMARY, CONFIG = "metrics.jsonl", "summary.json", "config.yaml"


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
        loaded = yaml.safe_load(path.read_text("utf-8")) if path.is_file() else None
        values = loaded if isinstance(loaded, dict) else {}
        block = values.pop("oomb", None) or {}
        return values | {f"oomb.{name}": value for name, value in block.items()}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "folder": str(self.folder),
            "steps": self.metrics,
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
    metrics, memory = _lines(folder / METRICS), _lines(folder / MEMORY)
    if not metrics and not memory:
        found = ", ".join(sorted(item.name for item in folder.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"There is no run in {str(folder)!r}: neither {METRICS} nor {MEMORY}.\n  Found {found}.\n"
            "  Give the output_dir of a run whose first step is done."
        )
    summary = folder / SUMMARY
    return RunData(folder, metrics, memory, json.loads(summary.read_text("utf-8")) if summary.is_file() else {})


def names_of(runs: Sequence[RunData]) -> list[str]:
    """A short name for each run: the last part of its folder, or all of it where others have the same."""
    short = [run.folder.absolute().name for run in runs]
    return [name if short.count(name) == 1 else str(run.folder) for name, run in zip(short, runs, strict=True)]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    whole = (line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n"))
    return [json.loads(line) for line in whole]
