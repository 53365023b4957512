"""Case 5: gradient accumulation and batches of uneven lengths give the token-weighted mean over the whole step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oomb_accel
from tests.harness.batches import IGNORED, Document, Layout, documents_of, packed, padded
from tests.harness.models import tiny_model
from tests.harness.parity import assert_same_result, chunked, config, parameter_gradients, reference, switched_on
from tests.harness.tolerance import assert_same_gradients, assert_same_total

LENGTHS = (3, 1, 200, 40)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No target in row")
        yield


def step_documents() -> list[Document]:
    """Four documents and one without any target."""
    documents = documents_of(*LENGTHS)
    empty = documents_of(7, seed=9)[0]
    return [*documents, Document(empty.ids, torch.full_like(empty.labels, IGNORED))]


def accumulate(
    model: PreTrainedModel, layouts: list[Layout], **normaliser: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients summed over micro-batches, as an accumulating loop does."""
    losses = []
    with switched_on(model, config()):
        for layout in layouts:
            loss = model(**layout.batch, **normaliser).loss
            loss.backward()
            losses.append(loss.detach())
    return torch.stack(losses).sum(), parameter_gradients(model)


@pytest.mark.parametrize("side", ["right", "left"])
def test_one_batch(side: str) -> None:
    documents = step_documents()
    assert_same_result(chunked(tiny_model(), padded(documents, side=side)), reference(tiny_model(), documents))


def test_accumulation_with_count_targets() -> None:
    documents = step_documents()
    layouts = [padded([d]) for d in documents]
    total = sum(oomb_accel.count_targets(layout.batch) for layout in layouts)
    assert total == sum(max(n - 1, 0) for n in LENGTHS)
    loss, gradients = accumulate(tiny_model(), layouts, num_targets=total)
    wanted = reference(tiny_model(), documents)
    assert_same_total(loss, wanted.loss)
    assert_same_gradients(gradients, wanted.gradients)


def test_accumulation_of_mixed_layouts() -> None:
    documents = step_documents()
    layouts = [padded(documents[:2], side="left"), packed(documents[2:])]
    total = sum(oomb_accel.count_targets(layout.batch) for layout in layouts)
    loss, gradients = accumulate(tiny_model(), layouts, num_targets=torch.tensor(total))
    wanted = reference(tiny_model(), documents)
    assert_same_total(loss, wanted.loss)
    assert_same_gradients(gradients, wanted.gradients)


def trainer_count(layouts: list[Layout]) -> torch.Tensor:
    """As transformers' Trainer counts: all labels but those of the first column."""
    return torch.stack([(layout.batch["labels"][:, 1:] != IGNORED).sum() for layout in layouts]).sum()


def test_accumulation_with_the_trainers_count() -> None:
    documents = step_documents()
    layouts = [padded(documents[:2]), padded(documents[2:])]
    loss, gradients = accumulate(tiny_model(), layouts, num_items_in_batch=trainer_count(layouts))
    wanted = reference(tiny_model(), documents)
    assert_same_total(loss, wanted.loss)
    assert_same_gradients(gradients, wanted.gradients)


@pytest.mark.parametrize("kind", ["left", "packed"])
def test_the_trainers_overcount_is_taken_off(kind: str) -> None:
    """Trainer counts first tokens that carry a label; one micro-batch per step."""
    documents = step_documents()
    layout = packed(documents) if kind == "packed" else padded(documents, side="left")
    count = trainer_count([layout])
    assert count > oomb_accel.count_targets(layout.batch)
    loss, gradients = accumulate(tiny_model(), [layout], num_items_in_batch=count)
    wanted = reference(tiny_model(), documents)
    assert_same_total(loss, wanted.loss)
    assert_same_gradients(gradients, wanted.gradients)


def test_the_trainers_count_in_accumulation() -> None:
    """With first tokens masked, as transformers' packing collator does, the Trainer overcounts nothing."""
    documents = documents_of(20, 30, 40, 25)
    layouts = [packed(documents[:3]), padded(documents[3:])]
    for start in (0, 20, 50):
        layouts[0].batch["labels"][0, start] = -100
    loss, gradients = accumulate(tiny_model(), layouts, num_items_in_batch=trainer_count(layouts))
    wanted = reference(tiny_model(), documents)
    assert_same_total(loss, wanted.loss)
    assert_same_gradients(gradients, wanted.gradients)


def test_the_trainers_overcount_in_accumulation_follows_the_rule() -> None:
    """Docs (numerics, "The denominator"): a micro-batch takes off the overcount that it can see, its own."""
    documents = documents_of(20, 30, 40, 25)
    layouts = [packed(documents[:3]), padded(documents[3:])]
    count = trainer_count(layouts)
    loss, _ = accumulate(tiny_model(), layouts, num_items_in_batch=count)
    sums = [reference(tiny_model(), part) for part in (documents[:3], documents[3:])]
    targets = [sum(len(d) - 1 for d in part) for part in (documents[:3], documents[3:])]
    assert count == sum(targets) + 2
    assert_same_total(loss, sums[0].loss * targets[0] / (count - 2) + sums[1].loss * targets[1] / count)


def test_the_mean_is_over_tokens_not_over_rows_or_chunks() -> None:
    documents = documents_of(3, 200)
    ours = chunked(tiny_model(), padded(documents))
    all_tokens = torch.cat(ours.log_probs)
    assert_same_total(ours.loss, -all_tokens.double().mean())
    per_row = -torch.stack([p.mean() for p in ours.log_probs]).mean()
    assert abs(per_row - ours.loss) > 1e-3, "the two rules differ on this data"
