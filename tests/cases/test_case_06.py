"""Case 6: three documents of 21, 8 and 34 tokens packed into one row."""

from __future__ import annotations

import pytest
import torch

from tests.harness.batches import ENCODINGS, Document, documents_of, packed, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import assert_same_result, check_parity, chunked, config
from tests.harness.sparse import check_sparse, recorded_selections, sparse
from tests.harness.tolerance import assert_same_bits

LENGTHS = (21, 8, 34)


@pytest.mark.parametrize("encodings", [(e,) for e in ENCODINGS] + [ENCODINGS])
def test_equals_three_rows(encodings: tuple[str, ...]) -> None:
    layout = packed(documents_of(*LENGTHS), *encodings)
    ours, _ = check_parity(tiny_model(), layout, embeds=True)
    rows = chunked(tiny_model(), padded(documents_of(*LENGTHS)), embeds=True)
    assert_same_result(ours, rows)


@pytest.mark.parametrize(("chunk", "page"), [(8, 4), (12, 5), (7, 1), (40, 4), (64, 16)])
@pytest.mark.parametrize("model_type", ["qwen2", "mistral", "smollm3"])
def test_any_cut(model_type: str, chunk: int, page: int) -> None:
    check_parity(tiny_model(model_type), packed(documents_of(*LENGTHS)), config(chunk, page))


def test_with_lora() -> None:
    check_parity(with_lora(tiny_model("llama")), packed(documents_of(*LENGTHS)), config(keep_last_graph=False))


@pytest.mark.parametrize("keep_outputs", [True, False])
def test_changing_the_first_document_leaves_the_others_bit_identical(keep_outputs: bool) -> None:
    model = tiny_model()
    model.requires_grad_(False)
    documents = documents_of(*LENGTHS)
    changed_ids = documents[0].ids.clone()
    changed_ids[7] = 3 if changed_ids[7] != 3 else 4
    changed = [Document(changed_ids, changed_ids.clone()), *documents[1:]]
    settings = config(keep_outputs=keep_outputs)
    before = chunked(model, packed(documents), settings, embeds=True)
    after = chunked(model, packed(changed), settings, embeds=True)
    assert not torch.equal(before.log_probs[0], after.log_probs[0])
    for index in (1, 2):
        assert_same_bits(after.log_probs[index], before.log_probs[index])
        name = f"inputs_embeds.{index}"
        assert_same_bits(after.gradients[name], before.gradients[name])


@pytest.mark.parametrize("lengths", [LENGTHS, (90, 8, 100), (16, 90, 1, 30), (40, 40, 40)])
@pytest.mark.parametrize("q_block", [64, 128])
def test_selected_pages_are_of_the_same_document(lengths: tuple[int, ...], q_block: int) -> None:
    """Also where several documents share a chunk: the reference has only the document's own keys."""
    settings = sparse(8, 2, q_block=q_block, top_k=3)
    _, calls = check_sparse(tiny_model(), packed(documents_of(*lengths)), settings, embeds=True)
    assert calls
    for call in calls:
        pages = [p for g in range(2) for b in range(call.lists.counts_GB.shape[1]) for p in call.pages(g, b)]
        past = call.chunk.past_pages
        assert call.reach.sinks.first == past.first and call.reach.recents.end == past.end
        assert len(call.reach.sinks) <= min(pages) and max(pages) < len(past) - len(call.reach.recents)
        assert len(past) * 2 == call.chunk.segments[0].past_tokens


def test_changing_the_first_document_leaves_the_selection_of_others_bit_identical() -> None:
    model = tiny_model()
    model.requires_grad_(False)
    documents = documents_of(90, 60, 75)
    changed_ids = documents[0].ids.flip(0)
    changed = [Document(changed_ids, changed_ids.clone()), *documents[1:]]
    results = []
    for layout in (packed(documents), packed(changed)):
        with recorded_selections() as calls:
            result = chunked(model, layout, sparse(), embeds=True)
        lists = [c.lists.pages_GBK for c in calls if c.chunk.segments[0].document > 0]
        results.append((result, lists))
    (before, lists), (after, lists_after) = results
    assert lists and len(lists) == len(lists_after)
    assert all(torch.equal(a, b) for a, b in zip(lists, lists_after, strict=True))
    assert not torch.equal(before.log_probs[0], after.log_probs[0])
    for index in (1, 2):
        assert_same_bits(after.log_probs[index], before.log_probs[index])
        name = f"inputs_embeds.{index}"
        assert_same_bits(after.gradients[name], before.gradients[name])


def test_contradictory_encodings_are_an_error() -> None:
    layout = packed(documents_of(*LENGTHS), *ENCODINGS)
    positions = torch.cat([torch.arange(n) for n in (21, 9, 33)])[None]
    with pytest.raises(ValueError, match=r"(?s)contradict.*position_ids.*cu_seq_lens_q"):
        chunked(tiny_model(), layout.with_inputs(position_ids=positions))
