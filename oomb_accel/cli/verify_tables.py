"""The reports of ``oomb verify`` as text and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from oomb_accel.columns import aligned
from oomb_accel.integrations.parity import ParityReport
from oomb_accel.integrations.sparsity_cost import GradientCost, LayerAttention, LossCost


def parity_rows(report: ParityReport) -> list[dict[str, Any]]:
    """A report for JSON."""
    return [{"name": r.name, "error": r.error, "limit": r.limit, "passed": r.passed} for r in report.rows]


def parity_table(report: ParityReport, *, show_all: bool) -> str:
    """A report as text: the worst ten gradients, or all of them."""
    first, gradients = list(report.rows[:3]), sorted(report.rows[3:], key=lambda row: row.error, reverse=True)
    shown = first + (gradients if show_all else gradients[:10])
    shown += [row for row in gradients if not row.passed and row not in shown]
    cells = [(r.name, f"{r.error:.2e}", f"{r.limit:.2e}", "ok" if r.passed else "FAILED") for r in shown]
    lines = [aligned([("compared", "error", "limit", ""), *cells], left=(0, 3))]
    hidden = len(report.rows) - len(shown)
    if hidden:
        lines.append(f"... and {hidden} more gradients with smaller errors, all ok (--all shows them)")
    failed = sum(not row.passed for row in report.rows)
    lines.append(f"{len(report.rows)} compared, {failed} failed: {'FAILED' if failed else 'PASSED'}")
    return "\n".join(lines)


def loss_table(costs: Sequence[LossCost], sides: tuple[str, str] = ("dense", "sparse")) -> str:
    """Losses by position; the last line is over all tokens."""
    rows = [["position", "tokens", *sides, "difference", "std. error"]]
    for cost in costs:
        where = "all" if cost is costs[-1] else f"{cost.first:,} to {cost.end:,}"
        error = "-" if math.isnan(cost.standard_error) else f"{cost.standard_error:.6f}"
        figures = (f"{cost.dense:.6f}", f"{cost.sparse:.6f}", f"{cost.difference:+.6f}")
        rows.append([where, f"{cost.num_tokens:,}", *figures, error])
    return aligned(rows)


def layer_table(
    gradients: dict[int | None, GradientCost], attention: Sequence[LayerAttention], mass: dict[int, float]
) -> str:
    """What each layer attended to, and how its gradient differs."""
    rows = [["layer", "attended", "pages/list", "distinct", "mass", "cosine", "rel. error"]]
    for layer, seen in enumerate(attention):
        cost = gradients.get(layer, GradientCost(math.nan, math.nan))
        cells = [
            str(layer),
            f"{seen.attended:.1%}",
            _number(seen.pages_per_list, ".1f"),
            _number(seen.distinct_pages, ".1%"),
            _number(mass.get(layer, math.nan), ".2%"),
            _number(cost.cosine, ".6f"),
            _number(cost.relative_error, ".2e"),
        ]
        rows.append(cells)
    whole = gradients[None]
    rows.append(["all", "", "", "", "", _number(whole.cosine, ".6f"), _number(whole.relative_error, ".2e")])
    return aligned(rows)


def gradient_table(gradients: dict[int | None, GradientCost]) -> str:
    """How the gradient of each layer differs, and that of all parameters."""
    rows = [["layer", "cosine", "rel. error"]]
    for layer, cost in gradients.items():
        name = "all" if layer is None else str(layer)
        rows.append([name, _number(cost.cosine, ".6f"), _number(cost.relative_error, ".2e")])
    return aligned(rows)


def gradient_rows(gradients: dict[int | None, GradientCost]) -> dict[str, Any]:
    """The same for JSON."""
    layers = [{"layer": layer} | plain(asdict(cost)) for layer, cost in gradients.items() if layer is not None]
    return {"layers": layers, "gradient": plain(asdict(gradients[None]))}


def cost_rows(
    losses: Sequence[LossCost],
    gradients: dict[int | None, GradientCost],
    attention: Sequence[LayerAttention],
    mass: dict[int, float],
) -> dict[str, Any]:
    """The cost for JSON; what was not measured is None."""
    layers = [
        asdict(seen) | asdict(gradients.get(layer, GradientCost(math.nan, math.nan))) | {"mass": mass.get(layer)}
        for layer, seen in enumerate(attention)
    ]
    return {
        "loss": [plain(asdict(cost) | {"difference": cost.difference}) for cost in losses],
        "layers": [{"layer": layer} | plain(found) for layer, found in enumerate(layers)],
        "gradient": plain(asdict(gradients[None])),
    }


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values for JSON, which has no nan."""
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values.items()}


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
