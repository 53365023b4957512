"""The plots of an evaluation can be read: what is written in them overlaps nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from oomb_accel.evaluation import plots
from oomb_accel.evaluation.context import ContextLoss
from oomb_accel.evaluation.facts import Answer
from oomb_accel.evaluation.position import PositionLoss
from oomb_accel.evaluation.statistics import Mean
from oomb_accel.evaluation.windows import WHOLE

LONGEST = 4_000_000
LENGTHS = [0, 512, 600, 2048, 8192, 32768, 131072, 524288, 3_900_000, WHOLE]
PATHS = "/a/long/path/to/a/folder/of/models/that-has-a-name and adapter /another/path/to/a/folder/of/runs/my-run, dense"


def tokens(asked: int) -> int:
    return LONGEST if asked == WHOLE else asked


def context() -> list[ContextLoss]:
    mean = Mean(value=2.0, low=1.9, high=2.2, over="documents")
    return [ContextLoss(v, asked, tokens(asked), 511, mean, ()) for v in ("base", "adapter") for asked in LENGTHS]


def facts(lengths: list[int], depths: list[float]) -> list[Answer]:
    return [
        Answer(v, "a", asked, tokens(asked), depth, 0, 1, tokens(asked) > 1000, "silver walrus", 7, 0.1, depth > 0.3)
        for v in ("base", "adapter")
        for asked in lengths
        for depth in depths
    ]


def position() -> list[PositionLoss]:
    edges = [0, *(512 * 2**power for power in range(13)), LONGEST]
    buckets = [*itertools.pairwise(edges), (0, LONGEST)]
    return [PositionLoss(v, a, b, b - a, 1, 12.2) for v in ("base", "adapter") for a, b in buckets]


@pytest.mark.parametrize(
    "parts",
    [
        {"context": context()},
        {"facts": facts(LENGTHS, [number / 9 for number in range(10)])},
        {"facts": facts([0, WHOLE], [0.5])},
        {"position": position()},
    ],
)
def test_nothing_overlaps(parts: dict[str, list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **more: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **more)

    monkeypatch.setattr(Figure, "savefig", keep)
    plots.draw(tmp_path, **({"context": [], "facts": [], "position": []} | parts), subtitle=PATHS)  # type: ignore[arg-type]
    (figure,) = drawn
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    title = next(text for text in figure.texts if text.get_text().startswith("/a/long")).get_window_extent(renderer)
    for axes in figure.axes:
        around = axes.get_tightbbox(renderer)
        assert around is not None and not title.overlaps(around)
        names = [label for label in axes.get_xticklabels() if label.get_visible()]
        boxes = [label.get_window_extent(renderer) for label in names]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2)), [n.get_text() for n in names]
        label = axes.yaxis.label.get_window_extent(renderer)
        assert label.y0 >= 0 and label.y1 <= figure.bbox.y1
    assert title.x1 <= figure.bbox.x1


def test_the_longest_context_is_always_named(tmp_path: Path) -> None:
    figure = plots._context(context())
    names = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert "whole\n(4,000,000)" in names and "0" in names
    assert "3,900,000" not in names and "512" not in names  # too close to the next ones


def test_a_fact_that_was_not_in_the_context_is_grey() -> None:
    image = np.asarray(plots._facts(facts([0, WHOLE], [0.2, 0.5])).axes[1].images[0].get_array())
    grey, blue = image[:, 0, :3], image[:, 1, :3]
    assert (grey.max(axis=-1) - grey.min(axis=-1)).max() < 0.01
    assert blue[1, 2] - blue[1, 0] > 0.3  # all answers are exact there
