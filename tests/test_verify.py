"""`oomb verify` and the built-in check for model types that are not on the list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, Qwen2Config

import oomb_accel
from oomb_accel.cli import main
from oomb_accel.integrations.parity import check_parity, compare, prove_small_copy
from oomb_accel.pages import PagedKVCache
from tests.harness.models import tiny_model
from tests.harness.parity import config

QUICK = ["--tokens", "90", "--chunk-tokens", "16", "--page-tokens", "4", "--span-tokens", "32", "--device", "cpu"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("extra", [[], ["--lora"], ["--random-weights", "--layers", "0"], ["--dtype", "bfloat16"]])
def test_an_exact_model_passes(folder: Path, extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), *QUICK, *extra]) == 0
    printed = capsys.readouterr().out
    assert "PASSED" in printed and "gradient of input embeddings" in printed


def test_a_config_file_is_enough(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 4}
    Qwen2Config(**settings, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path / "config.json"), *QUICK]) == 0


def test_experts_are_checked_in_fp64(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), *QUICK]) == 0


def test_a_lost_page_gradient_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PagedKVCache, "collect_gradients", lambda *args: None)
    assert main(["verify", str(folder), *QUICK]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_nan_does_not_pass() -> None:
    model = tiny_model()
    documents = [torch.arange(40)]
    report = check_parity(model, config(), documents)
    assert report.passed
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    assert not check_parity(model, config(), documents).passed


def test_a_model_is_left_as_it_was(folder: Path) -> None:
    model = tiny_model()
    implementation = model.config._attn_implementation
    check_parity(model, config(), [torch.arange(40)])
    assert "forward" not in vars(model) and model.config._attn_implementation == implementation
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere/config.json"], "There is no file"),
        (["{folder}", "--tokens", "3"], "Too few tokens"),
        (["{folder}", "--chunk-tokens", "8", "--page-tokens", "16"], "at least one page"),
    ],
)
def test_bad_input(folder: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *(a.format(folder=folder) for a in arguments)]) == 2
    assert text in capsys.readouterr().err


def unlisted(**settings: Any) -> CohereForCausalLM:
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2}
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CohereForCausalLM(CohereConfig(**small, **ids, num_attention_heads=4, num_key_value_heads=2, **settings))


def test_an_unlisted_model_that_is_equal_is_let_in(caplog: pytest.LogCaptureFixture) -> None:
    model = unlisted()
    assert prove_small_copy(model) is None
    oomb_accel.enable(model, config())
    assert "passed the built-in parity check" in caplog.text


def test_an_unlisted_model_that_is_not_equal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what later chunks owe to a page: the check must see it and say how far off it is."""
    monkeypatch.setattr(PagedKVCache, "collect_gradients", lambda *args: None)
    with pytest.raises(ValueError, match=r"(?s)'cohere'.*gradient.*is off by.*Supported: .*qwen2"):
        oomb_accel.enable(unlisted(), config())


def test_comparing_a_result_with_itself_is_zero() -> None:
    from oomb_accel.integrations.parity import full_attention

    result = full_attention(tiny_model(), [torch.arange(30)])
    assert all(row.error == 0 for row in compare(result, result).rows)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{folder}", "--layers", "-1"], "cannot be cut to -1 layers"),
        (["./not-there"], "is not a folder"),
        (["{folder}", "--device", "cuda"], "no CUDA device"),
        (["{folder}", "--backend", "cudnn", "--device", "cpu"], "cudnn: it needs a CUDA device"),
    ],
)
def test_nonsense_gives_a_message_and_no_traceback(
    folder: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["verify", *(a.format(folder=folder) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error


def test_a_folder_without_a_model_gives_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["verify", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "has no config.json" in error and "Traceback" not in error


@pytest.mark.parametrize("attention", [[], ["--attention", "sparse", "--top_k", "2", "--dtype", "float32"]])
def test_the_cost_of_storage(
    folder: Path, attention: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    sizes = ["--tokens", "300", "--chunk-tokens", "64", "--page-tokens", "16", "--device", "cpu"]
    stored = ["--page-dtype", "float8", "--page_grad_dtype", "bfloat16"]
    options = [*sizes, *attention, *stored, "--json", str(report)]
    assert main(["verify", str(folder), *options]) == 0
    printed = capsys.readouterr().out
    assert "page_dtype=float8, page_grad_dtype=bfloat16" in printed and "PASSED" in printed
    storage = json.loads(report.read_text())["storage"]
    whole = storage["loss"][-1]
    assert whole["exact"] != whole["stored"] and abs(whole["difference"]) < 0.01
    assert 0.99 < storage["gradient"]["cosine"] < 1 and 1e-4 < storage["gradient"]["relative_error"] < 0.1


def test_the_cost_of_base_weights_in_8_bits(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK, "--base-dtype", "float8", "--json", str(tmp_path / "report.json")]
    assert main(["verify", str(folder), *options]) == 2
    assert "Add --lora" in capsys.readouterr().err
    assert main(["verify", str(folder), *options, "--lora"]) == 0
    assert "base_dtype=float8" in capsys.readouterr().out
    storage = json.loads((tmp_path / "report.json").read_text())["storage"]
    assert storage["base_dtype"] == "float8" and 1e-6 < abs(storage["loss"][-1]["difference"]) < 0.05
    assert 0.9 < storage["gradient"]["cosine"] < 0.9999


def test_exact_storage_is_not_measured(folder: Path, tmp_path: Path) -> None:
    assert main(["verify", str(folder), *QUICK, "--page-dtype", "model", "--json", str(tmp_path / "report.json")]) == 0
    assert "storage" not in json.loads((tmp_path / "report.json").read_text())
