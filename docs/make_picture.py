"""Draws docs/how_it_works.png: two sweeps over four chunks."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

CHUNKS = 4
BLUE, ORANGE, GREY = "#2f6db3", "#d9822b", "#c9ced6"


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str, text: str) -> None:
    style = "round,pad=0.02,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="none"))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5, color="white")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, bend: float = 0.0) -> None:
    connection = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, color=color, connectionstyle=connection, lw=1.4
        )
    )


def sweep(axes: Axes, title: str, *, backward: bool) -> None:
    axes.set_xlim(-0.2, CHUNKS * 1.5 + 0.1)
    axes.set_ylim(-0.75, 2.35)
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    color = ORANGE if backward else BLUE
    for index in range(CHUNKS):
        x = index * 1.5
        verb = "run again\nwith gradients" if backward else "run, keep K and V,\nforget the rest"
        box(axes, x, 1.3, 1.25, 0.75, color, f"chunk {index + 1}\n{verb}")
        box(axes, x, 0.0, 1.25, 0.5, GREY, "")
        label = "pages + page gradients" if backward else "pages (K, V)"
        axes.text(x + 0.62, 0.25, label, ha="center", va="center", fontsize=8)
        for earlier in range(index):
            target = (earlier * 1.5 + 0.75, 0.52)
            here = (x + 0.4, 1.28)
            arrow(axes, here, target, color, 0.08) if backward else arrow(axes, target, here, color, -0.08)
        own_top, own_bottom = (x + 1.0, 1.28), (x + 1.0, 0.52)
        arrow(axes, own_bottom, own_top, color) if backward else arrow(axes, own_top, own_bottom, color)
    start, end = (0.0, -0.3), (CHUNKS * 1.5 - 0.25, -0.3)
    arrow(axes, end, start, "black") if backward else arrow(axes, start, end, "black")
    words = (
        "right to left: leave dK, dV with the pages of earlier tokens; take what later chunks left with one's own"
        if backward
        else "left to right: attend to own tokens and to all earlier pages"
    )
    axes.text(CHUNKS * 0.75 - 0.1, -0.52, words, ha="center", va="center", fontsize=8.5)


def main() -> None:
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6.4))
    sweep(top, "1  Forward sweep, without gradients", backward=False)
    sweep(bottom, "2  Backward sweep", backward=True)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("how_it_works.png"), dpi=130)


if __name__ == "__main__":
    main()
