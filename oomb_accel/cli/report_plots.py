"""The plots of ``oomb report``: loss and speed over the steps; memory and page traffic over the time of one step."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from oomb_accel.cli.report_data import RunData, names_of
from oomb_accel.memory_report import DEVICE_TIERS, Line
from oomb_accel.progress import GIB

FEW_SAMPLES = 4
"""A step of no more samples is no time line: then the whole run is drawn."""
SMOOTHED_FROM = 40
"""Steps from which a mean is drawn over the single ones."""
_COLORS = {
    "weights": "#8a9099",
    "trained": "#5c6470",
    "optimizer": "#a58fc4",
    "gradients": "#7a58a6",
    "mean_keys": "#9ed0c8",
    "pages": "#2f6db3",
    "page_gradients": "#d9822b",
    "kept_outputs": "#3d9a5c",
    "activations": "#e3c567",
}
_BLUE, _RED, _DARK = "#2f6db3", "#b33a3a", "#30343a"
_LINES = ("#2f6db3", "#d9822b", "#3d9a5c", "#7a58a6", "#b33a3a", "#2aa5a0", "#8a6d3b", "#c2549d")
"""Of runs that are compared."""
_SWEEPS = {"forward": "#ffffff", "backward": "#f0f2f5", "evaluation": "#fbf7ea", "update": "#e4e7ec"}


def figures_of(runs: Sequence[RunData], step: int | None) -> dict[str, Figure]:
    """The figures that there is something for, by name.

    Args:
        runs: one, or several to be compared.
        step: whose memory is drawn; None takes the one with most memory on the device.

    Raises:
        ValueError: there are no samples of that step.
    """
    figures = {}
    if any(run.metrics for run in runs):
        figures["training" if len(runs) == 1 else "comparison"] = _training([run for run in runs if run.metrics])
    if len(runs) == 1 and runs[0].memory:
        figures["memory"] = _memory(runs[0], step)
    return figures


def save_png(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write ``report_NAME.png`` for each figure. Returns the files."""
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"report_{name}.png")
        figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
    return paths


def svg_of(figure: Figure, name: str) -> str:
    """A figure to be put into a page: text stays text, and what is dark takes the colour of the page's text.

    Args:
        name: makes the ids inside differ from those of other figures.
    """
    target = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": ["sans-serif"]}):
        figure.savefig(
            target, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None}
        )
    text = target.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :].strip(), flags=re.DOTALL)
    for sweep, color in _SWEEPS.items():
        text = text.replace(f"fill: {color}", f"fill: var(--{sweep})")
    text = text.replace('<text style="', '<text style="fill: currentColor; ')
    for dark in (_DARK, "#000000"):
        text = text.replace(dark, "currentColor")
    return text


def _training(runs: Sequence[RunData]) -> Figure:
    """Loss and speed over the steps, a line per run."""
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    several = len(runs) > 1
    for axes, key, title, color in (
        (left, "loss", "loss (nats per target)", _BLUE),
        (right, "tokens_per_second", "tokens per second", _RED),
    ):
        for index, (run, name) in enumerate(zip(runs, names_of(runs), strict=True)):
            shade = _LINES[index % len(_LINES)] if several else color
            _line(axes, run, key, shade, name if several else None)
        _dress(axes, title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.margins(x=0.03)
    if several:
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 0.97), frameon=False, fontsize=9)
    elif left.get_legend_handles_labels()[0]:
        left.legend(frameon=False, fontsize=9)
    right.set_ylim(0, 1.08 * max(row["tokens_per_second"] for run in runs for row in run.metrics))
    right.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    right.yaxis.set_major_formatter(lambda value, _: tick_label(value))
    figure.tight_layout(w_pad=3)
    return figure


def tick_label(value: float) -> str:
    """With the digits that it has, and commas between thousands."""
    rounded = round(value, 6)
    return f"{rounded:,.0f}" if rounded == round(rounded) else f"{rounded:,}"


