"""Every recipe, DeepSpeed file and preset trains: two CPU ranks, a tiny model of the same kind, short documents.

Real launches with the Accelerate files are in test_launch.py.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from oomb_accel.integrations.rope import check_length
from oomb_accel.training import Recipe, train
from oomb_accel.training.model import override_rope
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.harness.batches import documents_of, padded
from tests.harness.folders import save_tiny_model
from tests.harness.models import tiny_model, with_lora

pytestmark = needs_deepspeed

CONFIGS = Path(__file__).parents[2] / "configs"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# As the models are on the hub, where it matters here.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", {"max_position_embeddings": 32768}),
    "Qwen/Qwen2.5-7B-Instruct-1M": ("qwen2", {"max_position_embeddings": 1010000}),
    "Qwen/Qwen3-1.7B-Base": ("qwen3", {"max_position_embeddings": 32768, "tie_word_embeddings": True}),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen3", {"max_position_embeddings": 262144, "tie_word_embeddings": True}),
    "Qwen/Qwen3-8B": ("qwen3", {"max_position_embeddings": 40960}),
    "Qwen/Qwen3-14B": ("qwen3", {"max_position_embeddings": 40960}),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("qwen3_moe", {"max_position_embeddings": 262144}),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", {"max_position_embeddings": 131072, "rope_parameters": LLAMA3_ROPE}),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama", {"max_position_embeddings": 131072, "rope_parameters": LLAMA3_ROPE}),
    "meta-llama/Llama-3.2-1B": (
        "llama",
        {
            "max_position_embeddings": 131072,
            "rope_parameters": LLAMA3_ROPE | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": ("mistral", {"max_position_embeddings": 131072, "sliding_window": None}),
    "demo/model": ("llama", {"max_position_embeddings": 8192, "tie_word_embeddings": True}),
}
RUNS = {  # recipe: DeepSpeed file, or None for plain data parallelism
    "demo.yaml": None,
    "recipes/llama-3.1-8b-lora-64k.yaml": "zero1",
    "recipes/llama-3.2-1b-full-64k.yaml": "zero2",
    "recipes/llama-3.3-70b-lora-32k.yaml": "zero3",
    "recipes/mistral-nemo-12b-lora-128k.yaml": None,
    "recipes/qwen2.5-7b-1m-lora-512k.yaml": "zero2",
    "recipes/qwen2.5-7b-lora-128k.yaml": "zero3_offload",
    "recipes/qwen3-1.7b-full-32k.yaml": "zero3_offload",
    "recipes/qwen3-14b-lora-64k.yaml": "zero2",
    "recipes/qwen3-30b-a3b-lora-64k.yaml": "zero3",
    "recipes/qwen3-4b-lora-256k.yaml": "zero1",
    "recipes/qwen3-8b-lora-128k.yaml": "zero2",
}
SMALL = {"OOMB_CHUNK_TOKENS": "16", "OOMB_PAGE_TOKENS": "4"}


def test_every_recipe_and_deepspeed_file_is_run() -> None:
    assert set(RUNS) == {"demo.yaml"} | {f"recipes/{path.name}" for path in (CONFIGS / "recipes").glob("*.yaml")}
    files = {path.stem for path in (CONFIGS / "deepspeed").glob("*.json") if not path.stem.startswith("standalone")}
    assert set(RUNS.values()) - {None} == files


@pytest.mark.parametrize("name", RUNS)
def test_recipe_stays_within_the_range_of_its_model(name: str) -> None:
    recipe = Recipe.from_yaml(CONFIGS / name)
    model_type, settings = MODELS[recipe.model_name_or_path]
    config = AutoConfig.for_model(model_type, **settings)
    assert recipe.max_length is not None
    if recipe.rope_parameters is not None:
        with pytest.raises(ValueError, match="longer than the range"):
            check_length(config, [recipe.max_length])
        override_rope(config, recipe.rope_parameters)
    check_length(config, [recipe.max_length])


def _train(rank: int, recipe: str, options: list[str]) -> dict[str, Any]:
    return train(Recipe.from_yaml(recipe, options)).to_dict()


@pytest.mark.parametrize("name", RUNS)
def test_recipe_trains(name: str, tmp_path: Path) -> None:
    recipe = Recipe.from_yaml(CONFIGS / name)
    model_type, settings = MODELS[recipe.model_name_or_path]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": "abc def " * times}) + "\n" for times in (9, 3)))
    replaced = {
        "model_name_or_path": save_tiny_model(tmp_path / "model", model_type, **settings),
        "data_path": data,
        "output_dir": tmp_path / "out",
        "num_train_epochs": "null",
        "max_steps": 1,
        "warmup_steps": 0,
        "eval_last_tokens": min(recipe.eval_last_tokens, 8),
        "mixed_precision": "bf16",  # what "auto" is on a GPU
        "oomb.chunk_tokens": 16,
        "oomb.page_tokens": 4,
    }
    environment = {}
    if RUNS[name] is not None:
        file = CONFIGS / "deepspeed" / f"{RUNS[name]}.json"
        environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    options = [f"--{key}={value}" for key, value in replaced.items()]
    arguments = (str(CONFIGS / name), options)
    first, second = run_ranks(_train, *arguments, folder=tmp_path / "ranks", environment=environment)
    assert first["steps"] == second["steps"] == 1
    assert first["first_loss"] == second["first_loss"] and math.isfinite(first["first_loss"])
    assert (tmp_path / "out" / ("model.safetensors" if recipe.lora_r == 0 else "adapter_model.safetensors")).is_file()


def _one_step(rank: int, config: dict[str, Any], preset: str | None) -> dict[str, torch.Tensor]:
    """A step through ``oomb_accel.deepspeed.initialize``; the weights after it."""
    import oomb_accel

    if preset is not None:
        os.environ["OOMB_CONFIG"] = preset
    model = with_lora(tiny_model())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine, *_ = oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    documents = documents_of(50, 7)
    engine.backward(engine(**padded(documents[rank : rank + 1]).batch).loss)
    engine.step()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}


def check_step(config: dict[str, Any], preset: Path | None, folder: Path) -> None:
    before = {name: p for name, p in with_lora(tiny_model()).named_parameters() if p.requires_grad}
    path = None if preset is None else str(preset)
    first, second = run_ranks(_one_step, config, path, folder=folder, environment=SMALL)
    assert before.keys() == first.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert (weight.float() - before[name]).abs().max() > 1e-3


def test_standalone_deepspeed_file_trains(tmp_path: Path) -> None:
    check_step(json.loads((CONFIGS / "deepspeed" / "standalone_zero2.json").read_text()), None, tmp_path)


@pytest.mark.parametrize("preset", sorted((CONFIGS / "oomb").glob("*.yaml")), ids=lambda path: path.stem)
def test_oomb_preset_trains(preset: Path, tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "deepspeed" / "standalone_zero2.json").read_text())
    del config["oomb"]  # the preset is what switches it on
    check_step(config, preset, tmp_path)
