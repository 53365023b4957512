"""The plots of an evaluation, for print and for readers who do not tell colours apart: markers differ too."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oomb_accel.evaluation.context import ContextLoss
from oomb_accel.evaluation.facts import Answer
from oomb_accel.evaluation.position import PositionLoss
from oomb_accel.evaluation.tables import NOT_IN_CONTEXT, context_name

_LOOKS = {"base": ("#8a9099", "o", "--"), "adapter": ("#2f6db3", "s", "-"), "model": ("#2f6db3", "s", "-")}
_SMALL = 9
"""Font size of all but the axes' names, in points."""
_LETTERS_PER_INCH = 14
"""Of text of that size."""


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
        lines = textwrap.wrap(subtitle, int(figure.get_figwidth() * _LETTERS_PER_INCH), break_on_hyphens=False)
        figure.suptitle("\n".join(lines), fontsize=_SMALL, x=0.01, ha="left")
        paths.append(folder / f"eval_{name}.png")
        figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
    return paths


def _context(rows: Sequence[ContextLoss]) -> Figure:
    """Loss against context length, with its interval at each length."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = sorted((row for row in rows if row.variant == variant), key=lambda row: row.context)
        means = [row.mean for row in mine]
        color, marker, line = _LOOKS[variant]
        axes.errorbar(
            [row.context for row in mine],
            [mean.value for mean in means],
            yerr=[[m.value - m.low for m in means], [m.high - m.value for m in means]],
            color=color, marker=marker, linestyle=line, label=variant, capsize=4, elinewidth=1,
        )  # fmt: skip
    axes.set_xscale("symlog", base=2, linthresh=256)  # from 0 on
    _label_lengths(axes, {row.context: row.asked for row in rows})
    _dress(axes, "tokens of context before the scored ones", "loss (nats per token), 95 % interval")
    return figure


def _label_lengths(axes: Axes, asked: dict[int, int]) -> None:
    """Ticks at the lengths that were measured, but for those too close to a longer one to be read.

    Args:
        asked: by length, what was asked for.
    """
    least, most = axes.get_xlim()
    place = axes.get_xaxis_transform().transform
    left, right = place((least, 0))[0], place((most, 0))[0]
    shown: list[int] = []
    for length in sorted(asked, reverse=True):
        if not shown or place((shown[-1], 0))[0] - place((length, 0))[0] > 0.085 * (right - left):
            shown.append(length)
    names = [context_name(asked[length], length).replace(" ", "\n") for length in shown]
    axes.set_xticks(shown, names, fontsize=_SMALL)
    axes.minorticks_off()


def _facts(answers: Sequence[Answer]) -> Figure:
    """Share of exact answers: one grid of depth against context length for each variant. Cells whose fact is not in the
    context are grey."""
    variants = list(dict.fromkeys(answer.variant for answer in answers))
    depths = sorted({answer.depth for answer in answers})
    lengths = list(dict.fromkeys(answer.asked for answer in answers))
    longest = {asked: max(a.context for a in answers if a.asked == asked) for asked in lengths}
    size = (1 + len(variants) * max(2.5, 0.75 * len(lengths)), max(3, 1.6 + 0.32 * len(depths)))
    figure = Figure(figsize=size, layout="constrained")
    row_of_axes = figure.subplots(1, len(variants), squeeze=False, sharey=True)[0]
    for axes, variant in zip(row_of_axes, variants, strict=True):
        colors = np.ones((len(depths), len(lengths), 4))
        for y, depth in enumerate(depths):
            for x, asked in enumerate(lengths):
                cell = [a for a in answers if (a.variant, a.depth, a.asked) == (variant, depth, asked)]
                if not cell:
                    continue
                share = sum(a.exact for a in cell) / len(cell)
                known = all(a.in_context for a in cell)
                colors[y, x] = colormaps["Blues" if known else "Greys"](share if known else 0.1 + 0.6 * share)
                text = f"{100 * share:.0f}{'' if known else NOT_IN_CONTEXT}"
                color = "white" if share > 0.5 else "black"
                axes.text(x, y, text, ha="center", va="center", color=color, fontsize=_SMALL)
        axes.imshow(colors, aspect="auto")
        names = [context_name(asked, longest[asked]).replace(" ", "\n") for asked in lengths]
        axes.set_xticks(range(len(lengths)), names, fontsize=_SMALL)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.3g} %" for depth in depths], fontsize=_SMALL)
        axes.set_title(variant, fontsize=_SMALL + 1, fontweight="bold")
    row_of_axes[0].set_ylabel("depth of the fact")
    grey = any(not answer.in_context for answer in answers)
    note = f"\n{NOT_IN_CONTEXT} and grey: the fact is not in the context" if grey else ""
    name = f"tokens of the document before the question; in cells % of answers that are exact{note}"
    figure.supxlabel(name, fontsize=_SMALL + 1)
    return figure


def _position(rows: Sequence[PositionLoss]) -> Figure:
    """Perplexity of each bucket of positions; buckets double, so they stand at equal distances."""
    buckets = [row for row in rows if row.variant == rows[0].variant][:-1]  # the last one is over all positions
    figure = Figure(figsize=(max(7, 0.8 + 0.9 * len(buckets)), 4), layout="constrained")
    axes = figure.subplots()
    for variant in dict.fromkeys(row.variant for row in rows):
        values = [row.perplexity for row in rows if row.variant == variant][:-1]
        color, marker, line = _LOOKS[variant]
        axes.plot(range(len(values)), values, color=color, marker=marker, linestyle=line, label=variant)
    names = [f"to {_length(row.end)}\n({row.num_tokens:,})" for row in buckets]
    axes.set_xticks(range(len(buckets)), names, fontsize=_SMALL)
    _dress(axes, "positions in the document (number of tokens)", "perplexity")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    return figure


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def _dress(axes: Axes, x_name: str, y_name: str) -> None:
    """Names of the axes, and a legend above them where it hides nothing."""
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=_SMALL)