def _line(axes: Axes, run: RunData, key: str, color: str, name: str | None) -> None:
    """The values of the steps, and their mean where there are many."""
    steps, values = [row["step"] for row in run.metrics], [row[key] for row in run.metrics]
    if len(values) < SMOOTHED_FROM:
        axes.plot(steps, values, color=color, marker="o", markersize=3.5, lw=1.2, label=name)
        return
    width = len(values) // 20
    axes.plot(steps, values, color=color, lw=1.2, alpha=0.3)
    label = f"mean of {2 * width + 1} steps" if name is None else name
    axes.plot(steps, _running_mean(values, width), color=color, lw=2, label=label)


def _memory(run: RunData, step: int | None) -> Figure:
    lines, start, title = _chosen(run, step)
    ends = [line["seconds"] - start for line in lines]
    moves = any(any(line["copied"].values()) for line in lines)
    heights = [3.2, 1.6, 1.4][: 3 if moves else 2]
    figure = Figure(figsize=(10, 1.5 + sum(heights)))
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _device(panels[0], ends, lines)
    panels[0].set_title(title, loc="left", fontsize=11, fontweight="bold", pad=20)
    _host(panels[1], ends, lines)
    if moves:
        _traffic(panels[2], ends, lines, _copied_before(run, lines[0]))
    for axes in panels:
        _mark_sweeps(axes, ends, lines, named=axes is panels[0])
        axes.set_xlim(0, max(ends[-1], 1e-3))
    panels[-1].set_xlabel("seconds, when the host queued the work")
    figure.tight_layout(h_pad=1.2)
    return figure


def _chosen(run: RunData, step: int | None) -> tuple[list[Line], float, str]:
    """The samples to be drawn, when their first one began, and what they are."""
    steps = sorted({line["step"] for line in run.memory})
    if step is not None and step not in steps:
        raise ValueError(
            f"There are no samples of memory of step {step}.\n  Found steps {steps[0]} to {steps[-1]}.\n"
            f"  Use --step {min(steps, key=lambda known: abs(known - step))}."
        )
    wanted = max(run.memory, key=_device_bytes)["step"] if step is None else step
    first = next(index for index, line in enumerate(run.memory) if line["step"] == wanted)
    lines = [line for line in run.memory if line["step"] == wanted]
    title = f"Memory in step {wanted}, {max(line['total_tokens'] for line in lines):,} tokens"
    if len(lines) <= FEW_SAMPLES and step is None:
        lines, first, title = _last_part(run.memory), 0, "Memory of the run"
    before = run.memory[first - 1]["seconds"] if first else 0.0
    return lines, min(before, lines[0]["seconds"]), title


def _last_part(lines: list[Line]) -> list[Line]:
    """Samples since the run was last started: clocks begin anew."""
    starts = [index for index, (a, b) in enumerate(itertools.pairwise(lines), 1) if b["seconds"] < a["seconds"]]
    return lines[starts[-1] if starts else 0 :]


def _device(axes: Axes, ends: Sequence[float], lines: Sequence[Line]) -> None:
    """Tiers stacked; where torch counts, up to the peak within each chunk."""
    unit, name = _unit(max(_device_bytes(line) for line in lines))
    tiers = [tier for tier in DEVICE_TIERS if any(tier in line["device"] for line in lines)]
    bottom = [0.0] * (len(lines) + 1)
    times = [0.0, *ends]
    for tier in tiers:
        sizes = [line["device"].get(tier, 0) / unit for line in lines]
        top = [low + size for low, size in zip(bottom, [sizes[0], *sizes], strict=True)]
        label = f"{DEVICE_TIERS[tier]}, {max(sizes):.3g}"
        axes.fill_between(times, bottom, top, step="pre", color=_COLORS[tier], lw=0, label=label)
        bottom = top
    if any("reserved" in line for line in lines):
        reserved = [line["reserved"] / unit for line in lines]
        axes.step(times, [reserved[0], *reserved], color=_DARK, lw=1, ls=":", label=f"reserved, {max(reserved):.3g}")
    on_gpu = any("peak" in line for line in lines)
    _dress(axes, f"device, {name}" if on_gpu else f"{name}, a part of\nhost memory")
    _from_zero(axes)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=9,
        title="largest", title_fontsize=9, alignment="left",
    )  # fmt: skip


