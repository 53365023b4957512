"""A stream that nobody has any more gives its host memory back."""

from __future__ import annotations

import gc
import mmap
import threading
from typing import Any

import pytest
import torch

from oomb_accel import OombConfig
from oomb_accel.host import mapping
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.memory import StreamMemory
from oomb_accel.plan import sizes
from oomb_accel.progress import GIB
from oomb_accel.schedule import ChunkSchedule
from tests.harness.batches import documents_of, packed
from tests.harness.kept import num_kept
from tests.harness.models import tiny_model
from tests.harness.parity import config, switched_on
from tests.harness.sparse import sparse
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kib", [100, 150, 200])
@pytest.mark.parametrize(("top_k", "lengths"), [(2, [400]), (6, [400]), (6, [25, 160, 363])])
def test_a_step_needs_no_more_host_memory_than_was_made_before_it(
    monkeypatch: pytest.MonkeyPatch, kib: int, dtype: Any, top_k: int, lengths: list[int]
) -> None:
    """Also where values that have come up again still have a copy on the host, when gradients need the room."""
    run_with_what_was_made(
        monkeypatch, sparse(device_pages_gib=kib * 1024 / GIB, top_k=top_k, page_grad_dtype=dtype), lengths
    )


def test_the_room_of_values_that_are_gone_is_none_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, 588 KiB, stay on the device; the most gradients exist when the last chunks are over."""
    run_with_what_was_made(monkeypatch, sparse(page=8, device_pages_gib=640 * 1024 / GIB, top_k=1), [800])


def run_with_what_was_made(monkeypatch: pytest.MonkeyPatch, settings: OombConfig, lengths: list[int]) -> None:
    """A step in slabs of a page of memory, whose backward gets no more of them."""
    for name in ("_SMALLEST_SLAB_BYTES", "LARGEST_SLAB_BYTES"):
        monkeypatch.setattr(sizes, name, mmap.PAGESIZE)
    with switched_on(tiny_model(), settings) as model:
        loss = model(**packed(documents_of(*lengths)).batch).loss
        arena = attachment_of(model).offload.arena
        assert arena is not None
        arena.limit_bytes = made = arena.num_bytes
        loss.backward()
        assert 0 < arena.peak_bytes <= made == arena.num_bytes


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
                assert len(num_kept(begun[-1], "attention")) == 9
                loss.backward()
            return begun[-1].rooms is not None

        assert not offloads(pages + outputs) and offloads(pages + outputs - 1)
        with torch.no_grad():
            assert not offloads(pages)
        with pytest.raises(ValueError, match=r"GiB of attention outputs.\n  Set keep_outputs='auto'"):
            offloads(outputs + pages // 100)
        with pytest.raises(ValueError, match="Set device_pages_gib"):
            offloads(100)
