"""Case 7: padding on either side, a pad id that is the EOS id, and text that ends in a true EOS."""

from __future__ import annotations

import pytest
import torch

import oomb_accel
from tests.harness.batches import Document, Layout, documents_of, packed, padded
from tests.harness.models import tiny_model
from tests.harness.parity import assert_same_result, check_parity, chunked, reference
from tests.harness.tolerance import assert_same_total

EOS = 2
LENGTHS = (37, 12)


def ending_in_eos() -> list[Document]:
    documents = []
    for document in documents_of(*LENGTHS):
        ids = document.ids.clone()
        ids[-1] = EOS
        documents.append(Document(ids, ids.clone()))
    return documents


def layouts() -> dict[str, Layout]:
    documents = ending_in_eos()
    return {
        "right": padded(documents, side="right", pad_id=EOS),
        "left": padded(documents, side="left", pad_id=EOS),
        "packed": packed(documents),
    }


@pytest.mark.parametrize("embeds", [True, False])
@pytest.mark.parametrize("layout", layouts())
def test_every_layout_equals_the_reference(layout: str, embeds: bool) -> None:
    check_parity(tiny_model(), layouts()[layout], embeds=embeds)


@pytest.mark.parametrize("layout", layouts())
def test_the_true_eos_is_a_target_and_the_first_token_is_none(layout: str) -> None:
    chosen = layouts()[layout]
    assert oomb_accel.count_targets(chosen.batch) == sum(n - 1 for n in LENGTHS)
    ours = chunked(tiny_model(), chosen)
    assert [p.numel() for p in ours.log_probs] == [36, 11]
    assert all((p != 0).all() for p in ours.log_probs), "the last one scores the EOS"
    assert_same_total(ours.loss, -torch.cat(ours.log_probs).double().sum() / 47)


def test_labels_cloned_from_padded_ids() -> None:
    """Users write ``labels = input_ids.clone()``; the attention mask tells padding from a true EOS."""
    documents = ending_in_eos()
    wanted = reference(tiny_model(), documents)
    for side in ("right", "left"):
        layout = padded(documents, side=side, pad_id=EOS)
        layout = layout.with_inputs(labels=layout.batch["input_ids"].clone())
        assert_same_result(chunked(tiny_model(), layout), wanted)


@pytest.mark.parametrize("side", ["right", "left"])
def test_nan_in_the_embeddings_of_padding_spreads_nowhere(side: str) -> None:
    layout = padded(ending_in_eos(), side=side, pad_id=EOS)
    ours, _ = check_parity(tiny_model(), layout, embeds=True, fill_padding=float("nan"))
    assert all(g.isfinite().all() for g in ours.gradients.values())
