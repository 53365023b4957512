"""Case 8: EOS ids inside one document with continuous positions are no borders."""

from __future__ import annotations

import pytest
import torch

from tests.harness.batches import Document, documents_of, padded
from tests.harness.models import tiny_model
from tests.harness.parity import check_parity


@pytest.mark.parametrize("explicit_positions", [True, False])
def test_no_border_is_invented(explicit_positions: bool) -> None:
    (document,) = documents_of(50)
    ids = document.ids.clone()
    ids[[0, 10, 16, 17, 31, 49]] = 2
    layout = padded([Document(ids, ids.clone())])
    if explicit_positions:
        layout = layout.with_inputs(position_ids=torch.arange(50)[None])
    ours, _ = check_parity(tiny_model(), layout, embeds=True)
    assert ours.log_probs[0].numel() == 49
