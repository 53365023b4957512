"""Tables and plots of docs/sparsity.md out of the committed results: ``python -m benchmarks.sparsity.report``.

Writes ``docs/sparsity_*.png`` and replaces what stands in the page between ``<!-- table: NAME -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sparsity.variants import VARIANTS

HERE = Path(__file__).parent
Row = dict[str, Any]
PENDING = "Not measured yet."


class Rows:
    """All rows of a results folder; of rows that measure the same, the last file's."""

    def __init__(self, folder: Path) -> None:
        rows: dict[str, Row] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                rows[_identity(row)] = row
        self._rows = list(rows.values())

    def of(self, study: str, **values: Any) -> list[Row]:
        """Rows of a study with these values."""
        wanted = [row for row in self._rows if row["study"] == study]
        return [row for row in wanted if all(row.get(key) == value for key, value in values.items())]


def _identity(row: Row) -> str:
    """What a row measures: whatever in it is no measurement."""
    labels = {key: value for key, value in row.items() if isinstance(value, str | int | dict) and key != "job"}
    return json.dumps(labels, sort_keys=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE.parents[1] / "docs" / "sparsity.md")
    options = parser.parse_args()
    from benchmarks.sparsity.plots import draw_all

    rows = Rows(options.results)
    options.page.write_text(filled(options.page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    for path in draw_all(rows, options.page.parent):
        print(path)
    return 0


def filled(text: str, rows: Rows) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: a marker names no table.
    """

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"There is no table {name!r}.\n  Tables: {', '.join(TABLES)}.")
        return f"<!-- table: {name} -->\n\n{TABLES[name](rows) or PENDING}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def difference(row: Row, base: Row, key: str = "second_half") -> tuple[float, float]:
    """Mean and standard error of a row's losses over those of another, document by document."""
    each = [a - b for a, b in zip(row[key], base[key], strict=True)]
    spread = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return statistics.fmean(each), spread


def _signed(value: tuple[float, float]) -> str:
    mean, error = value
    return f"{mean:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def _markdown(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    if not body:
        return ""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in body)])


def _dense(rows: Rows, study: str, **values: Any) -> Row | None:
    found = rows.of(study, name="dense", **values)
    return found[0] if found else None


def _grid(rows: Rows, text: str, longest: bool) -> str:
    lengths = sorted({row["tokens"] for row in rows.of("loss", text=text)})
    if not lengths:
        return ""
    tokens = lengths[-1 if longest else 0]
    dense = _dense(rows, "loss", text=text, tokens=tokens)
    sparse = rows.of("loss", name="sparse", text=text, tokens=tokens)
    if dense is None:
        return ""
    pages = sorted({row["page"] for row in sparse})
    body = []
    for top_k in sorted({row["top_k"] for row in sparse}):
        cells = [f"{top_k}"]
        for page in pages:
            found = [row for row in sparse if row["top_k"] == top_k and row["page"] == page]
            cells.append(_signed(difference(found[0], dense)) if found else "")
        body.append(cells)
    other = rows.of("loss", name="dense, other chunks", text=text, tokens=tokens)
    noise = f" Rounding alone: {_signed(difference(other[0], dense))}." if other else ""
    count, mean = len(dense["loss"]), statistics.fmean(dense["second_half"])
    head = ["top_k", *(f"pages of {page}" for page in pages)]
    note = f"{count} documents of {tokens:,} tokens, chunks of {dense['chunk']:,}; dense loss {mean:.4f}.{noise}"
    return _markdown(head, body) + "\n\n" + note


def _gradients(rows: Rows) -> str:
    body = []
    for row in rows.of("gradient"):
        if row["name"] == "another document":
            continue
        by_layer = row["cosine_by_layer"]
        body.append(
            [
                _model_name(row["model"]),
                _sparse_name(row),
                f"{statistics.fmean(row['cosine']):.4f}",
                f"{statistics.fmean(row['relative_error']):.3f}",
                f"{min(by_layer):.4f} (layer {by_layer.index(min(by_layer))})",
                f"{row['mean_cosine']:.4f}",
            ]
        )
    notes = []
    for model in dict.fromkeys(row["model"] for row in rows.of("gradient")):
        others = [row["cosine"][0] for row in rows.of("gradient", name="another document", model=model)]
        if others:
            notes.append(f"{statistics.fmean(others):.4f} ({_model_name(model)})")
    head = ["model", "gradient", "cosine to dense", "relative error", "worst layer", "cosine of the documents' mean"]
    table = _markdown(head, body)
    if table and notes:
        table += f"\n\nCosine of the dense gradients of two different documents: {', '.join(notes)}."
    return table


