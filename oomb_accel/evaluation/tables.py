"""The figures of an evaluation as text that needs no colour."""

from __future__ import annotations

from collections.abc import Sequence

from oomb_accel.columns import aligned
from oomb_accel.evaluation.context import ContextLoss
from oomb_accel.evaluation.facts import Answer
from oomb_accel.evaluation.position import PositionLoss
from oomb_accel.evaluation.windows import WHOLE

NOT_IN_CONTEXT = "*"


def context_table(rows: Sequence[ContextLoss]) -> str:
    """Means with their intervals, and below them the documents one by one where there are several."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    table = [["context", "documents", "tokens", *(head for v in variants for head in (f"{v} loss", "95 % interval"))]]
    by_length = _by_length(rows)
    for same in by_length:
        cells = [context_name(same[0].asked, same[0].context), f"{len(same[0].documents)}", f"{same[0].num_tokens:,}"]
        for row in same:
            cells += [f"{row.mean.value:.4f}", f"{row.mean.low:.4f} to {row.mean.high:.4f}"]
        table.append(cells)
    over = ", ".join(dict.fromkeys(row.mean.over for row in rows))
    parts = [aligned(table), f"intervals: bootstrap over {over}"]
    names = list(dict.fromkeys(document.name for row in rows for document in row.documents))
    for variant in variants if len(names) > 1 else []:
        mine = [row for row in rows if row.variant == variant]
        heads = [context_name(row.asked, row.context) for row in mine]
        grid = [[f"{variant}, by document", *heads]]
        for name in names:
            losses = [{document.name: document.loss for document in row.documents}.get(name) for row in mine]
            grid.append([name, *("-" if loss is None else f"{loss:.4f}" for loss in losses)])
        parts.append("\n" + aligned(grid))
    return "\n".join(parts)


def facts_table(answers: Sequence[Answer]) -> str:
    """For each variant: exact answers and loss by depth (rows) and context length (columns)."""
    parts = []
    starred = False
    for variant in dict.fromkeys(answer.variant for answer in answers):
        mine = [answer for answer in answers if answer.variant == variant]
        lengths = list(dict.fromkeys(answer.asked for answer in mine))
        contexts = {asked: max(answer.context for answer in mine if answer.asked == asked) for asked in lengths}
        heads = [f"{variant}: depth", "tokens back"]
        table = [heads + [f"context {context_name(asked, contexts[asked])}" for asked in lengths]]
        for depth in sorted({answer.depth for answer in mine}):
            same = [answer for answer in mine if answer.depth == depth]
            cells = [f"{100 * depth:g} %", _range([answer.tokens_back for answer in same])]
            table.append(cells + [fact_cell([a for a in same if a.asked == asked]) for asked in lengths])
        for name, inside in (("in the context", True), ("not in it", False)):
            chosen = [answer for answer in mine if answer.in_context == inside]
            cells = [fact_cell([a for a in chosen if a.asked == asked]) for asked in lengths]
            table.append([name, "", *cells])
        starred = starred or any(NOT_IN_CONTEXT in cell for cells in table for cell in cells)
        parts.append(aligned(table))
    text = "\n\n".join(parts) + "\nexact answers of all asked, and loss per token of the answer in nats"
    return text + (f"; {NOT_IN_CONTEXT} the fact is not in the context" if starred else "")


def fact_cell(answers: Sequence[Answer]) -> str:
    """``exact/asked loss``, with a mark where a fact was not in the context."""
    if not answers:
        return "-"
    exact, loss = sum(answer.exact for answer in answers), sum(answer.loss for answer in answers) / len(answers)
    mark = NOT_IN_CONTEXT if not all(answer.in_context for answer in answers) else " "
    return f"{exact}/{len(answers)} {loss:.3f}{mark}"


def position_table(rows: Sequence[PositionLoss]) -> str:
    """Loss and perplexity by position; the last line is over all tokens."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    table = [["position", "documents", "tokens", *(f"{v} {what}" for v in variants for what in ("loss", "perplexity"))]]
    first = [row for row in rows if row.variant == variants[0]]
    for index, row in enumerate(first):
        where = "all" if index == len(first) - 1 else f"{row.first:,} to {row.end:,}"
        cells = [where, f"{row.num_documents}", f"{row.num_tokens:,}"]
        for variant in variants:
            same = next(r for r in rows[index:] if r.variant == variant and (r.first, r.end) == (row.first, row.end))
            cells += [f"{same.loss:.4f}", f"{same.perplexity:,.3f}"]
        table.append(cells)
    return aligned(table)


def context_name(asked: int, context: int) -> str:
    """A context length for a heading."""
    return f"whole ({context:,})" if asked == WHOLE else f"{context:,}"


def _by_length(rows: Sequence[ContextLoss]) -> list[list[ContextLoss]]:
    return [[row for row in rows if row.asked == asked] for asked in dict.fromkeys(row.asked for row in rows)]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
