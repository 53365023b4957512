"""A dry run refuses what the run would be refused for by its settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.cli import main


@pytest.mark.parametrize(
    ("oomb", "gpu", "said"),
    [
        ({"page_dtype": "float8"}, "a100", "no 8-bit floats"),
        ({"base_dtype": "float8"}, "a100", "no 8-bit floats"),
        ({"attention": "sparse", "page_tokens": 24, "top_k": 2}, "h100", "page_tokens must be a multiple of 16"),
        ({"attention": "sparse", "dense_layers": [9], "top_k": 2}, None, "a layer that the model does not have"),
    ],
)
def test_a_dry_run_refuses_it(
    settings: dict[str, Any],
    write_recipe: Callable[[dict[str, Any]], Path],
    oomb: dict[str, Any],
    gpu: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(write_recipe(settings | {"oomb": settings.get("oomb", {}) | oomb}))
    assert main(["train", path, "--dry_run", *(["--gpu", gpu] if gpu else [])]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_on_a_cpu_says_what_a_gpu_would_refuse(
    settings: dict[str, Any], write_recipe: Callable[[dict[str, Any]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run itself computes by the definitions, which take any page."""
    oomb = settings.get("oomb", {}) | {"attention": "sparse", "page_tokens": 24, "top_k": 2}
    assert main(["train", str(write_recipe(settings | {"oomb": oomb})), "--dry_run", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("a run on a GPU would be refused: page_tokens must be a multiple of 16" in note for note in notes)
