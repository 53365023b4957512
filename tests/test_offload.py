"""Memory of copies is dropped only once they are in their streams: the arena's, and the pools' of records."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from oomb_accel.host import HostArena
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.offload import Offload, StreamRecords
from oomb_accel.pages import HostMover, Kind, Records
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model
from tests.harness.parity import config, switched_on

CPU = torch.device("cpu")
MIB = 2**20


class SlowMover(HostMover):
    """Copies are on their way for as long as nobody flushes."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.waiting: list[Callable[[], None]] = []

    def flush(self) -> None:
        self.done.append("flush")

    def afterwards(self, action: Callable[[], None]) -> None:
        self.waiting.append(action)


@pytest.mark.parametrize("close", [Offload.close, lambda offload: offload.reserve(1, 4 * MIB, CPU)])
def test_copies_are_in_their_streams_before_an_arena_closes(
    close: Callable[[Offload], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end, and where one with larger slabs takes its place."""
    offload, mover, plain = Offload(), SlowMover(), HostArena.close
    offload.mover = mover
    offload.reserve(1, 1, CPU)
    first = offload.arena

    def closing(arena: HostArena) -> None:
        mover.done.append("close")
        plain(arena)

    with monkeypatch.context() as patch:
        patch.setattr(HostArena, "close", closing)
        close(offload)
    assert mover.done == ["flush", "close"] and offload.arena is not first
    offload.close()


def test_a_dropped_loss_keeps_its_memory_for_copies_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[weakref.ref[torch.Tensor]] = []
    plain = StreamRecords.__call__

    def make(self: StreamRecords, kind: Kind, num_slots: int, dtype: torch.dtype) -> Records:
        records = plain(self, kind, num_slots, dtype)
        pools.append(weakref.ref(records.pool.storage))
        return records

    monkeypatch.setattr(StreamRecords, "__call__", make)
    with switched_on(tiny_model(), config(span_tokens=8, offload=True)) as model:
        offload = attachment_of(model).offload
        offload.mover = mover = SlowMover()
        loss = model(**packed(documents_of(90, 21, 40)).batch).loss
        assert mover.num_bytes["down"] and mover.waiting == []
        del loss
        gc.collect()
        assert pools and all(pool() is not None for pool in pools)
        assert offload.host_bytes()["page_memory_used"] > 0
        for action in mover.waiting:
            action()
        assert offload.host_bytes()["page_memory_used"] == 0
        del action
        mover.waiting.clear()
        assert all(pool() is None for pool in pools)
