"""``oomb merge``: the merged model is the model with its adapter, and nothing half-written is left."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb_accel.cli import main
from oomb_accel.evaluation import merging
from tests.evaluation.conftest import load
from tests.harness.folders import save_tiny_model
from tests.harness.models import with_lora


def merge(adapter: Path, output: Path, *arguments: object) -> int:
    return main(["merge", str(adapter), "--output_dir", str(output), *map(str, arguments)])


def logits_of(model: Any, length: int = 90) -> torch.Tensor:
    ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits.float()
    return logits


def save_adapter(folder: Path, model_folder: Path, **settings: Any) -> Path:
    adapted = with_lora(load(model_folder), **settings)
    for name, parameter in adapted.named_parameters():
        if "lora_embedding_A" in name or "modules_to_save" in name:  # PEFT's zeros, and a copy
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    adapted.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
    ],
    ids=["lora", "dora", "rslora", "modules to save", "embeddings"],
)
def test_the_merged_model_is_the_model_with_its_adapter(
    tmp_path: Path, model_folder: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = save_adapter(tmp_path / "adapter", model_folder, **settings)
    assert merge(adapter, tmp_path / "out", "--json", tmp_path / "merge.json") == 0  # the adapter names its model
    assert "PASSED" in capsys.readouterr().out
    merged, plain = load(tmp_path / "out"), load(model_folder)
    expected = logits_of(load(model_folder, adapter))
    assert torch.allclose(logits_of(merged), expected, atol=2e-5)
    assert not torch.allclose(logits_of(plain), expected, atol=1e-2)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    }
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"]) == 3
    report = json.loads((tmp_path / "merge.json").read_text())
    assert report["passed"] and report["error"] < 1e-5 < 1e-2 < report["effect"] and report["same_choice"] == 1.0


def test_sums_are_rounded_once(tmp_path: Path, model_folder: Path, adapter_folder: Path) -> None:
    """A bf16 model and its adapter: every weight is the fp32 sum, rounded; PEFT's own sum in bf16 is another."""
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(half)
    assert merge(adapter_folder, tmp_path / "out", "--model", half) == 0
    wide, exact = load_file(half / "model.safetensors"), load(half, adapter_folder).float().merge_and_unload()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wide.keys()
    for name, value in exact.state_dict().items():
        if name in found:
            assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], value.to(torch.bfloat16)), name
    assert merge(adapter_folder, tmp_path / "wide", "--model", half, "--dtype", "float32") == 0
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(load_file(tmp_path / "wide" / "model.safetensors")[name], exact.state_dict()[name])


@pytest.mark.parametrize(("error", "dtype", "noted"), [(0.0166, "auto", True), (0.005, "auto", False),
                                                     (0.0166, "float32", False)])  # fmt: skip
def test_rounding_that_takes_much_of_the_effect_is_noted(
    error: float,
    dtype: str,
    noted: bool,
    tmp_path: Path,
    model_folder: Path,
    adapter_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(half)
    verdict = merging.Verdict(num_tokens=5, error=error, limit=0.05, effect=0.0358, same_choice=1.0)
    monkeypatch.setattr("oomb_accel.cli.merge.compare", lambda *_: verdict)
    assert merge(adapter_folder, tmp_path / "out", "--model", half, "--dtype", dtype) == 0
    said = capsys.readouterr().out
    assert ("note: rounding to bfloat16 is 46% of the adapter's effect; --dtype float32" in said) == noted


def test_rope_of_the_run_goes_into_the_config(tmp_path: Path, model_folder: Path, adapter_folder: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapter_folder, run)
    rope = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 256}"
    (run / "config.yaml").write_text(f"rope_parameters: {rope}\n")
    assert merge(run, tmp_path / "out") == 0
    parameters = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert parameters["rope_type"] == "yarn" and parameters["factor"] == 4.0


def test_a_wrong_result_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter of a head that is also the embedding: merged, it would change both."""
    tied = save_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", tied, target_modules=["lm_head"])
    assert merge(adapter, tmp_path / "out") == 1
    assert "FAILED: do not use it" in capsys.readouterr().out


def test_the_limit_and_the_effect_of_the_adapter_decide() -> None:
    a = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    small = merging.compare(a * 1.001, a, a * 1.3, [torch.float32, torch.bfloat16])
    assert small.passed and small.limit == 5e-2
    assert not merging.compare(a * 1.001, a, a * 1.3, [torch.float32]).passed
    assert not merging.compare(a * 1.04, a, a * 1.06, [torch.bfloat16]).passed
    assert merging.compare(a * 1.001, a, a * 1.002, [torch.bfloat16]).passed


def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, adapter_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    assert merge(adapter_folder, tmp_path / "out") == 2
    assert "No space left" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert merge(adapter_folder, tmp_path / "out") == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_errors(
    tmp_path: Path,
    model_folder: Path,
    adapter_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*words: str, adapter: Path = adapter_folder, output: Path = tmp_path / "out", more: Any = ()) -> None:
        assert merge(adapter, output, *more) == 2
        captured = capsys.readouterr()
        message = captured.err.split("oomb merge: ")[-1]
        assert all(word in message for word in words), captured.err
        assert 2 <= len(message.splitlines()) <= 4 and "Traceback" not in captured.err

    refused("has a model already", "config.json", "--output_dir", output=model_folder)
    refused("has a model already", "adapter_config.json", output=adapter_folder)
    (tmp_path / "file").write_text("")
    refused("is a file", output=tmp_path / "file")
    refused("holds no adapter", "no folder", adapter=tmp_path / "nowhere")
    refused("The report cannot be written", more=["--json", tmp_path])
    other = save_tiny_model(tmp_path / "other", "llama", hidden_size=32)
    refused("belongs to another model", "shape", more=["--model", other])
    nameless = tmp_path / "nameless"
    shutil.copytree(adapter_folder, nameless)
    settings = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    refused("does not say which model", "--model", adapter=nameless)
    broken = tmp_path / "broken"
    shutil.copytree(adapter_folder, broken)
    weights = load_file(broken / "adapter_model.safetensors")
    save_file({name: value * float("nan") for name, value in weights.items()}, broken / "adapter_model.safetensors")
    refused("cannot be merged", "NaN", "earlier checkpoint", adapter=broken)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10, 10, 1000))
    refused("no room for the merged model", "0.00 GB are free", "--dtype bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, adapter_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = os.mkdir  # root may write everywhere, so what the system would say to others is said here

    def mkdir(path: Any, *rest: Any) -> None:
        if Path(path).parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        plain(path, *rest)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert merge(adapter_folder, tmp_path / "out") == 2
    assert f"{tmp_path}: Permission denied" in capsys.readouterr().err
