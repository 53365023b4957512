"""``oomb report FOLDER``: what a run did, as a table and as plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomb_accel.cli.options import Parser
from oomb_accel.cli.report_data import RunData, read_run
from oomb_accel.memory_report import gib, peak_table

MOST_ROWS = 20
"""Steps in the table: the first, the last, and some between."""


def main(arguments: Sequence[str]) -> int:
    """Print a table, and draw what there are figures for.

    Returns: 0.

    Raises:
        ValueError: the folder is not that of a run, there is no such step, or plots are wanted and cannot be drawn.
    """
    options = _parser().parse_args(arguments)
    run = read_run(Path(options.folder))
    if options.json:
        print(json.dumps(run.as_dict(), indent=2))
        return 0
    print(report_text(run))
    if not options.no_plots:
        out = run.folder if options.out is None else Path(options.out)
        for path in _draw(run, out, options.step):
            print(f"drawn {path}")
    return 0


def report_text(run: RunData) -> str:
    """The report as text."""
    parts = [_head(run)]
    if run.metrics:
        parts.append(_step_table(run))
    if run.peaks:
        parts.append(peak_table(run.peaks, run.copied()))
    return "\n\n".join(parts)


def _draw(run: RunData, folder: Path, step: int | None) -> list[Path]:
    """Draw into a folder. Returns the files.

    Raises:
        ValueError: matplotlib is not installed, there is no such folder, or no such step.
    """
    try:
        from oomb_accel.cli.report_plots import draw_all  # an extra, and slow to import
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise ValueError(
            "The plots cannot be drawn: matplotlib is not installed.\n"
            "  The table above is all of the report without it.\n"
            "  Install it with pip install 'oomb_accel[report]', or use --no_plots."
        ) from None
    if not folder.is_dir():
        raise ValueError(f"There is no folder for the plots.\n  Got {folder}.\n  Make it, or leave --out out.")
    return draw_all(run, folder, step)


def _head(run: RunData) -> str:
    tokens = sum(row["tokens"] for row in run.metrics)
    seconds = sum(row["seconds"] for row in run.metrics)
    end = "done" if run.summary else "not done, or stopped"
    lines = [f"{run.folder}: {len(run.metrics)} steps, {tokens:,} tokens, {end}"]
    if seconds:
        losses = [row["loss"] for row in run.metrics]
        lines.append(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {tokens / seconds:,.0f} tokens/s")
    return "\n".join(lines)


def _step_table(run: RunData) -> str:
    """A row per step, or per every so manieth."""
    moved = run.copied_by_step()
    heads = ["step", "loss", "grad norm", "tokens", "tokens/s", "seconds", "GPU GiB", "host GiB"]
    if moved:
        heads += ["to GPU GiB", "to host GiB"]
    rows = [heads]
    for row in _spread(run.metrics, MOST_ROWS):
        gpu = row.get("peak_gpu_gib")
        cells = [
            f"{row['step']}",
            f"{row['loss']:.4f}",
            f"{row['grad_norm']:.3f}",
            f"{row['tokens']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['seconds']:.1f}",
            "-" if gpu is None else f"{gpu:.1f}",
            f"{row['host_gib']:.1f}",
        ]
        if moved:
            copied = moved.get(row["step"], {"up": 0, "down": 0})
            cells += [gib(copied["up"]), gib(copied["down"])]
        rows.append(cells)
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(heads))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) for cells in rows)


def _spread(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many rows, evenly, the first and the last among them."""
    if len(rows) <= most:
        return rows
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]


def _parser() -> Parser:
    parser = Parser(
        prog="oomb report",
        description="What a run of oomb train did: loss, speed and memory as a table, and plots as report_*.png. A "
        "folder with memory.jsonl alone will do, as the Python API writes it.",
    )
    parser.add_argument("folder", help="output_dir of the run")
    parser.add_argument("--out", help="folder for the plots; that of the run if left out")
    parser.add_argument(
        "--step", type=int, help="whose memory is drawn; the one with most memory on the device if left out"
    )
    parser.add_argument("--no_plots", "--no-plots", action="store_true", help="the table only")
    parser.add_argument("--json", action="store_true", help="everything as JSON, sizes in bytes; no plots")
    return parser
