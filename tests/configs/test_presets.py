"""Every preset is read by the library that it is for, means what it says, and has no line without effect."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DeepSpeedPlugin, DistributedType
from accelerate.utils import launch as launch_environment

from oomb_accel.config import OombConfig
from oomb_accel.sources import from_deepspeed, from_yaml, resolve
from oomb_accel.training.recipe import Recipe
from tests.distributed.ranks import needs_deepspeed

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
ACCELERATE = sorted((CONFIGS / "accelerate").glob("*.yaml"))
DEEPSPEED = sorted((CONFIGS / "deepspeed").glob("*.json"))
PRESETS = sorted((CONFIGS / "oomb").glob("*.yaml"))
RECIPES = [CONFIGS / "demo.yaml", *sorted((CONFIGS / "recipes").glob("*.yaml"))]
STAGES = {"ddp": None, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3, "zero3_two_machines": 3}


def name_of(path: Path) -> str:
    return path.stem


def validated(path: Path, *flags: str) -> argparse.Namespace:
    """What ``accelerate launch --config_file path`` makes of file and flags before it starts anything."""
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(path), *flags, "script.py"])
    return launch._validate_launch_command(arguments)[0]


def handed_on(arguments: argparse.Namespace, ds_fields: str = "") -> dict[str, str]:
    """The environment that Accelerate's launcher gives to the ranks."""
    if not arguments.use_deepspeed:
        return launch_environment.prepare_multi_gpu_env(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ds_fields
    return launch_environment.prepare_deepspeed_cmd_env(arguments)[1]


@contextlib.contextmanager
def rank_environment(variables: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            if name.startswith("ACCELERATE_"):
                patch.setenv(name, value)
        yield


def test_the_files_that_people_look_for_are_there() -> None:
    assert {path.stem for path in ACCELERATE} == set(STAGES)
    assert {path.stem for path in DEEPSPEED} >= {"zero1", "zero2", "zero3", "zero3_offload"}
    assert len(RECIPES) > 8 and len(PRESETS) > 3


@pytest.mark.parametrize("path", ACCELERATE, ids=name_of)
def test_accelerate_reads_it(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    stage = STAGES[path.stem]
    assert config.distributed_type == (DistributedType.MULTI_GPU if stage is None else DistributedType.DEEPSPEED)
    # Accelerate ignores a misspelt key here without a word, and one that a flag's default always beats.
    known = vars(launch.launch_command_parser().parse_args(["script.py"]))
    assert set(config.deepspeed_config) <= set(known)
    ignored = {key for key in yaml.safe_load(path.read_text()) if key in known and known[key] is not None}
    assert not ignored


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize("path", ACCELERATE, ids=name_of)
def test_any_number_of_gpus(path: Path, num_processes: int) -> None:
    flags = ("--num_processes", str(num_processes), "--num_machines", "1", "--main_process_port", "0")
    arguments = validated(path, *flags)
    variables = handed_on(arguments)
    assert (arguments.nproc_per_node, arguments.num_machines) == (str(num_processes), 1)
    assert variables.get("ACCELERATE_USE_DEEPSPEED") == (None if STAGES[path.stem] is None else "true")


@pytest.mark.parametrize("path", ACCELERATE, ids=name_of)
def test_any_number_of_machines(path: Path) -> None:
    """Every machine starts its own ranks (torchrun), as the comments say: no ssh."""
    flags = ("--num_machines", "2", "--num_processes", "16", "--machine_rank", "1")
    arguments = validated(path, *flags, "--main_process_ip", "10.0.0.1", "--main_process_port", "29500")
    handed_on(arguments)
    got = (arguments.nproc_per_node, arguments.nnodes, arguments.node_rank, arguments.rdzv_endpoint)
    assert got == ("8", "2", 1, "10.0.0.1:29500")


def test_two_machines_by_file() -> None:
    path = CONFIGS / "accelerate" / "zero3_two_machines.yaml"
    flags = ("--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29500")
    arguments = validated(path, *flags)
    handed_on(arguments)
    assert (arguments.nproc_per_node, arguments.nnodes) == ("8", "2")


@needs_deepspeed
@pytest.mark.parametrize("path", ACCELERATE, ids=name_of)
def test_ranks_get_the_stage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stage = STAGES[path.stem]
    arguments = validated(path, "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0")
    fields = ",".join(load_config_from_file(str(path)).deepspeed_config)
    variables = handed_on(arguments, fields)
    # A DeepSpeed file decides about precision, and Accelerate refuses a second word on it.
    from_file = "deepspeed_config_file" in fields
    assert variables["ACCELERATE_MIXED_PRECISION"] == ("no" if from_file else "bf16")
    if stage is None:
        return
    with rank_environment(variables):
        plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == stage
    assert plugin.zero3_init_flag == (stage == 3)
    assert plugin.offload_optimizer_device == ("cpu" if path.stem == "zero3_offload" else "none")
    assert plugin.zero3_save_16bit_model == (stage == 3)
    check_deepspeed_config(plugin.deepspeed_config)


@needs_deepspeed
@pytest.mark.parametrize("path", DEEPSPEED, ids=name_of)
def test_deepspeed_reads_it(path: Path) -> None:
    values = json.loads(path.read_text())
    # DeepSpeed takes a misspelt key at the top without a word.
    constants = vars(importlib.import_module("deepspeed.runtime.constants")).values()
    known = {"zero_optimization", "oomb", *(text for text in constants if isinstance(text, str))}
    assert set(values) <= known
    if path.stem.startswith("standalone"):
        assert "auto" not in path.read_text()
    config = check_deepspeed_config(values)
    assert config.zero_optimization_stage == int(re.findall(r"zero(\d)", path.stem)[0])
    assert config.zero_allow_untested_optimizer or path.stem in ("zero1", "zero2", "zero3")  # Accelerate sets it there
    assert resolve(*from_deepspeed(str(path))).config.enabled


def check_deepspeed_config(values: dict[str, Any]) -> Any:
    """What DeepSpeed's own class makes of the values, after those that Accelerate and Trainer fill in.

    Nothing in it may start a compiler: DeepSpeed builds its own optimizers at their first use.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    filled = json.loads(json.dumps(values))
    for name, value in (
        ("gradient_accumulation_steps", 1),
        ("gradient_clipping", 1.0),
        ("train_micro_batch_size_per_gpu", 1),
    ):
        if filled.get(name, "auto") == "auto":
            filled[name] = value
    filled.pop("train_batch_size", None)
    zero = filled["zero_optimization"]
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        if zero.get(name) == "auto":
            zero[name] = 4096
    for precision in ("bf16", "fp16"):
        if filled.get(precision, {}).get("enabled") == "auto":
            filled[precision]["enabled"] = True
    filled["steps_per_print"] = 10
    assert '"auto"' not in json.dumps(filled), "a value that neither Accelerate nor Trainer fills in"
    assert "optimizer" not in filled
    config = DeepSpeedConfig(filled)
    offload = config.zero_config.offload_optimizer
    if offload is not None and offload.device != "none":
        assert config.zero_force_ds_cpu_optimizer is False
    return config


@pytest.mark.parametrize("path", PRESETS, ids=name_of)
def test_oomb_preset(path: Path) -> None:
    source = from_yaml(path)
    assert source.values and resolve(source).config.enabled


def test_the_list_of_all_settings_is_complete_and_has_the_defaults() -> None:
    source = from_yaml(CONFIGS / "oomb" / "all_settings.yaml")
    assert set(source.values) == set(OombConfig().to_dict())
    assert resolve(source).config == OombConfig()


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipe(path: Path) -> None:
    recipe = Recipe.from_yaml(path)
    assert recipe.max_length is not None
    rope = recipe.rope_parameters
    if rope is not None:
        assert rope["factor"] * rope["original_max_position_embeddings"] == recipe.max_length
    length = re.search(r"-(\d+)k$", path.stem)
    if length is not None:
        assert recipe.max_length == int(length.group(1)) * 1024
        assert ("-full-" in path.stem) == (recipe.lora_r == 0)
        assert recipe.output_dir == f"out/{path.stem}"


def test_files_that_are_named_exist() -> None:
    """In comments and documents about launching: a command that is copied has to work."""
    texts = [*CONFIGS.rglob("*.yaml"), *CONFIGS.rglob("*.md"), *(ROOT / "launch").glob("*.sh"), ROOT / "README.md"]
    named = {
        (path.relative_to(ROOT), name)
        for path in texts
        for name in re.findall(r"\b(?:configs|launch)/[\w./-]*\w", path.read_text())
    }
    assert len(named) > 30
    missing = {(str(path), name) for path, name in named if not (ROOT / name).exists() and not generated(name)}
    assert not missing


def generated(name: str) -> bool:
    return name.startswith("launch/test_") or "*" in name
