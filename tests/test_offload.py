"""A stream that nobody has any more gives its host memory back."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from oomb_accel.host import mapping
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.memory import StreamMemory
from oomb_accel.schedule import ChunkSchedule
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
            # The error comes with the first slab that is refused. A thread that is about to be refused another would
            # otherwise tell the next step of it, which has asked for memory that there is.
            for thread in threading.enumerate():
                if thread.name == "oomb-host-memory":
                    thread.join()
        assert chunks == []
        model(**packed(documents_of(90, 21, 40)).batch).loss.backward()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[StreamMemory]:
    """The memory of every pass that begins."""
    seen, begin = list[StreamMemory](), StreamMemory.begin

    def noted(memory: StreamMemory, *arguments: Any) -> None:
        seen.append(memory)
        begin(memory, *arguments)

    monkeypatch.setattr(StreamMemory, "begin", noted)
    return seen


def test_outputs_that_are_wanted_have_their_room_before_pages(
    monkeypatch: pytest.MonkeyPatch, begun: list[StreamMemory]
) -> None:
    """Those of the 9 chunks of 16 tokens that run again, 816 bytes a token; in an evaluation none are kept."""
    batch = packed(documents_of(150)).batch
    with switched_on(tiny_model(), config(span_tokens=8, keep_outputs=True)) as model:
        monkeypatch.setattr(step_memory, "_other_bytes", lambda *_: 0)
        schedule = ChunkSchedule.build([150], range(149), chunk_tokens=16, page_tokens=4)
        pages = attachment_of(model).page_shape().num_bytes(schedule, torch.float32)
        outputs = 9 * 16 * 816

        def offloads(free: int) -> bool:
            monkeypatch.setattr(step_memory, "free_bytes", lambda device: free)
            loss = model(**batch).loss
            if loss.requires_grad:
                assert len(begun[-1].kept) == 9
                loss.backward()
            return begun[-1].rooms is not None

        assert not offloads(pages + outputs) and offloads(pages + outputs - 1)
        with torch.no_grad():
            assert not offloads(pages)
        with pytest.raises(ValueError, match=r"GiB of attention outputs.\n  Set keep_outputs='auto'"):
            offloads(outputs + pages // 100)
        with pytest.raises(ValueError, match="Set device_pages_gib"):
            offloads(100)
