"""What a recipe says of adapters beside their rank changes what a step takes and keeps, in the estimate as it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomb_accel.cli import estimate as command
from oomb_accel.kept_results import HEAD
from oomb_accel.memory import StreamMemory
from oomb_accel.plan import Adapters, Job, estimate, read_shape
from oomb_accel.training import Recipe
from tests.harness.batches import documents_of, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import chunked, config

RECIPES: list[dict[str, Any]] = [
    {},
    {"lora_dropout": 0.1},
    {"use_dora": True},
    {"lora_target_modules": ["q_proj", "v_proj"]},
    {"lora_target_modules": ["self_attn.o_proj"]},
    {"lora_target_modules": ["down_proj", "lm_head"]},
    {"lora_modules_to_save": ["lm_head"]},
    {"lora_modules_to_save": ["embed_tokens"]},
]


def adapters(settings: dict[str, Any]) -> Adapters:
    return Recipe(model_name_or_path="m", data_path="d", output_dir="o", **settings).adapters


def adapted(settings: dict[str, Any]) -> Any:
    names = {"lora_target_modules": "target_modules", "lora_modules_to_save": "modules_to_save"}
    return with_lora(tiny_model(), **{names.get(name, name): value for name, value in settings.items()})


@pytest.mark.parametrize("settings", RECIPES, ids=str)
def test_what_is_kept_is_what_the_engine_keeps(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends, heads = adapted(settings), set[str](), set[int]()
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    release = StreamMemory.release

    def noted(memory: StreamMemory, chunk: Any) -> None:
        for index, results in memory.results.items():
            here: set[Any] = {key for key, kept in results._here.items() if kept}
            heads.update({index} if HEAD in here else ())
            ends.update(names[key] for key in here if key in names)
        release(memory, chunk)

    monkeypatch.setattr(StreamMemory, "release", noted)
    chunked(model, padded(documents_of(100)), config())
    shape = read_shape("qwen2.5-7b")
    kept = estimate(Job(model=shape, tokens=64 * 1024, adapters=adapters(settings))).memory.kept
    assert bool(kept.head.chunks) == bool(heads)
    assert bool(kept.mlp.chunks) == ("down_proj" in ends) and bool(kept.o_proj.chunks) == ("o_proj" in ends)


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_layers_that_peft_runs_take_longer(settings: dict[str, Any]) -> None:
    """By the rates that were measured with PEFT's own: products at 650e12 operations a second instead of 690e12, and
    outputs of all layers moved three times more in both forwards and the backward, which counts twice."""
    of = Job(model=read_shape("qwen2.5-7b"), tokens=64 * 1024, keep_outputs=False, keep_last_graph=False)
    fused, plain = (estimate(replace(of, adapters=each)).time.parts for each in (Adapters(), adapters(settings)))
    more = {part: seconds - fused[part] for part, seconds in plain.items()}
    assert more.pop("linear layers") == pytest.approx(fused["linear layers"] * (690 / 650 - 1))
    outputs = 28 * (3584 + 2 * 512 + 3584 + 2 * 18944 + 3584)
    moved = 3 * 2 * outputs * 64 * 1024 * 4
    assert more.pop("norms, activations, adapters") == pytest.approx(moved / of.gpu.memory_bytes_per_second)
    assert set(more.values()) == {0.0}
    without = [estimate(replace(of, lora_r=0, adapters=each)).time.parts for each in (Adapters(), adapters(settings))]
    assert without[0] == without[1], "there are none"


def test_what_is_trained_whole_is_counted() -> None:
    """As many numbers as PEFT trains; weights, AdamW's moments and gradients of them."""
    settings = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}
    model = adapted(settings)
    job = Job(model=read_shape(model.config), tokens=4096, lora_r=4, adapters=adapters(settings))
    assert job.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    of: dict[str, Any] = {"model": read_shape("qwen2.5-7b"), "tokens": 64 * 1024}
    more, less = (estimate(Job(**of, adapters=each)).memory.device for each in (adapters(settings), Adapters()))
    whole = 2 * 152064 * 3584
    assert more["weights"] - less["weights"] == 2 * whole and more["optimizer"] - less["optimizer"] == 4 * whole
    assert more["gradients"] - less["gradients"] == 4 * whole + whole


def test_a_recipe_whose_adapters_do_not_fit(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By ``oomb estimate``: the same but for what is trained whole fits."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: qwen2.5-7b\nmax_length: 4096\n", encoding="utf-8")
    options = [str(recipe), "--gpu_gib", "40", "--offload", "false"]
    assert command.main(options) == 0
    assert command.main([*options, "--lora_modules_to_save", "[embed_tokens, lm_head]"]) == 1
    assert "1,130.4M trained" in capsys.readouterr().out
