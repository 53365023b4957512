"""Case 22, as far as it needs no Trainer: what needs full logits is refused with a reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

import oomb_accel
from tests.harness.batches import documents_of, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config


@pytest.fixture
def model() -> PreTrainedModel:
    return oomb_accel.enable(tiny_model(), config())


def test_a_compute_loss_that_needs_full_logits(model: PreTrainedModel) -> None:
    """It pops the labels, or reads the logits of a call with labels."""
    batch = padded(documents_of(50)).batch
    labels = batch.pop("labels")
    with pytest.raises(ValueError, match=r"(?s)Full logits.*compute_loss.*log_probs"):
        model(**batch)
    with pytest.raises(AttributeError, match=r"(?s)not kept.*log_probs"):
        functional.cross_entropy(model(**batch, labels=labels).logits[0], labels[0])


def test_logits_by_key_are_refused_with_the_same_reason(model: PreTrainedModel) -> None:
    """As in ``outputs["logits"]``, which label smoothing and many overrides use."""
    output = model(**padded(documents_of(50)).batch)
    with pytest.raises((AttributeError, KeyError), match="not kept"):
        output["logits"]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep"),
        ({"output_router_logits": True}, "output_router_logits"),
        ({"token_type_ids": torch.zeros(1, 50)}, "token_type_ids"),
    ],
)
def test_requests_that_do_not_fit_are_refused_by_name(
    model: PreTrainedModel, request_: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?s){text}.*(disable|Leave it out)"):
        model(**padded(documents_of(50)).batch, **request_)


def test_output_attentions_in_the_config_are_refused() -> None:
    model = oomb_accel.enable(tiny_model(), config())
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True  # transformers itself


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_requests_that_were_in_the_config_before_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        model = oomb_accel.enable(tiny_model("qwen2", **{name: True}), config())
        model(**padded(documents_of(50)).batch)


def test_requests_that_ask_for_nothing_are_absorbed(model: PreTrainedModel) -> None:
    nothing = {"output_attentions": False, "output_hidden_states": None, "past_key_values": None}
    output = model(**padded(documents_of(50)).batch, **nothing, logits_to_keep=0, use_cache=False)
    assert output.loss.isfinite()


def test_full_logits_are_refused_in_training_only(model: PreTrainedModel) -> None:
    batch = padded(documents_of(50)).batch
    del batch["labels"]
    with torch.no_grad():
        assert model(**batch).logits.shape == (1, 50, 128)
    model.eval()
    assert model(**batch).logits.requires_grad


def test_the_signature_that_trainer_looks_at_stays() -> None:
    for make in (tiny_model, lambda: with_lora(tiny_model())):
        model = make()
        before = inspect.signature(model.forward)
        oomb_accel.enable(model, config())
        assert inspect.signature(model.forward) == before