def _sparse_name(row: Row) -> str:
    settings = row["settings"]
    if settings.get("attention") != "sparse":
        return str(row["name"])
    text = f"top_k={settings['top_k']}, pages of {settings['page_tokens']}"
    return text if row["name"] == "sparse" else f"{text}, {row['name']}"


def _model_name(model: str) -> str:
    return model if model == "adapted" else f"after training {model.rpartition('-')[0]}"


def _context(rows: Rows) -> str:
    contexts = sorted({row["context"] for row in rows.of("context")})
    body = []
    for model in dict.fromkeys(row["model"] for row in rows.of("context")):
        found = {row["context"]: row for row in rows.of("context", model=model)}
        cells = [_model_name(model), f"{statistics.fmean(found[contexts[-1]]['loss']):.4f}"]
        body.append([*cells, *(_signed(difference(found[c], found[contexts[-1]], "loss")) for c in contexts[-2::-1])])
    head = ["model", "whole document", *(f"last {context:,} tokens" for context in contexts[-2::-1])]
    return _markdown(head, body)


def _after(rows: Rows) -> str:
    body = []
    for row in rows.of("loss_after_training"):
        dense = rows.of("loss_after_training", name="dense", model=row["model"])
        if row["name"] != "dense" and dense:
            mean = statistics.fmean(row["second_half"])
            body.append(
                [_model_name(row["model"]), _sparse_name(row), f"{mean:.4f}", _signed(difference(row, dense[0]))]
            )
    return _markdown(["model", "attention", "loss, second half", "over dense"], body)


def _settings(rows: Rows) -> str:
    dense, usual = _dense(rows, "setting"), rows.of("setting", name="usual")
    if dense is None or not usual:
        return ""
    body = []
    for row in rows.of("setting"):
        if row["name"] not in ("dense", "usual"):
            body.append([row["name"], _signed(difference(row, dense)), _signed(difference(row, usual[0]))])
    settings = usual[0]["settings"]
    first = [
        f"usual: top_k={settings['top_k']}, sink_pages=1, recent_pages={settings['recent_pages']}",
        _signed(difference(usual[0], dense)),
        "",
    ]
    return _markdown(["changed", "loss over dense", "against the usual"], [first, *body])


def _variants(rows: Rows) -> str:
    measured = sorted({(row["tokens"], row["top_k"]) for row in rows.of("variant") if "top_k" in row})
    head, body = ["selection"], [[f"{name}: {meaning}"] for name, (_, meaning) in VARIANTS.items()]
    for tokens, top_k in measured:
        dense = _dense(rows, "variant", tokens=tokens)
        head.append(f"loss over dense, {tokens:,} tokens, top {top_k}")
        for cells, name in zip(body, VARIANTS, strict=True):
            found = rows.of("variant", name=name, tokens=tokens)
            cells.append(_signed(difference(found[0], dense)) if found and dense else "")
    for key, title in (
        ("covered", "% of all mass"),
        ("of_candidates", "% of candidates' mass"),
        ("recall", "% recall"),
    ):
        head.append(title)
        for cells, name in zip(body, VARIANTS, strict=True):
            row = _usual_mass(rows, name, measured[-1][1]) if measured else None
            cells.append(f"{100 * statistics.fmean(row[key]):.1f}" if row else "")
    return _markdown(head, body) if measured else ""


def _usual_mass(rows: Rows, variant: str, top_k: int) -> Row | None:
    """The row at the page size and query block that all variants were looked at."""
    found = [row for row in rows.of("mass", variant=variant, top_k=top_k) if row["q_block"] == 128]
    pages = {row["page"] for row in rows.of("mass", variant="q1")}
    found = [row for row in found if row["page"] in pages]
    return found[0] if found else None


