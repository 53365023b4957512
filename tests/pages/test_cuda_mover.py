"""CudaMover's thread without a GPU: refused copies, and what is to be done behind copies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from oomb_accel.pages import CudaMover
from oomb_accel.pages import mover as mover_module

NOTHING = np.zeros(1, np.int64)
WAIT_S = 10.0


class Event:
    """A moment that is still to come."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.streams: list[Any] = []

    def record(self, stream: Any) -> None:
        self.streams.append(stream)

    def query(self) -> bool:
        return False


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


Make = Callable[[Callable[[], object]], CudaMover]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a mover whose copies are calls of a function."""

    def make(copy: Callable[[], object]) -> CudaMover:
        computing = Stream()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
        monkeypatch.setattr(mover_module, "copy_records", lambda *_, **__: copy())
        monkeypatch.setattr(mover_module, "best_copy_method", lambda device: "loop")
        monkeypatch.setattr(mover_module, "available_copy_methods", lambda device: ("loop",))
        return CudaMover(torch.device("cuda", 0), pinned=lambda: True)

    return make


def test_after_a_refused_copy_whoever_waits_is_told(make: Make) -> None:
    """Even of a copy in the other direction, that would have succeeded and is behind nothing."""
    tried: list[int] = []

    def copy() -> None:
        tried.append(len(tried))
        if len(tried) == 2:
            raise RuntimeError("an illegal address")

    mover = make(copy)
    good = mover.upload(NOTHING, NOTHING, 1, [])
    mover.flush()
    mover.download(NOTHING, NOTHING, 1, [])
    later = [mover.upload(NOTHING, NOTHING, 1, []), mover.download(NOTHING, NOTHING, 1, [good])]
    mover.flush()
    mover.wait([good])
    for mark in later:
        with pytest.raises(RuntimeError, match="an illegal address"):
            mover.wait([mark])
    assert len(tried) == 2


def test_the_copying_thread_waits_for_nobody(make: Make) -> None:
    """The garbage collector may finalize records within a copy."""
    asked, done = threading.Event(), threading.Event()
    order: list[str] = []

    def act() -> None:
        order.append("action")
        done.set()

    def copy() -> None:
        assert asked.wait(WAIT_S)
        if not order:
            mover.afterwards(act)
        order.append("copy")

    mover = make(copy)
    marks = [mover.upload(NOTHING, NOTHING, 1, []) for _ in range(2)]
    asked.set()
    try:
        assert done.wait(WAIT_S)
    finally:
        for mark in marks:
            if not mark.done():
                mark.set_result(None)  # a thread that waits for itself would keep the interpreter from ending
    assert order == ["copy", "copy", "action"]


@pytest.mark.parametrize("refused", [False, True])
def test_others_act_when_copies_are_in_their_stream(make: Make, refused: bool) -> None:
    go = threading.Event()
    order: list[str] = []

    def copy() -> None:
        assert go.wait(WAIT_S)
        order.append("copy")
        if refused:
            raise RuntimeError("refused")

    mover = make(copy)
    mover.afterwards(lambda: order.append("nothing to wait for"))
    mover.upload(NOTHING, NOTHING, 1, [])
    threading.Timer(0.05, go.set).start()
    mover.afterwards(lambda: order.append(threading.current_thread().name))
    assert order == ["nothing to wait for", "copy", threading.current_thread().name]
