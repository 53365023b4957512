"""A stream that nobody has any more gives its host memory back."""

from __future__ import annotations

import gc

from oomb_accel.integrations.attachment import attachment_of
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model
from tests.harness.parity import config, switched_on


def test_a_dropped_loss_gives_its_memory_back() -> None:
    with switched_on(tiny_model(), config(span_tokens=8, offload=True)) as model:
        offload = attachment_of(model).offload
        loss = model(**packed(documents_of(90, 21, 40)).batch).loss
        assert offload.host_bytes()["page_memory_used"] > 0
        del loss
        gc.collect()
        assert offload.host_bytes()["page_memory_used"] == 0
