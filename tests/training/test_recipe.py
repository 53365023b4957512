"""Recipes: what is read, and what is refused with which message."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from oomb_accel import OombConfig
from oomb_accel.sources import Source, resolve
from oomb_accel.training.other_names import OTHER_NAMES
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.settings import Setting

Write = Callable[[dict[str, Any]], Path]
ROOT = Path(__file__).parents[2]


def test_yaml_and_both_spellings_of_options(settings: dict[str, Any], write_recipe: Write) -> None:
    path = write_recipe(settings)
    options = ["--lora-r", "8", "--lora_alpha=16", "--oomb.chunk-tokens", "128", "--oomb.deterministic"]
    options += [
        "--lora_target_modules",
        "q_proj,v_proj",
        "--use_rslora",
        "--max_length",
        "null",
        "--use-liger=no",
    ]
    options += ["--rope_parameters", "{rope_type: yarn, factor: 2.0}", "--output_dir", "007"]
    recipe = Recipe.from_yaml(path, options)
    assert (recipe.lora_r, recipe.lora_alpha, recipe.learning_rate) == (8, 16.0, 0.02)
    assert (recipe.oomb.chunk_tokens, recipe.oomb.page_tokens, recipe.oomb.deterministic) == (128, 16, True)
    assert recipe.lora_target_modules == ["q_proj", "v_proj"]
    assert (recipe.use_rslora, recipe.max_length, recipe.use_liger) == (True, None, False)
    assert recipe.rope_parameters == {"rope_type": "yarn", "factor": 2.0}
    assert recipe.output_dir == "007"
    assert Recipe.from_yaml(path, ["--lora_target_modules", "all-linear"]).lora_target_modules == "all-linear"


@pytest.mark.parametrize(
    ("option", "dense_layers"),
    [
        (["--oomb.dense_layers", "0,1,-1"], (0, 1, -1)),
        (["--oomb.dense_layers=[0, -1]"], (0, -1)),
        (["--oomb.dense_layers", "-1"], (-1,)),
        (["--oomb.dense_layers="], ()),
        (["--oomb.dense_layers", "none"], ()),
        (["--oomb.dense-layers", "-1,0"], (-1, 0)),
    ],
)
def test_options_of_sparse_attention(
    settings: dict[str, Any], write_recipe: Write, option: list[str], dense_layers: tuple[int, ...]
) -> None:
    block = {**settings.get("oomb", {}), "attention": "sparse", "dense_layers": [2], "page_budget": 90}
    path = write_recipe(settings | {"oomb": block})
    options = ["--oomb.q_block", "64", "--oomb.page-budget", "none", "--oomb.causal_selection", *option]
    recipe = Recipe.from_yaml(path, options)
    oomb = recipe.oomb
    assert (oomb.attention, oomb.dense_layers, oomb.page_budget) == ("sparse", dense_layers, None)
    assert (oomb.q_block, oomb.causal_selection) == (64, True)
    assert Recipe.from_yaml(path).oomb.dense_layers == (2,)
    assert resolve(*recipe.oomb_sources()).config == oomb


def test_options_of_memory(settings: dict[str, Any], write_recipe: Write) -> None:
    block = {**settings.get("oomb", {}), "device_pages_gib": 40, "host_memory_gib": 1.5}
    path = write_recipe(settings | {"oomb": block})
    assert Recipe.from_yaml(path).oomb.device_pages_gib == 40.0
    oomb = Recipe.from_yaml(
        path, ["--oomb.device-pages-gib", "auto", "--oomb.host_memory_gib=96", "--oomb.offload"]
    ).oomb
    assert (oomb.device_pages_gib, oomb.host_memory_gib, oomb.offload) == ("auto", 96.0, True)


def test_numbers_of_tokens_with_a_unit(settings: dict[str, Any], write_recipe: Write) -> None:
    """In a file, as options and in Python: K is 1,024, M is 1,048,576."""
    block = {"chunk_tokens": "8K", "page_tokens": "0.125k", "span_tokens": "1_024K"}
    path = write_recipe(settings | {"max_length": "1M", "eval_last_tokens": "0.5K", "oomb": block})
    recipe = Recipe.from_yaml(path)
    assert (recipe.max_length, recipe.eval_last_tokens) == (1 << 20, 512)
    assert (recipe.oomb.chunk_tokens, recipe.oomb.page_tokens, recipe.oomb.span_tokens) == (8192, 128, 1 << 20)
    recipe = Recipe.from_yaml(path, ["--max_length", "300K", "--oomb.chunk-tokens=4k", "--eval_last_tokens", "1,000K"])
    assert (recipe.max_length, recipe.oomb.chunk_tokens) == (300 * 1024, 4096)
    assert recipe.eval_last_tokens == 1_024_000
    with pytest.raises(ValueError, match=r"300G[^$]*128K"):
        Recipe.from_yaml(path, ["--max_length", "300G"])
    with pytest.raises(ValueError, match="lora_r"):
        Recipe.from_yaml(path, ["--lora_r", "8K"])  # no tokens
    for text in ("0.3K", "1,2,3K"):
        with pytest.raises(ValueError, match=rf"max_length[^$]*{text}[^$]*128K"):
            Recipe.from_yaml(path, ["--max_length", text])
    with pytest.raises(ValueError, match=r"max_length[^$]*0.3K[^$]*128K"):
        Recipe.from_yaml(write_recipe(settings | {"max_length": "0.3K"}))


def test_all_unknown_settings_at_once(settings: dict[str, Any], write_recipe: Write) -> None:
    """As in a recipe of axolotl: each with what to write instead."""
    others = {"base_model": "m", "sequence_len": 8, "flash_attention": True, "zzz": 1, "chunk_tokens": 64, "lora_rr": 8}
    path = write_recipe(settings | others | {"oomb": {"chunk_token": 64}})
    with pytest.raises(ValueError) as caught:
        Recipe.from_yaml(path, ["--max_seq_length", "300K", "--oomb.topk=3"])
    first, *found, last = str(caught.value).splitlines()
    assert first == f"9 settings are not known in {path}." and "docs/migration.md" in last
    assert {line.strip() for line in found} == {
        "key 'base_model': Set model_name_or_path.",
        "key 'sequence_len': Set max_length.",
        "key 'flash_attention': Leave it out; oomb.backend chooses the attention kernels.",
        "key 'zzz': nothing is called like it.",
        "key 'chunk_tokens': Set oomb.chunk_tokens instead.",
        "key 'lora_rr': Did you mean 'lora_r'?",
        "key 'chunk_token' in the oomb block: Did you mean 'chunk_tokens'?",
        "option '--max_seq_length' on the command line: Set max_length.",
        "option '--oomb.topk' on the command line: Did you mean '--oomb.top_k'?",
    }


def test_wrong_values_beside_unknown_settings(settings: dict[str, Any], write_recipe: Write) -> None:
    """At once, too: a recipe of axolotl has an optimizer by another name, and a list of datasets."""
    others = {"optimizer": "adamw_bnb_8bit", "bf16": "auto", "oomb": {"attention": "spares"}}
    data = [{"path": "owner/chats", "type": "chat_template"}, {"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}]
    path = write_recipe(settings | others | {"datasets": data})
    with pytest.raises(ValueError) as caught:
        Recipe.from_yaml(path)
    first, *found, _ = str(caught.value).splitlines()
    assert first == f"4 settings are not known or have a wrong value in {path}."
    assert {line.strip() for line in found} == {
        "key 'bf16': Set mixed_precision: bf16, or 'no' on a CPU; auto, the default, does just that.",
        "key 'datasets': Set data_path: [owner/chats, a.jsonl, b.jsonl]",
        "optimizer has a value that is not allowed: Set optimizer: adamw, the only one.",
        "In the oomb block: attention has a value that is not allowed: Did you mean 'sparse'? "
        "Allowed: 'dense' or 'sparse'.",
    }
    with pytest.raises(ValueError, match=r"Unknown key 'datasets'[^$]*Set data_path: a\.txt$"):
        Recipe.from_yaml(write_recipe(settings | {"datasets": [{"path": "a.txt"}]}))


def test_other_names_are_no_settings_of_ours() -> None:
    """And what they point to is one."""
    assert not set(OTHER_NAMES) & set(Setting.of(Recipe))
    for remedy in OTHER_NAMES.values():
        words = re.findall(r"\b[Ss]et (\w+(?:\.\w+)?)", remedy)
        for word in words:
            assert word in Setting.of(Recipe) or word.removeprefix("oomb.") in Setting.of(OombConfig), remedy


def test_traps_of_yaml_are_read_as_meant(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(settings | {"learning_rate": 0}).replace("learning_rate: 0", "learning_rate: 1e-4"))
    path.write_text(path.read_text() + "mixed_precision: no\n")
    recipe = Recipe.from_yaml(path)
    assert recipe.learning_rate == 1e-4
    assert recipe.mixed_precision == "no"


def test_flags_win_over_other_places_and_the_file_does_not(settings: dict[str, Any], write_recipe: Write) -> None:
    """Held against the block of a DeepSpeed config."""
    block = Source("ds.json", "json", {"page_tokens": 8, "chunk_tokens": 64})
    path = write_recipe(settings)
    with pytest.raises(ValueError, match=r"page_tokens is set in two places[^$]*ds.json"):
        resolve(block, *Recipe.from_yaml(path).oomb_sources())
    resolved = resolve(block, *Recipe.from_yaml(path, ["--oomb.page_tokens", "4"]).oomb_sources())
    assert (resolved.config.page_tokens, resolved.config.chunk_tokens) == (4, 64)
    assert resolved.origins == {"page_tokens": "--oomb.page_tokens", "chunk_tokens": "the oomb block of the recipe"}
    assert any("--oomb.page_tokens" in note and "ds.json" in note for note in resolved.notes)


def test_resolved_recipe_reads_back_as_the_same(settings: dict[str, Any], write_recipe: Write) -> None:
    recipe = Recipe.from_yaml(write_recipe(settings), ["--lora_modules_to_save", "lm_head"])
    assert Recipe.from_yaml(write_recipe(recipe.to_dict())) == recipe


@pytest.mark.parametrize("preset", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda path: path.stem)
def test_presets_are_valid(preset: Path) -> None:
    if "model_name_or_path" in preset.read_text():
        Recipe.from_yaml(preset)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_rr": 8}, ["'lora_rr'", "recipe.yaml", "'lora_r'"]),
        ({"max_seq_length": 8}, ["'max_seq_length'", "Set max_length"]),
        ({"gradient_checkpointing": True}, ["chunk_tokens"]),
        ({"chunk_tokens": 64}, ["oomb.chunk_tokens"]),
        ({"oomb": {"chunk_token": 64}}, ["'chunk_token'", "oomb block", "'chunk_tokens'"]),
        ({"oomb": 3}, ["oomb must be a mapping"]),
        ({"oomb": {"chunk_tokens": 8, "page_tokens": 16}}, ["at least one page", "chunk_tokens=8"]),
        ({"lora_r": "eight"}, ["recipe.yaml", "lora_r", "'eight'", "a whole number, for example 16."]),
        ({"optimizer": "adamw_torch_fused"}, ["Set optimizer: adamw, the only one."]),
        ({"lora_r": True}, ["lora_r", "True (bool)"]),
        ({"oomb": {"chunk_tokens": "many"}}, ["chunk_tokens", "'many'", "a whole number"]),
        ({"truncation": "middle"}, ["truncation", "'middle'", "'split'"]),
        ({"packing": True}, ["packing", "max_length"]),
        ({"packing": True, "max_length": 9, "oomb": {"enabled": False}}, ["packing", "oomb.enabled"]),
        ({"train_on": "assistent"}, ["train_on", "'assistent'", "'assistant'"]),
        ({"max_steps": 0}, ["max_steps=0", "least is 1"]),
        ({"lora_dropout": 1.5}, ["lora_dropout"]),
        ({"learning_rate": float("nan")}, ["finite", "Set learning_rate=0.0002 (the default)"]),
        ({"learning_rate": float("inf")}, ["learning_rate", "finite", "inf"]),
        ({"lora_alpha": -3.0}, ["lora_alpha=-3.0"]),
        (
            {"num_train_epochs": 1},
            ["max_steps=3", "Leave num_train_epochs out (", "optimizer steps", "or max_steps (", "passes"],
        ),
        ({"truncation": "start"}, ["max_length"]),
        ({"lora_r": 0, "use_dora": True}, ["use_dora", "lora_r=0"]),
        ({"warmup_steps": 3}, ["warmup_steps=3", "max_steps=3"]),
        ({"data_path": None}, ["data_path"]),
        ({"data_path": ""}, ["lacks data_path", "book.txt"]),
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, Any], write_recipe: Write, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Recipe.from_yaml(write_recipe(settings | change))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora_rr", "8"], ["--lora_rr", "'--lora_r'"]),
        (["--oomb.chunk_token", "8"], ["'--oomb.chunk_tokens'"]),
        (["--lora_r", "x"], ["--lora_r", "'x'", "a whole number, for example 16."]),
        (["--oomb.attention", "spares"], ["--oomb.attention", "'spares'", "Did you mean 'sparse'?", "'dense' or"]),
        (["--mixed_precision", "bf61"], ["Did you mean 'bf16'?"]),
        (["--use_liger", "atuo"], ["Did you mean 'auto'?"]),
        (["--tokens", "64K"], ["'--tokens'", "Set max_length."]),
        (["--length", "64K"], ["'--length'", "Set max_length."]),
        (["--lora_r"], ["--lora_r", "no value"]),
        (["8"], ["'8'", "--name value"]),
        (["--oomb", "{}"], ["--oomb"]),
        (["--rope_parameters", "{a"], ["--rope_parameters", "a mapping"]),
        (["--oomb.dense_layers", "²"], ["--oomb.dense_layers", "'²'", "a list of whole numbers"]),
        (["--oomb.dense_layers", "0,x"], ["--oomb.dense_layers", "'0,x'", "a list of whole numbers"]),
        (["--oomb.host_memory_gib", "96GiB"], ["--oomb.host_memory_gib", "'96GiB'", "a number or 'auto'"]),
        (["--oomb.host_memory_gib", "0"], ["host_memory_gib=0", "size in GiB"]),
        (["--oomb.q_block", "96"], ["--oomb.q_block", "'96'", "64 or 128"]),
        (["--oomb.top_k", "8"], ["top_k=8 with attention='dense'", "attention='sparse'"]),
    ],
    ids=str,
)
def test_bad_options(settings: dict[str, Any], write_recipe: Write, options: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Recipe.from_yaml(write_recipe(settings), options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nseed: 2\n", ["'seed' stands twice"]),
        ("- a\n", ["one mapping"]),
        ("a: [\n", ["not valid yaml"]),
        ("seed: 1\n", ["lacks model_name_or_path", "Qwen"]),
        ("", ["one mapping"]),
    ],
    ids=repr,
)
def test_bad_files(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        Recipe.from_yaml(path)
    for word in words:
        assert word in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Recipe.from_yaml(tmp_path / "none.yaml")
