"""RULER's offline tasks on an adapter through lm-eval, which is an extra: a plain PEFT adapter is all that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.conftest import load
from tests.harness.folders import save_tiny_model
from tests.harness.models import with_lora

pytest.importorskip("lm_eval")
nltk = pytest.importorskip("nltk")
pytest.importorskip("wonderwords")


def ruler(monkeypatch: pytest.MonkeyPatch, **model: Any) -> dict[str, Any]:
    """Answers of one question of 4,096 tokens."""
    import lm_eval

    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)  # of data that these tasks do not use
    arguments = ",".join(f"{name}={value}" for name, value in model.items())
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"{arguments},dtype=float32,max_length=8192",
        tasks=["niah_single_1"],
        limit=1,
        device="cpu",
        batch_size=1,
        metadata={"max_seq_lengths": [4096]},
        gen_kwargs="max_gen_toks=4",
        log_samples=True,
    )
    assert results is not None
    assert 0 <= results["results"]["niah_single_1"]["4096,none"] <= 1
    (sample,) = results["samples"]["niah_single_1"]
    return dict(sample)


def test_an_adapter_answers_with_plain_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama", max_position_embeddings=8192)
    with_lora(load(folder)).save_pretrained(str(tmp_path / "adapter"))
    base = ruler(monkeypatch, pretrained=folder)
    adapted = ruler(monkeypatch, pretrained=folder, peft=tmp_path / "adapter")
    assert base["arguments"] == adapted["arguments"] and base["resps"] != adapted["resps"]
