"""A value of an earlier version is refused with what does the same now, wherever it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oomb_accel import OombConfig
from oomb_accel.cli import main
from oomb_accel.config import FORMER_VALUES
from oomb_accel.sources import Source, from_text
from oomb_accel.training.recipe import Recipe

RECIPE: dict[str, Any] = {"model_name_or_path": "m", "data_path": "d.txt", "output_dir": "out"}


@pytest.mark.parametrize("place", ["python", "dict", "json", "environment", "recipe", "option", "estimate"])
def test_outputs_on_the_host(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted: Any = {"keep_outputs": "host"}
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(RECIPE | ({"oomb": wanted} if place == "recipe" else {})))
    options = ["--oomb.keep_outputs", "host"] if place == "option" else []
    try:
        if place == "python":
            OombConfig(**wanted)
        elif place == "dict":
            OombConfig.from_dict(wanted)
        elif place == "json":
            Source("ds.json", "json", wanted)
        elif place == "environment":
            from_text("keep_outputs", "host", "OOMB_KEEP_OUTPUTS")
        elif place == "estimate":
            assert main(["estimate", "qwen2.5-7b", "--keep_outputs", "host"]) == 2
            raise ValueError(capsys.readouterr().err)
        else:
            Recipe.from_yaml(path, options)
    except ValueError as error:
        text = " ".join(str(error).split())
    else:
        pytest.fail("the value was accepted")
    assert "Set keep_outputs: auto (the default), which does this now" in text and "host_memory_gib: N" in text


def test_what_is_named_instead_is_allowed() -> None:
    for name, value in FORMER_VALUES:
        with pytest.raises(ValueError, match="is not allowed"):
            OombConfig.from_dict({name: value})
    OombConfig(keep_outputs="auto", host_memory_gib=16)
