"""The plots of docs/sparsity.md."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

if TYPE_CHECKING:
    from benchmarks.sparsity.report import Rows

SMOOTHED = 9
"""Steps of a training curve whose mean is drawn."""
COLORS = ("#2f6db3", "#d9822b", "#3d9a5c", "#a04fa8", "#7a7f87", "#c23b3b", "#2aa3a3", "#8c6d31")


def draw_all(rows: Rows, folder: Path) -> list[Path]:
    """Draw what there are results for. Returns the files."""
    drawn = []
    for name, draw in (("loss", _loss), ("layers", _layers), ("selection", _selection), ("training", _training)):
        figure = draw(rows)
        if figure is not None:
            path = folder / f"sparsity_{name}.png"
            figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
            plt.close(figure)
            drawn.append(path)
    return drawn


def _axes(count: int, width: float = 5.2, height: float = 3.9) -> tuple[Any, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False)
    for one in axes[0]:
        one.grid(alpha=0.3)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, list(axes[0])


def _loss(rows: Rows) -> Any:
    """Loss over dense against the tokens that a list selects, a line per page size."""
    from benchmarks.sparsity.report import difference

    lengths = sorted({row["tokens"] for row in rows.of("loss", text="code")})
    if not lengths:
        return None
    figure, axes = _axes(len(lengths))
    for one, tokens in zip(axes, lengths, strict=True):
        dense = rows.of("loss", name="dense", text="code", tokens=tokens)[0]
        sparse = rows.of("loss", name="sparse", text="code", tokens=tokens)
        for color, page in zip(COLORS, sorted({row["page"] for row in sparse}), strict=False):
            line = sorted((row for row in sparse if row["page"] == page), key=lambda row: row["top_k"])
            points = [difference(row, dense) for row in line]
            budget = [row["top_k"] * page for row in line]
            one.errorbar(budget, [x[0] for x in points], [x[1] for x in points], color=color, marker="o", ms=4, lw=1.5,
                         capsize=2, label=f"pages of {page}")  # fmt: skip
        one.axhline(0, color="black", lw=0.8)
        _powers_of_two(one)
        one.set_title(f"documents of {tokens:,} tokens", fontsize=10)
        one.set_xlabel("selected tokens: top_k x page")
        one.set_ylabel("loss over dense, second half")
        one.legend(fontsize=8)
    return figure


def _layers(rows: Rows) -> Any:
    """By layer: cosine of the gradient, and softmax mass that is attended to."""
    found = [row for row in rows.of("gradient", name="sparse") if row["settings"]["page_tokens"] == _page(rows)]
    # Of a model that was trained sparsely, where there is one. Attention was looked at before training.
    models = sorted({row["model"] for row in found}, key=lambda name: (name.startswith("top"), name))
    gradients = [row for row in found if row["model"] == models[-1]]
    masses = [row for row in rows.of("mass", variant="product", q_block=128) if row["page"] == _page(rows)]
    if not gradients and not masses:
        return None
    figure, axes = _axes(2)
    for color, row in zip(COLORS, sorted(gradients, key=lambda row: row["settings"]["top_k"]), strict=False):
        axes[0].plot(row["cosine_by_layer"], color=color, marker="o", ms=3, label=f"top_k {row['settings']['top_k']}")
    for color, row in zip(COLORS, sorted(masses, key=lambda row: row["top_k"]), strict=False):
        axes[1].plot(row["covered"], color=color, marker="o", ms=3, label=f"top_k {row['top_k']}")
    if masses:
        axes[1].plot(masses[0]["local"], color="black", lw=1, ls="--", label="local keys alone")
    cosine = "cosine of sparse and dense gradient"
    if gradients:
        cosine += f"\n{_when(models[-1])}"
    titles = (cosine, "attended share of the softmax\nadapted model, before training")
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title, fontsize=10)
        one.set_xlabel("layer")
        if one.lines:
            one.legend(fontsize=8)
    return figure


SHOWN = ("product", "q16", "q4-k4-squared", "q16-k1", "q1-k1-squared", "min-max-q1", "causal", "nearest", "oracle")
"""Ways of selecting that have a line of their own."""
EMPHASISED = {"product": "-", "oracle": ":"}
"""The library's, and the best by this measure."""


