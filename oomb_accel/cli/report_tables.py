"""The tables of ``oomb report``, as rows of text: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomb_accel.cli.report_data import RunData
from oomb_accel.memory_report import gib

Table = list[list[str]]
"""Rows of cells; the first row has the heads."""

MOST_ROWS = 20
"""Steps in the table: the first, the last, and some between."""


def step_table(run: RunData) -> Table:
    """A row per step, or per every so manieth. Columns that say nothing in this run are left out."""
    moved = run.copied_by_step()
    heads = ["step", "loss", "grad norm", "tokens", "tokens/s", "MFU", "seconds", "GPU GiB", "host GiB, end"]
    heads += ["to GPU GiB", "to host GiB", "stall", "pages", "mass"]
    rows = []
    for row in spread(run.metrics, MOST_ROWS):
        copied = moved.get(row["step"], {"up": 0, "down": 0})
        rows.append(
            [
                f"{row['step']}",
                f"{row['loss']:.4f}",
                f"{row['grad_norm']:.3f}",
                f"{row['tokens']:,}",
                f"{row['tokens_per_second']:,.0f}",
                _cell(row, "mfu", ".1%"),
                f"{row['seconds']:.1f}",
                _cell(row, "peak_gpu_gib", ".1f"),
                f"{row['host_gib']:.1f}",
                _moved(copied["up"]) if moved else "-",
                _moved(copied["down"]) if moved else "-",
                _cell(row, "copy_stall", ".1%"),
                _cell(row, "pages_selected", ",.0f"),
                _cell(row, "selected_mass", ".3f"),
            ]
        )
    kept = [column for column in range(len(heads)) if any(cells[column] != "-" for cells in rows)]
    return [[cells[column] for column in kept] for cells in [heads, *rows]]


def run_table(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    """A row per run."""
    heads = ["run", "steps", "tokens", "first loss", "last loss", "tokens/s", "MFU", "GPU GiB", "host GiB"]
    table = [[*heads, "copied GiB", "waited s"], *(_run_row(run, name) for run, name in zip(runs, names, strict=True))]
    losses = [run.last_tokens_loss() for run in runs]
    if not any(losses):
        return table
    pairs = [["eval before", "eval after"], *(_pair(loss) for loss in losses)]
    return [[*cells[:5], *pair, *cells[5:]] for cells, pair in zip(table, pairs, strict=True)]


def _pair(loss: dict[str, Any] | None) -> list[str]:
    return ["-", "-"] if loss is None else [f"{loss[when]:.4f}" for when in ("before", "after")]


def _run_row(run: RunData, name: str) -> list[str]:
    rows, peaks, copied = run.metrics, run.peaks, run.copied()
    tokens, seconds = sum(row["tokens"] for row in rows), sum(row["seconds"] for row in rows)
    used = [(row["mfu"], row["seconds"]) for row in rows if row.get("mfu") is not None]
    mfu = sum(share * time for share, time in used) / sum(time for _, time in used) if used else None
    return [
        name,
        f"{len(rows)}" + ("" if run.summary else ", not done"),
        f"{tokens:,}",
        f"{rows[0]['loss']:.4f}" if rows else "-",
        f"{rows[-1]['loss']:.4f}" if rows else "-",
        f"{tokens / seconds:,.0f}" if seconds else "-",
        "-" if mfu is None else f"{mfu:.1%}",
        *(gib(peaks[tier].num_bytes) if tier in peaks else "-" for tier in ("allocated", "process")),
        gib(sum(copied.values())) if any(copied.values()) else "-",
        f"{run.waited():,.1f}" if any(copied.values()) else "-",
    ]


def difference_table(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    """Settings that are not the same in all runs; only the heads where there are none."""
    found = [run.settings() for run in runs]
    known = list(dict.fromkeys(name for settings in found for name in settings if name != "output_dir"))
    rows = [[name, *(_plain(settings, name) for settings in found)] for name in known]
    return [["setting", *names], *(row for row in rows if len(set(row[1:])) > 1)]


def spread(rows: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many rows, evenly, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]


def _moved(num_bytes: int) -> str:
    return gib(num_bytes) if num_bytes else "0"


def _cell(row: dict[str, Any], name: str, form: str) -> str:
    return "-" if row.get(name) is None else f"{row[name]:{form}}"


def _plain(settings: dict[str, Any], name: str) -> str:
    return "-" if name not in settings else "none" if settings[name] is None else str(settings[name])