def _host(axes: Axes, ends: Sequence[float], lines: Sequence[Line]) -> None:
    unit, name = _unit(max(line["host"]["process"] for line in lines))
    for key, label, color, dashes in (
        ("process", "whole process", _DARK, "-"),
        ("page_memory", "for pages and outputs", _BLUE, "--"),
        ("page_memory_used", "for pages and outputs, in use", _BLUE, "-"),
    ):
        sizes = [line["host"][key] / unit for line in lines]
        if any(sizes):
            axes.step(
                [0.0, *ends], [sizes[0], *sizes], lw=1.5, color=color, ls=dashes, label=f"{label}, {max(sizes):.3g}"
            )
    _dress(axes, f"host, {name}")
    _from_zero(axes)
    _legend(axes)


def _traffic(axes: Axes, ends: Sequence[float], lines: Sequence[Line], before: dict[str, int]) -> None:
    """What was copied since the first sample, as a sum."""
    unit, name = _unit(max(line["copied"][way] - before[way] for line in lines for way in before))
    for way, label, color in (("up", "host to device", _BLUE), ("down", "device to host", _RED)):
        sums = [(line["copied"][way] - before[way]) / unit for line in lines]
        axes.plot([0.0, *ends], [0.0, *sums], color=color, lw=1.5, label=f"{label}, {sums[-1]:.3g}")
    _dress(axes, f"copied, {name}")
    _from_zero(axes)
    _legend(axes)


def _copied_before(run: RunData, first: Line) -> dict[str, int]:
    index = run.memory.index(first)
    before = run.memory[index - 1]["copied"] if index else {"up": 0, "down": 0}
    is_new = any(first["copied"][way] < before[way] for way in before)  # the run was started again
    return {"up": 0, "down": 0} if is_new else before


def _mark_sweeps(axes: Axes, ends: Sequence[float], lines: Sequence[Line], *, named: bool) -> None:
    """Shade the sweeps, and name those that are wide enough."""
    for sweep, start, end in _sweeps(ends, lines):
        axes.axvspan(start, end, color=_SWEEPS[sweep], lw=0, zorder=0)
        if start > 0:
            axes.axvline(start, color=_DARK, lw=0.7, alpha=0.5)
        if named and end - start > 0.08 * ends[-1]:
            axes.annotate(
                sweep, ((start + end) / 2, 1.0), (0, 4), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", fontsize=9.5, color=_DARK,
            )  # fmt: skip


def _sweeps(ends: Sequence[float], lines: Sequence[Line]) -> Iterator[tuple[str, float, float]]:
    start = 0.0
    pairs = zip(ends, lines, strict=True)
    for sweep, group in itertools.groupby(pairs, key=lambda pair: str(pair[1]["sweep"])):
        end = list(group)[-1][0]
        yield sweep, start, end
        start = end


def _device_bytes(line: Line) -> int:
    return int(line.get("peak", sum(line["device"].values())))


def _unit(most: int) -> tuple[int, str]:
    return (GIB, "GiB") if most >= GIB // 10 else (1 << 20, "MiB")


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over so many neighbours on each side, fewer at the ends."""
    sums = [0.0, *itertools.accumulate(values)]
    spans = [(max(0, i - width), min(len(values), i + width + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def _dress(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _from_zero(axes: Axes) -> None:
    """From 0 up to a little above what is drawn: a line at the edge would be cut in half."""
    most = float(axes.dataLim.y1)
    axes.set_ylim(0, 1.08 * most if most > 0 else 1.0)


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.05), frameon=False, fontsize=9)