def _selection(rows: Rows) -> Any:
    """Share of the candidates' mass by top_k; and, for all ways of selecting, that share against the loss."""
    from benchmarks.sparsity.report import difference

    page = _page(rows)
    masses = [row for row in rows.of("mass", q_block=128) if row["page"] == page]
    if not masses:
        return None
    figure, axes = _axes(2, 6.2, 4.6)
    for index, name in enumerate(SHOWN):
        line = sorted((row for row in masses if row["variant"] == name), key=lambda row: row["top_k"])
        style: dict[str, Any] = {"color": COLORS[index % len(COLORS)], "lw": 1.3}
        style |= {"color": "black", "lw": 2.2, "ls": EMPHASISED[name]} if name in EMPHASISED else {}
        shares = [statistics.fmean(row["of_candidates"]) for row in line]
        label = "product (the library's)" if name == "product" else name
        axes[0].plot([row["top_k"] for row in line], shares, label=label, marker="o", ms=3, **style)
    _powers_of_two(axes[0])
    axes[0].set_xlabel("top_k")
    axes[0].set_title("share of the candidates' softmax mass", fontsize=10)
    axes[0].legend(fontsize=7)
    found = rows.of("variant")
    tokens = max((row["tokens"] for row in found), default=0)
    dense = rows.of("variant", name="dense", tokens=tokens)
    points: dict[str, tuple[float, float]] = {}
    for row in rows.of("variant", tokens=tokens):
        mass = [x for x in masses if x["variant"] == row["name"] and x["top_k"] == row.get("top_k")]
        if mass and dense:
            points[row["name"]] = statistics.fmean(mass[0]["of_candidates"]), difference(row, dense[0])[0]
    for name, point in points.items():
        axes[1].plot(*point, marker="o", ms=4, color="black" if name in EMPHASISED else COLORS[0])
    axes[1].axhline(0, color="black", lw=0.8)
    axes[1].margins(0.12)
    _name_points(axes[1], points)
    axes[1].set_title(f"that share against the loss, {tokens:,} tokens", fontsize=10)
    axes[1].set_xlabel("share of the candidates' softmax mass")
    axes[1].set_ylabel("loss over dense, second half")
    return figure


def _name_points(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Write the name beside each point, where it covers no other point and no other name; far ones with a line."""
    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    dots = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in axes.transData.transform(list(points.values()))]
    taken: list[Bbox] = list(dots)
    for name, point in points.items():
        line = {"arrowstyle": "-", "lw": 0.4, "color": "#7a7f87", "shrinkA": 0, "shrinkB": 2}
        text = axes.annotate(name, point, (0, 0), fontsize=6, textcoords="offset points", va="center", arrowprops=line)
        for distance, angle in itertools.product(range(6, 150, 6), range(0, 360, 30)):
            x, y = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            text.set_position((x, y))
            text.set_horizontalalignment("left" if x >= 0 else "right")
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # the annotation's own has the line in it
            if axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) and not box.count_overlaps(taken):
                break
        taken.append(box)


def _training(rows: Rows) -> Any:
    """Training loss over the dense run's on the same documents, and held-out loss with dense attention."""
    ends = rows.of("curve_end")
    if not ends:
        return None
    from benchmarks.sparsity.report import difference

    figure, axes = _axes(3, 4.8)
    ends = sorted(ends, key=lambda row: (row["run"], row["seed"]))
    colors = dict(zip(dict.fromkeys(row["run"] for row in ends), COLORS, strict=False))
    for end in ends:
        run, seed = end["run"], end["seed"]
        style: dict[str, Any] = {"color": colors[run], "ls": "-" if seed == 0 else "--", "lw": 1.3}
        steps = sorted(rows.of("curve_step", run=run, seed=seed), key=lambda row: row["step"])
        base = sorted(rows.of("curve_step", run="dense", seed=seed), key=lambda row: row["step"])
        # The dense run lies under the others, broad, as they cover it.
        broad = {"lw": 5, "alpha": 0.35} if run == "dense" else {}
        losses = [row["loss"] for row in steps]
        axes[0].plot(_smooth(losses), label=f"{run}, seed {seed}", **style | broad)
        if run != "dense" and base:
            over = [a["loss"] - b["loss"] for a, b in zip(steps, base, strict=False)]
            axes[1].plot(_smooth(over), **style)
        found = {row["step"]: row for row in rows.of("curve_evaluation", run=run, seed=seed, evaluated="dense")}
        dense = {row["step"]: row for row in rows.of("curve_evaluation", run="dense", seed=seed, evaluated="dense")}
        shared = sorted(found.keys() & dense.keys()) if run != "dense" else []
        apart = [difference(found[step], dense[step], "loss") for step in shared]
        # Beside each other, not on top of each other.
        places = [step + 3 * list(colors).index(run) - 6 + seed for step in shared]
        axes[2].errorbar(places, [x[0] for x in apart], [x[1] for x in apart], marker="o", ms=3, capsize=2, **style)
    for one in axes[1:]:
        one.axhline(0, color="black", lw=0.8)
    titles = (
        f"training loss, mean of {SMOOTHED} steps",
        "the same over the dense run's",
        "held-out loss, asked densely,\nover the dense run's",
    )
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title, fontsize=10)
        one.set_xlabel("step")
    axes[0].legend(fontsize=7)
    return figure


def _powers_of_two(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _when(model: str) -> str:
    """A model's name in a title: ``top16-1`` is what a run left."""
    run, _, seed = model.rpartition("-")
    return f"after training {run}, seed {seed}" if run else "adapted model, before training"


def _smooth(values: list[float], width: int = SMOOTHED) -> list[float]:
    """Mean over the last steps."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def _page(rows: Rows) -> int:
    """The page size at which everything was measured."""
    pages = {row["page"] for row in rows.of("mass", variant="q1")}
    pages |= {row["page"] for row in rows.of("setting") if "page" in row}
    return min(pages, default=128)
