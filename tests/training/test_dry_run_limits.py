"""A dry run refuses what the run would be refused for by its settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oomb_accel.cli import main
from oomb_accel.host import HostLimits
from oomb_accel.offload import Offload
from oomb_accel.plan import GPUS
from oomb_accel.plan.sizes import GIB
from oomb_accel.training import dry_run


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


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> HostLimits:
    """With a GPU, and 64 GiB of host memory of which 40 are free."""
    limits = HostLimits(total_bytes=64 * GIB, system_available_bytes=40 * GIB)
    properties = type("Properties", (), {"name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 140 * GIB})
    monkeypatch.setattr(dry_run, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("oomb_accel.training.dry_run.host_limits", lambda: limits)
    monkeypatch.setattr("oomb_accel.offload.host_limits", lambda: limits)
    return limits


def test_a_dry_run_refuses_the_memory_that_the_engine_refuses(
    small_machine: HostLimits,
    settings: dict[str, Any],
    write_recipe: Callable[[dict[str, Any]], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def dry(*options: str) -> tuple[int, str]:
        code = main(["train", str(write_recipe(settings)), "--dry_run", *options])
        captured = capsys.readouterr()
        return code, " ".join((captured.err + captured.out).split())

    code, text = dry("--oomb.host_memory_gib", "37")
    with pytest.raises(ValueError) as engine:
        Offload(37.0)._known_budget()
    assert code == 2 and " ".join(str(engine.value).split()) in text and "Set host_memory_gib=36 or less" in text
    assert dry("--oomb.host_memory_gib", "36")[0] == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    code, text = dry("--oomb.host_memory_gib", "36")
    assert code == 2 and "to all its ranks" in text and "host_memory_gib=18 or less" in text
    assert dry("--oomb.host_memory_gib", "18")[0] == 0
    assert dry("--oomb.host_memory_gib", "300", "--gpu", "h100")[0] == 0  # of a machine that nobody knows
    code, text = dry("--oomb.device_pages_gib", "150")
    assert code == 2 and "device_pages_gib is more than the GPU has" in text and "--gpu_gib" not in text
    assert dry("--oomb.device_pages_gib", "90", "--gpu", "h100")[0] == 2
    assert GPUS["h100"].memory_bytes < 90 * GIB


def test_a_dry_run_without_a_gpu_tells_what_this_machine_would_refuse(
    settings: dict[str, Any],
    write_recipe: Callable[[dict[str, Any]], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is estimated for another one."""
    limits = HostLimits(total_bytes=64 * GIB, system_available_bytes=40 * GIB)
    monkeypatch.setattr("oomb_accel.training.dry_run.host_limits", lambda: limits)
    monkeypatch.setattr(dry_run, "on_gpu", lambda: False)
    options = ["--dry_run", "--json", "--oomb.host_memory_gib"]
    path = str(write_recipe(settings))
    assert main(["train", path, *options, "100"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("this machine would be refused: host_memory_gib is more than this machine can give" in n for n in notes)
    assert main(["train", path, *options, "30"]) == 0
    assert not any("would be refused" in note for note in json.loads(capsys.readouterr().out)["notes"])
