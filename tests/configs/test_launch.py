"""The commands of the README on two CPU ranks: the same run as one process over all documents, to 1e-5.

The reference is plain full attention in one process, by the same recipe with chunks switched off.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState

from oomb_accel.training import Recipe, train
from tests.configs.launching import LAUNCH, ROOT, Trained, launch_forked, run
from tests.distributed.ranks import needs_deepspeed
from tests.harness.folders import save_tiny_model
from tests.harness.ports import free_port

pytestmark = needs_deepspeed

TEXT = "a lazy dog sleeps while the quick brown fox jumps over it, and again. " * 2
LENGTHS = (100, 37, 12, 61)
"""Bytes of the documents: 7, 3, 1 and 4 chunks, and as many ranks as there are do not share them evenly."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe whose every step takes all documents."""
    folder = tmp_path_factory.mktemp("launch")
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps({"text": TEXT[start : start + n]}) + "\n" for start, n in enumerate(LENGTHS)))
    return {
        "model_name_or_path": str(save_tiny_model(folder / "model", "qwen3")),
        "torch_dtype": "float32",
        "mixed_precision": "no",
        "data_path": str(data),
        "max_steps": 3,
        "learning_rate": 0.001,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.05,  # it clips
        "lora_r": 4,
        "oomb": {"chunk_tokens": 16, "page_tokens": 4},
    }


@pytest.fixture(scope="module")
def wanted(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("reference") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        plain = settings | {"output_dir": str(out), "gradient_accumulation_steps": len(LENGTHS)}
        train(Recipe.from_yaml(write(plain | {"oomb": {"enabled": False}}, out.parent)))
        AcceleratorState._reset_state(reset_partial_state=True)
    trained = trained_at(out, settings)
    assert all(row["grad_norm"] > settings["max_grad_norm"] for row in trained.rows)
    return trained


def write(recipe: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def trained_at(folder: Path, settings: dict[str, Any]) -> Trained:
    return Trained.at(folder, settings["model_name_or_path"], TEXT)


def for_ranks(number: int, settings: dict[str, Any], folder: Path) -> Path:
    """All documents in every step, by as many micro-batches as that takes."""
    micro_batches = max(1, len(LENGTHS) // number)
    return write(settings | {"output_dir": str(folder / "out"), "gradient_accumulation_steps": micro_batches}, folder)


@pytest.mark.timeout(300)
def test_accelerate_launch(settings: dict[str, Any], wanted: Trained, tmp_path: Path) -> None:
    recipe = for_ranks(2, settings, tmp_path)
    config = ["--config_file", "configs/accelerate/ddp.yaml", "--main_process_port", str(free_port())]
    printed = run([*LAUNCH, *config, "launch/finetune.py", str(recipe)], tmp_path)
    assert "ranks: 2, replicas" in printed
    trained_at(tmp_path / "out", settings).assert_same(wanted)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("zero1", "ZeRO 1"), ("zero2", "ZeRO 2"), ("zero3", "ZeRO 3"), ("zero3_offload", "ZeRO 3")],
)
def test_accelerate_launch_in_forked_ranks(
    name: str, strategy: str, settings: dict[str, Any], wanted: Trained, tmp_path: Path
) -> None:
    """What Accelerate makes of the file, in ranks that need not import everything again; under SLURM they do."""
    recipe = for_ranks(2, settings, tmp_path)
    printed = launch_forked(["--config_file", f"configs/accelerate/{name}.yaml"], [str(recipe)], tmp_path)
    assert f"ranks: 2, {strategy}" in printed
    trained_at(tmp_path / "out", settings).assert_same(wanted)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [4, 8])
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_host_full_of_gpus(name: str, number: int, settings: dict[str, Any], wanted: Trained, tmp_path: Path) -> None:
    """A document per rank, and with eight ranks four that have none."""
    recipe = for_ranks(number, settings, tmp_path)
    config = ["--config_file", f"configs/accelerate/{name}.yaml", "--num_processes", str(number)]
    command = [*LAUNCH, *config, "--main_process_port", str(free_port()), "launch/finetune.py", str(recipe)]
    assert f"ranks: {number}, " in run(command, tmp_path)
    trained_at(tmp_path / "out", settings).assert_same(wanted)


STUBS = {
    # Two tasks, as on two machines: both see the variables that srun gives to a task.
    "srun": """#!/usr/bin/env bash
set -u
while [[ "$1" == --* ]]; do echo "srun got $1"; shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait "$first"; one=$?
wait "$second"; two=$?
exit $((one + two))
""",
    "scontrol": """#!/usr/bin/env bash
[ "$*" = "show hostnames near[1-2]" ] && printf '127.0.0.1\\nnear2\\n'
""",
}


def slurm(folder: Path, **variables: str) -> dict[str, str]:
    """A SLURM job of two machines with one GPU each, both of them this machine."""
    for name, text in STUBS.items():
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": LAUNCH[0],
        "SLURM_JOB_ID": str(free_port() - 20000 + 1230000),
        "SLURM_JOB_NODELIST": "near[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_GPUS_PER_NODE": "h200:1",
        **variables,
    }


@pytest.mark.timeout(300)
def test_two_machines_under_slurm(settings: dict[str, Any], wanted: Trained, tmp_path: Path) -> None:
    """Two launchers with --num_machines 2 that find each other, and one run."""
    recipe = for_ranks(2, settings, tmp_path)
    variables = slurm(tmp_path, ACCELERATE_CONFIG="configs/accelerate/zero3_two_machines.yaml")
    printed = run(["bash", "launch/slurm.sh", "launch/finetune.py", str(recipe)], tmp_path, variables)
    for words in ("2 machine(s) of 1 GPU(s)", "srun got --ntasks=2", "srun got --cpus-per-task=2", "ranks: 2, ZeRO 3"):
        assert words in printed
    assert printed.count("step 3/3") == 1  # one voice for both machines
    trained_at(tmp_path / "out", settings).assert_same(wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"SLURM_JOB_ID": ""}, "usage: sbatch"), ({"SLURM_GPUS_PER_NODE": ""}, "--gpus-per-node 8")],
    ids=["outside a job", "no gpus"],
)
def test_slurm_script_says_what_is_missing(changes: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=words):
        run(["bash", "launch/slurm.sh", "launch/finetune.py", "recipe.yaml"], tmp_path, slurm(tmp_path, **changes))


def test_scripts_are_executable() -> None:
    assert all(os.access(path, os.X_OK) for path in (ROOT / "launch").glob("*.sh"))
