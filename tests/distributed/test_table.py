"""The results in the document are complete, have all passed, and are those of ``results.json``."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from tests.distributed.table import DOCUMENT, HERE, OTHERS, RESULTS, render, shown
from tests.distributed.test_zero_matrix import CASES

REMEDY = "run python -m tests.distributed.table"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def test_every_case_of_the_grid_has_passed(results: dict[str, Any]) -> None:
    assert results["grid"].keys() == {str(case) for case in CASES}, REMEDY
    assert {name for name, result in results["grid"].items() if result["outcome"] != "passed"} == set(), REMEDY


def test_every_other_test_has_passed(results: dict[str, Any]) -> None:
    wanted = {
        f"{name}::{node.name}"
        for name in OTHERS
        for node in ast.parse((HERE / name).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert wanted <= results["others"].keys(), REMEDY
    bad = [test for test in wanted if set(results["others"][test].values()) != {"passed"}]
    assert bad == [], REMEDY


def test_the_document_shows_the_results(results: dict[str, Any]) -> None:
    assert shown(DOCUMENT.read_text(encoding="utf-8")) == render(results), REMEDY
