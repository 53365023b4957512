"""``oomb report FOLDER ...``: what a run did, as a table, as plots and as a page; several runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from oomb_accel.cli.options import Parser
from oomb_accel.cli.report_data import RunData, names_of, read_run
from oomb_accel.cli.report_file import check_plots
from oomb_accel.cli.report_page import FILE, page_of
from oomb_accel.cli.report_tables import difference_table, run_table, step_table
from oomb_accel.columns import aligned
from oomb_accel.memory_report import peak_table
from oomb_accel.writing import saying

_HEADINGS = {"training": "Loss and speed", "memory": "Memory and page traffic", "comparison": "Loss and speed"}


def main(arguments: Sequence[str]) -> int:
    """Print tables, draw what there are figures for, and write the page.

    Returns: 0.

    Raises:
        ValueError: a folder is not that of a run, there is no such step, or plots are wanted and cannot be drawn.
    """
    options = _parser().parse_args(arguments)
    runs = [read_run(Path(folder)) for folder in options.folders]
    if options.json:
        found = [run.as_dict() for run in runs]
        print(json.dumps(found[0] if len(runs) == 1 else {"runs": found}, indent=2))
        return 0
    print(report_text(runs[0]) if len(runs) == 1 else comparison_text(runs))
    if not options.no_plots:
        default = runs[0].folder if len(runs) == 1 else Path()
        for path in _draw(runs, default if options.out is None else Path(options.out), options.step):
            print(f"written {path}")
    return 0


def report_text(run: RunData) -> str:
    """The report of one run as text."""
    parts = [_head(run)]
    if run.metrics:
        parts.append(aligned(step_table(run), left=()))
    if run.peaks:
        parts.append(peak_table(run.peaks, run.copied(), run.waited()))
    return "\n\n".join(parts)


def comparison_text(runs: Sequence[RunData]) -> str:
    """Several runs as text."""
    names = names_of(runs)
    parts = [aligned(run_table(runs, names))]
    differences = difference_table(runs, names)
    if len(differences) > 1:
        parts.append("settings that differ:\n" + aligned(differences))
    return "\n\n".join(parts)


def _draw(runs: Sequence[RunData], folder: Path, step: int | None) -> list[Path]:
    """Draw into a folder, and write the page. Returns the files.

    Raises:
        ValueError: plots cannot be drawn or written there, or there is no such step.
        CannotWriteError: the file system did not take them.
    """
    check_plots(folder, "--out", "use --no_plots: the tables are all of the report without it")
    from oomb_accel.cli.report_plots import figures_of, save_png, svg_of  # an extra, and slow to import

    figures = figures_of(runs, step)
    plots = [(_HEADINGS[name], svg_of(figure, name)) for name, figure in figures.items()]
    with saying("The report", folder, "Use --out ., or a folder of your own."):
        folder.mkdir(parents=True, exist_ok=True)
        paths = save_png(figures, folder)
        paths.append(folder / FILE)
        paths[-1].write_text(_page(runs, plots), encoding="utf-8")
    return paths


def _page(runs: Sequence[RunData], plots: list[tuple[str, str]]) -> str:
    if len(runs) > 1:
        names = names_of(runs)
        differences = difference_table(runs, names)
        tables = [("Runs", run_table(runs, names))]
        tables += [("Settings that differ", differences)] if len(differences) > 1 else []
        return page_of(f"{len(runs)} runs", ", ".join(str(run.folder) for run in runs), {}, plots, tables)
    (run,) = runs
    first, *rest = _head(run).splitlines()
    texts = [("Peak memory", peak_table(run.peaks, run.copied(), run.waited()))] if run.peaks else []
    settings = run.settings()
    if settings:
        texts.append(("Settings", "\n".join(f"{name}: {value}" for name, value in settings.items())))
    steps = [("Steps", step_table(run))] if run.metrics else []
    name = run.folder.absolute().name
    return page_of(name, " | ".join([first.partition(": ")[2], *rest]), _tiles(run), plots, steps, texts)


def _tiles(run: RunData) -> dict[str, str]:
    """The figures that one looks for first."""
    heads, row = run_table([run], [""])
    wanted = {"last loss": "last loss", "eval before": "evaluation before", "eval after": "evaluation after"}
    wanted |= {"tokens/s": "tokens per second", "MFU": "of peak FLOP/s", "GPU GiB": "peak GPU memory, GiB"}
    wanted |= {"host GiB": "peak host memory in steps, GiB", "copied GiB": "copied, GiB"}
    found = dict(zip(heads, row, strict=True))
    return {words: found[head] for head, words in wanted.items() if found.get(head, "-") != "-"}


def _head(run: RunData) -> str:
    tokens = sum(row["tokens"] for row in run.metrics)
    trained = sum(row.get("trained_tokens", 0) for row in run.metrics)
    seconds = sum(row["seconds"] for row in run.metrics)
    end = "done" if run.summary else "not done, or stopped"
    lines = [f"{run.folder}: {len(run.metrics)} steps, {tokens:,} tokens, {end}"]
    if seconds:
        losses = [row["loss"] for row in run.metrics]
        lines.append(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {tokens / seconds:,.0f} tokens/s")
        lines[-1] += f", {trained:,} tokens trained" if trained else ""
    loss = run.last_tokens_loss()
    if loss is not None:
        what = "tokens" if loss["tokens"] is None else f"{loss['tokens']} tokens"
        lines.append(f"evaluation, loss on the last {what}: {loss['before']:.4f} -> {loss['after']:.4f}")
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(
        prog="oomb report",
        description="What a run of oomb train did: loss, speed, memory and page traffic as tables, as plots "
        "(report_*.png) and as one page (report.html) that opens from disk. Several runs are compared. A folder with "
        "memory.jsonl alone will do, as the Python API writes it.",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="output_dir of a run")
    parser.add_argument(
        "--out",
        help="folder for plots and page, made if need be; if left out that of the run, or for several runs this one",
    )
    parser.add_argument(
        "--step", type=int, help="whose memory is drawn; the one with most memory on the device if left out"
    )
    parser.add_argument("--no_plots", "--no-plots", action="store_true", help="the tables only")
    parser.add_argument("--json", action="store_true", help="everything as JSON, sizes in bytes; no plots")
    return parser
