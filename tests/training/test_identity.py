"""Digests that tell one run from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oomb_accel.config import OombConfig
from oomb_accel.training.data import Document
from oomb_accel.training.identity import adapter_digest, check_same_function, data_digest, model_digest
from oomb_accel.training.recipe import Recipe


def document(ids: list[int], labels: list[int]) -> Document:
    return Document("d", torch.tensor(ids), torch.tensor(labels))


def test_data() -> None:
    """Tokens, labels, borders and order count; names do not."""
    documents = [document([1, 2, 3], [1, 2, 3]), document([4, 5], [4, 5])]
    same = [Document("other", one.input_ids.clone(), one.labels.clone()) for one in documents]
    assert data_digest(documents) == data_digest(same)
    for changed in (
        [document([1, 2, 9], [1, 2, 3]), documents[1]],
        [document([1, 2, 3], [-100, 2, 3]), documents[1]],
        [document([1, 2], [1, 2]), document([3, 4, 5], [3, 4, 5])],
        documents[::-1],
        documents[:1],
    ):
        assert data_digest(changed) != data_digest(documents)


def model(norm: float = 1.0, width: int = 8, dtype: torch.dtype = torch.float32, spot: float = 0.0) -> nn.Module:
    """A matrix with one value moved by ``spot``, and a norm."""
    torch.manual_seed(0)
    linear, layer_norm = nn.Linear(width, 4), nn.LayerNorm(4)
    linear.weight.data[2, 3] += spot
    layer_norm.weight.data.fill_(norm)
    return nn.Sequential(linear, layer_norm).to(dtype)


def test_model() -> None:
    """Shapes and values count; the type that they were loaded in does not."""
    assert model_digest(model()) == model_digest(model(dtype=torch.bfloat16))
    for changed in (model(norm=1.5), model(width=9), model(spot=1.0)):
        assert model_digest(changed) != model_digest(model())


@pytest.mark.parametrize("change", [{"lora_alpha": 8.0}, {"use_rslora": True}, {"lora_dropout": 0.2}], ids=str)
def test_adapter_settings(change: dict[str, Any]) -> None:
    base: dict[str, Any] = {"model_name_or_path": "m", "data_path": "d", "output_dir": "o"}
    assert adapter_digest(model(), Recipe(**base)) == adapter_digest(model(), Recipe(**base, learning_rate=1.0))
    assert adapter_digest(model(), Recipe(**base)) != adapter_digest(model(), Recipe(**base, **change))


def test_what_is_trained() -> None:
    recipe = Recipe(model_name_or_path="m", data_path="d", output_dir="o")
    frozen = model()
    next(frozen.parameters()).requires_grad_(False)
    assert adapter_digest(frozen, recipe) != adapter_digest(model(), recipe)


def _recipe(lora_r: int = 16, rope: dict[str, Any] | None = None, **oomb: Any) -> Recipe:
    block = OombConfig(**oomb)
    return Recipe(
        model_name_or_path="m", data_path="d", output_dir="o", lora_r=lora_r, rope_parameters=rope, oomb=block
    )


SPARSE: dict[str, Any] = {"attention": "sparse", "top_k": 16}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, SPARSE, ["It has oomb.attention: dense; this run has oomb.attention: sparse."]),
        (SPARSE, {}, ["It has oomb.attention: sparse; this run has oomb.attention: dense."]),
        (SPARSE, {"enabled": False}, ["this run has oomb.attention: dense"]),
        (SPARSE, SPARSE | {"top_k": 64}, ["It has oomb.top_k: 16; this run has oomb.top_k: 64."]),
        (SPARSE, SPARSE | {"dense_layers": (0, -1)}, ["oomb.dense_layers: []", "oomb.dense_layers: [0, -1]"]),
        (SPARSE, SPARSE | {"page_tokens": 64, "q_block": 64}, ["oomb.q_block: 128, oomb.page_tokens: 128; this run"]),
        ({}, {"page_dtype": "float8"}, ["oomb.page_dtype: model; this run has oomb.page_dtype: float8"]),
        ({}, {"base_dtype": "float8"}, ["oomb.base_dtype: model; this run has oomb.base_dtype: float8"]),
        ({}, {"rope": {"factor": 4.0}}, ["rope_parameters: null; this run has rope_parameters: {factor: 4.0}"]),
        ({"lora_r": 0}, {"lora_r": 0} | SPARSE, ["another output_dir: model_name_or_path: run/checkpoint-2"]),
        ({"lora_r": 8}, SPARSE, ["oomb merge run/checkpoint-2 --output_dir MERGED"]),
    ],
)
def test_another_gradient_is_refused(before: dict[str, Any], now: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        check_same_function(_recipe(**now), Path("run/checkpoint-2"), _recipe(**before).to_dict())
    message = str(caught.value)
    assert len(message.splitlines()) == 3 and message.splitlines()[2].startswith("  Set ")
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    "now",
    [
        {"chunk_tokens": 4096, "page_tokens": 64, "span_tokens": 4096},
        {"offload": True, "page_grad_dtype": "bfloat16", "keep_outputs": False},
        {"device_pages_gib": 2.0, "host_memory_gib": 4.0, "backend": "torch", "deterministic": True},
        {"enabled": False},
    ],
    ids=str,
)
def test_the_same_gradient_from_other_settings(now: dict[str, Any]) -> None:
    check_same_function(_recipe(**now), Path("c"), _recipe().to_dict())


def test_a_checkpoint_of_an_earlier_version() -> None:
    """It lacks settings that came later, which had their defaults."""
    before = _recipe(**SPARSE).to_dict()
    del before["oomb"]["causal_selection"], before["rope_parameters"]
    check_same_function(_recipe(**SPARSE), Path("c"), before)
    with pytest.raises(ValueError, match="causal_selection: false"):
        check_same_function(_recipe(**SPARSE, causal_selection=True), Path("c"), before)
