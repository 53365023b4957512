"""Case 4: a row without any target, alone and beside a normal row."""

from __future__ import annotations

import warnings

import pytest
import torch

import oomb_accel
from tests.harness.batches import documents_of, only_targets, packed, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import assert_same_result, chunked, config, embeddings_of, reference, switched_on
from tests.harness.tolerance import assert_same_bits


def test_alone() -> None:
    (document,) = documents_of(40)
    layout = padded([only_targets(document, [])])
    with pytest.warns(UserWarning, match=r"row 0\b"):
        ours = chunked(tiny_model(), layout)
    assert ours.loss.item() == 0.0
    assert ours.gradients and all(not g.any() for g in ours.gradients.values())


def test_alone_every_trainable_parameter_still_gets_a_gradient() -> None:
    """DDP waits for every parameter; a missing gradient would also leave Adam's state behind."""
    (document,) = documents_of(40)
    model = with_lora(tiny_model())
    with switched_on(model, config()), pytest.warns(UserWarning, match="row 0"):
        model(**padded([only_targets(document, [])]).batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or not parameter.grad.any()


def test_alone_with_embeddings() -> None:
    (document,) = documents_of(40)
    model = tiny_model().requires_grad_(False)
    leaf = embeddings_of(model, document.ids[None]).requires_grad_()
    labels = torch.full((1, 40), -100)
    with switched_on(model, config()), pytest.warns(UserWarning, match="row 0"):
        model(inputs_embeds=leaf, labels=labels).loss.backward()
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize("empty_row", [0, 1])
def test_beside_a_normal_row(empty_row: int) -> None:
    documents = documents_of(40, 40)
    other = documents[1 - empty_row]
    documents[empty_row] = only_targets(documents[empty_row], [])
    with pytest.warns(UserWarning, match=rf"row {empty_row}\b"):
        both = chunked(tiny_model(), padded(documents))
    alone = chunked(tiny_model(), padded([other]))
    assert_same_bits(both.loss, alone.loss)
    assert_same_bits(both.gradients, alone.gradients)
    assert_same_result(both, reference(tiny_model(), documents))


def test_one_warning_that_names_the_row() -> None:
    documents = documents_of(20, 20, 20)
    documents[1] = only_targets(documents[1], [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chunked(tiny_model(), padded(documents))
    (text,) = [str(w.message) for w in caught if "No target" in str(w.message)]
    assert "row 1 " in text


def test_a_document_without_targets_in_a_packed_row() -> None:
    first, second = documents_of(20, 33)
    layout = packed([only_targets(first, []), second])
    assert oomb_accel.count_targets(layout.batch) == 32
    assert_same_result(chunked(tiny_model(), layout), reference(tiny_model(), layout.documents))


def test_without_gradients() -> None:
    (document,) = documents_of(40)
    model = tiny_model()
    with switched_on(model, config()), torch.no_grad(), pytest.warns(UserWarning, match="row 0"):
        output = model(**padded([only_targets(document, [])]).batch)
    assert output.loss.item() == 0.0 and not output.log_probs.any()
