"""The plots of an evaluation, for print and for readers who do not tell colours apart: markers differ too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oomb_accel.evaluation.context import ContextLoss
from oomb_accel.evaluation.facts import Answer
from oomb_accel.evaluation.position import PositionLoss
from oomb_accel.evaluation.tables import NOT_IN_CONTEXT, context_name

_LOOKS = {"base": ("#8a9099", "o", "--"), "adapter": ("#2f6db3", "s", "-"), "model": ("#2f6db3", "s", "-")}


def draw(
    folder: Path,
    *,
    context: Sequence[ContextLoss],
    facts: Sequence[Answer],
    position: Sequence[PositionLoss],
    subtitle: str,
) -> list[Path]:
    """Draw what there are figures for. Returns the files.

    Args:
        subtitle: model and kind of attention, in every picture.
    """
    figures = {}
    if context:
        figures["context"] = _context(context)
    if facts:
        figures["facts"] = _facts(facts)
    if position:
        figures["position"] = _position(position)
    paths = []
    for name, figure in figures.items():
        figure.suptitle(subtitle, fontsize=8, y=1.02)
        paths.append(folder / f"eval_{name}.png")
        figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
    return paths


def _context(rows: Sequence[ContextLoss]) -> Figure:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = sorted((row for row in rows if row.variant == variant), key=lambda row: row.context)
        lengths, means = [row.context for row in mine], [row.mean for row in mine]
        color, marker, line = _LOOKS[variant]
        values = [mean.value for mean in means]
        axes.plot(lengths, values, color=color, marker=marker, linestyle=line, label=variant)
        axes.fill_between(lengths, [m.low for m in means], [m.high for m in means], color=color, alpha=0.15)
    _lengths(axes, max(row.context for row in rows))
    axes.set_xlabel("tokens of context before the scored ones")
    axes.set_ylabel("loss (nats per token), 95 % interval")
    axes.legend()
    return figure


def _facts(answers: Sequence[Answer]) -> Figure:
    """Share of exact answers: one grid of depth against context length for each variant."""
    variants = list(dict.fromkeys(answer.variant for answer in answers))
    figure = Figure(figsize=(1 + 4.5 * len(variants), 4.5))
    depths = sorted({answer.depth for answer in answers})
    lengths = list(dict.fromkeys(answer.asked for answer in answers))
    longest = {asked: max(a.context for a in answers if a.asked == asked) for asked in lengths}
    for axes, variant in zip(figure.subplots(1, len(variants), squeeze=False)[0], variants, strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for y, depth in enumerate(depths):
            for x, asked in enumerate(lengths):
                cell = [a for a in answers if (a.variant, a.depth, a.asked) == (variant, depth, asked)]
                if cell:
                    grid[y, x] = sum(a.exact for a in cell) / len(cell)
                    mark = "" if all(a.in_context for a in cell) else NOT_IN_CONTEXT
                    dark = grid[y, x] > 0.5
                    text = f"{100 * grid[y, x]:.0f}{mark}"
                    axes.text(x, y, text, ha="center", va="center", color="white" if dark else "black", fontsize=8)
        axes.imshow(grid, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axes.set_xticks(range(len(lengths)), [context_name(asked, longest[asked]) for asked in lengths], rotation=30)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
        axes.set_xlabel("tokens of the document before the question")
        axes.set_ylabel("depth of the fact in the document")
        axes.set_title(f"{variant}: % exact ({NOT_IN_CONTEXT} not in the context)", fontsize=9)
    figure.tight_layout()
    return figure


def _position(rows: Sequence[PositionLoss]) -> Figure:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = [row for row in rows if row.variant == variant][:-1]  # the last one is over all positions
        color, marker, line = _LOOKS[variant]
        ends = [row.end for row in mine]
        axes.plot(ends, [row.perplexity for row in mine], color=color, marker=marker, linestyle=line, label=variant)
        if variant == rows[0].variant:
            for row in mine:
                axes.annotate(
                    f"{row.num_tokens:,}", (row.end, row.perplexity), xytext=(0, 6), textcoords="offset points",
                    ha="center", fontsize=7,
                )  # fmt: skip
    axes.set_xscale("log", base=2)
    _ticks(axes, [row.end for row in rows])
    axes.set_xlabel("position in the document, up to (with the number of tokens)")
    axes.set_ylabel("perplexity")
    axes.legend()
    return figure


def _lengths(axes: Axes, longest: int) -> None:
    """An axis of powers of two that begins at 0."""
    axes.set_xscale("symlog", base=2, linthresh=256)
    _ticks(axes, [0, *(2**power for power in range(9, 40, 2) if 2**power <= longest)])


def _ticks(axes: Axes, ticks: Sequence[int]) -> None:
    shown = sorted(set(ticks))
    axes.set_xticks(shown, [f"{tick // 1024}K" if tick and tick % 1024 == 0 else f"{tick:,}" for tick in shown])
    axes.minorticks_off()
