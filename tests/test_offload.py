"""A stream that nobody has any more gives its host memory back."""

from __future__ import annotations

import gc

import pytest

from oomb_accel.host import mapping
from oomb_accel.integrations.attachment import attachment_of
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model
from tests.harness.parity import config, switched_on
from tests.integrations.setups import count_chunks


def test_a_dropped_loss_gives_its_memory_back() -> None:
    with switched_on(tiny_model(), config(span_tokens=8, offload=True)) as model:
        offload = attachment_of(model).offload
        loss = model(**packed(documents_of(90, 21, 40)).batch).loss
        assert offload.host_bytes()["page_memory_used"] > 0
        del loss
        gc.collect()
        assert offload.host_bytes()["page_memory_used"] == 0


def test_memory_that_the_system_refuses_is_told_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: mapping.HostMapping, start: int, end: int) -> None:
        raise OSError("no memory")

    with switched_on(tiny_model(), config(span_tokens=8, offload=True)) as model:
        chunks = count_chunks(model)
        with monkeypatch.context() as patch:
            patch.setattr(mapping.HostMapping, "touch", refuse)
            with pytest.raises(ValueError, match=r"A slab of host memory could not be made\.\n.*no memory"):
                model(**packed(documents_of(90, 21, 40)).batch)
        assert chunks == []
        model(**packed(documents_of(90, 21, 40)).batch).loss.backward()
