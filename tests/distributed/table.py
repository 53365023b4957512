"""``python -m tests.distributed.table [FILE ...]``: run every distributed equality test and write the docs' table.

With names of test files, only these are run again; the results of the others stay.

Results go to ``results.json`` beside this file, and from there into ``docs/distributed.md`` between two markers.
`test_table` fails when a case of the grid is not in the results, or the document does not show them.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_zero_matrix import CASES, ENGINES, EXTRAS, ROWS, WEIGHTS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
DOCUMENT = HERE.parents[1] / "docs" / "distributed.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
GRID = "test_zero_matrix.py"
OTHERS = ("test_zero_special.py", "test_engine_step.py", "test_self_test.py", "test_sparse.py")
PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "peft")
_GRID_TEST = "test_equals_one_process_on_the_union"


class _Recorder:
    """A pytest plugin that keeps the outcome of every test."""

    def __init__(self) -> None:
        self.grid: dict[str, dict[str, Any]] = {}
        self.others: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when != "call" and report.passed):
            return
        path, _, test = report.nodeid.partition("::")
        name, _, variant = test.removesuffix("]").partition("[")
        if name == _GRID_TEST:
            self.grid[variant] = {"outcome": report.outcome, **dict(report.user_properties)}
        else:
            self.others.setdefault(f"{Path(path).name}::{name}", {})[variant] = report.outcome


def render(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"{_count(results)} with {versions}. Two gloo processes on a CPU, fp32, against one process.",
        "",
        f"Passed of tested ({', '.join(EXTRAS)}), and the largest relative error of a parameter after two SGD steps:",
        "",
        f"| | {' | '.join(ROWS)} |",
        f"|---|{'---|' * len(ROWS)}",
    ]
    for engine in ENGINES:
        for weights in WEIGHTS:
            cells = [_cell(results["grid"], engine, weights, rows) for rows in ROWS]
            lines.append(f"| {engine}, {weights} | {' | '.join(cells)} |")
    lines += ["", "| beyond the grid | passed |", "|---|---|"]
    for test, variants in sorted(results["others"].items()):
        passed = [variant for variant, outcome in variants.items() if outcome == "passed"]
        name = test.partition("::test_")[2].replace("_", " ")
        lines.append(f"| {name} | {len(passed)} of {len(variants)} |")
    return "\n".join(lines)


def shown(document: str) -> str:
    """What a document has between the markers."""
    return document.partition(BEGIN)[2].partition(END)[0].strip()


def _cell(grid: dict[str, dict[str, Any]], engine: str, weights: str, rows: str) -> str:
    cases = [str(case) for case in CASES if (case.engine, case.weights, case.rows) == (engine, weights, rows)]
    tested = [grid[case] for case in cases if case in grid]
    passed = [result for result in tested if result["outcome"] == "passed"]
    worst = max((result["error"] for result in passed), default=float("nan"))
    return f"{len(passed)} of {len(tested)}, {worst:.0e}"


def _count(results: dict[str, Any]) -> str:
    outcomes = [result["outcome"] for result in results["grid"].values()]
    outcomes += [outcome for variants in results["others"].values() for outcome in variants.values()]
    return f"{outcomes.count('passed')} of {len(outcomes)} passed"


def _run(files: Iterable[str]) -> dict[str, Any]:
    recorder = _Recorder()
    status = pytest.main(["-q", "-m", "slow or not slow", *(str(HERE / name) for name in files)], plugins=[recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"The tests did not run to their end ({status!r}); nothing was written.")
    versions = {"Python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}
    return {"versions": versions, "grid": recorder.grid, "others": recorder.others}


def main(files: list[str]) -> int:
    """Run, write, and return 1 where a test has not passed."""
    results = _run(files or (GRID, *OTHERS))
    if files:
        old = json.loads(RESULTS.read_text(encoding="utf-8"))
        kept = {test: found for test, found in old["others"].items() if test.partition("::")[0] not in files}
        results["others"] = kept | results["others"]
        results["grid"] = results["grid"] or old["grid"]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    document = DOCUMENT.read_text(encoding="utf-8")
    before, rest = document.split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{after}", encoding="utf-8")
    print(_count(results))
    failed = [name for name, result in results["grid"].items() if result["outcome"] != "passed"]
    failed += [test for test, variants in results["others"].items() if set(variants.values()) != {"passed"}]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