def _mass(rows: Rows) -> str:
    usual = rows.of("setting", name="usual")
    top_k = usual[0]["top_k"] if usual else None
    shown = {"product": "selected", "causal": "`causal_selection`", "oracle": "best possible"}
    body = []
    for row in rows.of("mass", top_k=top_k):
        if row["variant"] in shown:
            q_block = row["q_block"] if row["q_block"] > 1 else "none: each query its own list"
            values = [f"{100 * statistics.fmean(row[key]):.1f}" for key in ("covered", "of_candidates", "recall")]
            worst = min(row["covered"])
            worst_cell = f"{100 * worst:.1f} (layer {row['covered'].index(worst)})"
            body.append([row["page"], q_block, shown[row["variant"]], *values, worst_cell])
    body.sort(key=lambda cells: (cells[0], str(cells[1]), cells[2]))
    head = ["page", "q_block", f"{top_k} pages", "% of all mass", "% of candidates' mass", "% recall", "worst layer"]
    return _markdown(head, body)


def _facts(rows: Rows) -> str:
    body = []
    for row in sorted(rows.of("facts"), key=lambda row: (row["run"], row["seed"], row["step"], row["evaluated"])):
        exact = row["exact"]
        near = [x for x, depth in zip(exact, row["depth"], strict=True) if depth > row["tokens"] // 2]
        far = [x for x, depth in zip(exact, row["depth"], strict=True) if depth <= row["tokens"] // 2]
        shares = [f"{100 * statistics.fmean(part):.1f}" if part else "" for part in (exact, far, near)]
        asked = "dense" if row["evaluated"] == "dense" else "**sparse**"
        body.append([row["run"], row["seed"], row["step"], asked, f"{statistics.fmean(row['answers']):.4f}", *shares])
    head = ["trained", "seed", "steps", "asked with", "loss per token", "% exact", "first half", "second half"]
    return _markdown(head, body)


def _curves(rows: Rows) -> str:
    body = []
    for end in sorted(rows.of("curve_end"), key=lambda row: (row["seed"], row["run"])):
        run, seed = end["run"], end["seed"]
        last = max((row["step"] for row in rows.of("curve_evaluation", run=run, seed=seed)), default=0)
        cells: list[Any] = [run, seed, last]
        for evaluated in ("dense", "sparse"):
            found = rows.of("curve_evaluation", run=run, seed=seed, step=last, evaluated=evaluated)
            cells.append(f"{statistics.fmean(found[0]['loss']):.4f}" if found else "")
        base = rows.of("curve_evaluation", run="dense", seed=seed, step=last, evaluated="dense")
        own = rows.of("curve_evaluation", run=run, seed=seed, step=last, evaluated="dense")
        cells.append(_signed(difference(own[0], base[0], "loss")) if base and own and run != "dense" else "")
        longer = rows.of("curve_end", run="dense", seed=seed)
        cells.append(f"{statistics.fmean(end['loss']):.4f}")
        cells.append(_signed(difference(end, longer[0], "loss")) if longer and run != "dense" else "")
        body.append(cells)
    lengths = {(row["tokens"], row["evaluated_tokens"]) for row in rows.of("curve_end")}
    short, long = next(iter(lengths), (0, 0))
    head = ["trained", "seed", "steps", f"held-out loss at {short:,}, dense", "**sparse**", "over dense training"]
    return _markdown([*head, f"at {long:,}, dense", "over dense training"], body)


def _setup(rows: Rows) -> str:
    seen: list[str] = []
    for row in rows.of("setup"):
        names = ("gpu", "python", "torch", "triton", "transformers", "peft", "model", "weights", "texts")
        text = ", ".join(f"{name} {row[name]}" for name in names if name in row)
        text += f"; {'with' if row.get('liger') else 'without'} Liger"
        if text not in seen:
            seen.append(text)
    return "\n".join(f"* {text}" for text in seen)


TABLES: dict[str, Callable[[Rows], str]] = {
    "setup": _setup,
    "loss-native": lambda rows: _grid(rows, "code", longest=False),
    "loss-long": lambda rows: _grid(rows, "code", longest=True),
    "loss-prose": lambda rows: _grid(rows, "prose", longest=True),
    "gradients": _gradients,
    "after-training": _after,
    "context": _context,
    "settings": _settings,
    "variants": _variants,
    "mass": _mass,
    "facts": _facts,
    "curves": _curves,
}


if __name__ == "__main__":
    sys.exit(main())
