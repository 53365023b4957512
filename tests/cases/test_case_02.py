"""Case 2: one single target at the first token of the second chunk, then only at the last token."""

from __future__ import annotations

import pytest

from tests.harness.batches import documents_of, only_targets, padded
from tests.harness.models import tiny_model
from tests.harness.parity import check_parity, chunked, config


@pytest.mark.parametrize("keep_last_graph", [True, False])
@pytest.mark.parametrize("column", [16, 32])
def test_one_target(column: int, keep_last_graph: bool) -> None:
    (document,) = documents_of(33)
    layout = padded([only_targets(document, [column])])
    settings = config(keep_last_graph=keep_last_graph)
    ours, wanted = check_parity(tiny_model(), layout, settings, embeds=True)
    assert ours.loss.item() == -ours.log_probs[0].item(), "the loss is that token's NLL"
    gradient = ours.gradients["inputs_embeds.0"]
    assert gradient[:16].norm() > 0.01 * wanted.gradients["inputs_embeds.0"].norm(), "it reaches the first chunk"
    assert not gradient[column:].any(), "nothing behind the predicting token has a gradient"


def test_the_border_target_is_predicted_by_the_chunk_before() -> None:
    """Column 16 is predicted by position 15: the second chunk has no target and is not even run."""
    (document,) = documents_of(33)
    events: list[object] = []
    chunked(tiny_model(), padded([only_targets(document, [16])]), on_progress=events.append)
    assert len(events) == 1
