"""Digests that tell one run from another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oomb_accel.training.data import Document
from oomb_accel.training.identity import adapter_digest, data_digest, model_digest
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
