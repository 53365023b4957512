"""The reports of ``oomb verify`` as text and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

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
    width = max(len(row.name) for row in shown)
    lines = [f"{'compared':<{width}}  {'error':>9}  {'limit':>9}"]
    lines += [
        f"{row.name:<{width}}  {row.error:9.2e}  {row.limit:9.2e}  {'ok' if row.passed else 'FAILED'}" for row in shown
    ]
    hidden = len(report.rows) - len(shown)
    if hidden:
        lines.append(f"... and {hidden} more gradients with smaller errors, all ok (--all shows them)")
    failed = sum(not row.passed for row in report.rows)
    lines.append(f"{len(report.rows)} compared, {failed} failed: {'FAILED' if failed else 'PASSED'}")
    return "\n".join(lines)


def loss_table(costs: Sequence[LossCost]) -> str:
    """Losses by position; the last line is over all tokens."""
    lines = [f"{'position':<21}{'tokens':>9}{'dense':>11}{'sparse':>11}{'difference':>13}{'std. error':>12}"]
    for cost in costs:
        where = "all" if cost is costs[-1] else f"{cost.first:,} to {cost.end:,}"
        error = "-" if math.isnan(cost.standard_error) else f"{cost.standard_error:.6f}"
        lines.append(
            f"{where:<21}{cost.num_tokens:>9,}{cost.dense:>11.6f}{cost.sparse:>11.6f}{cost.difference:>+13.6f}{error:>12}"
        )
    return "\n".join(lines)


def layer_table(
    gradients: dict[int | None, GradientCost], attention: Sequence[LayerAttention], mass: dict[int, float]
) -> str:
    """What each layer attended to, and how its gradient differs."""
    heads = ("attended", "pages/list", "distinct", "mass", "cosine", "rel. error")
    lines = [f"{'layer':<8}" + "".join(f"{head:>12}" for head in heads)]
    for layer, seen in enumerate(attention):
        cost = gradients.get(layer, GradientCost(math.nan, math.nan))
        cells = [
            f"{seen.attended:.1%}",
            _number(seen.pages_per_list, ".1f"),
            _number(seen.distinct_pages, ".1%"),
            _number(mass.get(layer, math.nan), ".2%"),
            _number(cost.cosine, ".6f"),
            _number(cost.relative_error, ".2e"),
        ]
        lines.append(f"{layer:<8}" + "".join(f"{cell:>12}" for cell in cells))
    whole = gradients[None]
    lines.append(f"{'all':<8}{'':>48}{_number(whole.cosine, '.6f'):>12}{_number(whole.relative_error, '.2e'):>12}")
    return "\n".join(lines)


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
        "loss": [_plain(asdict(cost) | {"difference": cost.difference}) for cost in losses],
        "layers": [{"layer": layer} | _plain(found) for layer, found in enumerate(layers)],
        "gradient": _plain(asdict(gradients[None])),
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values.items()}


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
