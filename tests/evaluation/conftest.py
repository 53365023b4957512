"""Tiny models with byte tokenizers, adapters and texts in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from oomb_accel.cli import main
from tests.harness.folders import save_tiny_model
from tests.harness.models import with_lora

SIZES = ["--device", "cpu", "--chunk-tokens", "64", "--page_tokens", "8", "--last_tokens", "32"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="session")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """An adapter that changes much."""
    folder = tmp_path_factory.mktemp("adapter")
    with_lora(load(model_folder)).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = "".join(f"{number} squared is {number * number}.\n" for number in range(40, 300))
    path.write_text(lines[:700], encoding="utf-8")
    return path


def load(folder: Path, adapter: Path | None = None) -> Any:
    """As transformers and PEFT load it, with eager attention, in evaluation mode."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    return model.eval() if adapter is None else PeftModel.from_pretrained(model, str(adapter)).eval()


def tokens_of(folder: Path, path: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(path.read_text(encoding="utf-8"))["input_ids"]
    return ids


def report_of(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """What ``oomb eval`` writes as JSON."""
    path = tmp_path / "made" / "report.json"
    assert main(["eval", *SIZES, *map(str, arguments), "--json", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report
