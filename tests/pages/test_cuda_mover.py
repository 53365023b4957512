"""CudaMover without a GPU: what it gives to which stream, and in what order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from oomb_accel.pages import CudaMover
from oomb_accel.pages import mover as mover_module

NOTHING = np.zeros(1, np.int64)


class Stream:
    """Remembers what it was given."""

    def __init__(self, device: Any = None) -> None:
        self.given: list[Any] = []

    def wait_event(self, event: Event) -> None:
        self.given.append(("behind", event))


class Event:
    """A moment that is still to come."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.times = enable_timing

    def record(self, stream: Stream) -> None:
        stream.given.append(("moment", self))

    def query(self) -> bool:
        return False


Make = Callable[..., tuple[CudaMover, Stream]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a mover, and the computing stream beside it. Copies are a function's."""

    def make(copy: Callable[[], object] = lambda: None, pinned: bool = True) -> tuple[CudaMover, Stream]:
        computing = Stream()

        def copied(*_: Any, method: str, stream: Stream, **__: Any) -> object:
            result = copy()
            stream.given.append(("copy", method))
            return result

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
        monkeypatch.setattr(mover_module, "copy_records", copied)
        monkeypatch.setattr(mover_module, "best_copy_method", lambda device: "batch")
        monkeypatch.setattr(mover_module, "available_copy_methods", lambda device: ("batch", "loop"))
        return CudaMover(torch.device("cuda", 0), pinned=lambda: pinned), computing

    return make


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("up", [True, False])
def test_a_copy_is_between_what_it_waits_for_and_its_mark(up: bool, pinned: bool, count: int, make: Make) -> None:
    """A record by itself, which may have any size, is for the copy engine."""
    mover, computing = make(pinned=pinned)
    now, before, places = mover.now(), Event(), np.zeros(count, np.int64)
    mark = (mover.upload if up else mover.download)(places, places, 64, [now, None, before])
    streams: list[Any] = [mover._up, mover._down]
    stream, other = streams if up else streams[::-1]
    method = "batch" if pinned and count > 1 else "loop"
    assert stream.given == [("behind", now), ("behind", before), ("copy", method), ("moment", mark)]
    assert other.given == [] and computing.given == [("moment", now)]
    assert mover.num_bytes == {"up": count * 64 * up, "down": count * 64 * (not up)}


def test_waits_are_timed_and_nothing_is_waited_for_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    mover, computing = make()
    mark = mover.upload(NOTHING, NOTHING, 64, [])
    mover.wait([None, mark])
    kinds = [(kind, getattr(what, "times", None)) for kind, what in computing.given]
    assert kinds == [("moment", True), ("behind", False), ("moment", True)] and computing.given[1][1] is mark
    monkeypatch.setattr(Event, "query", lambda event: True)
    mover.wait([mark])
    assert len(computing.given) == 3, "what has passed costs nothing"


def test_a_refused_copy_is_told_to_whoever_asked(make: Make) -> None:
    def refuse() -> None:
        raise RuntimeError("an illegal address")

    mover, _ = make(refuse)
    with pytest.raises(RuntimeError, match="an illegal address"):
        mover.download(NOTHING, NOTHING, 64, [])


def test_what_a_copy_reads_lives_until_it_has_passed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Addresses:
        """Of records, in pinned memory."""

    made: list[weakref.ref[Addresses]] = []

    def copy() -> Addresses:
        addresses = Addresses()
        made.append(weakref.ref(addresses))
        return addresses

    mover, _ = make(copy)
    mover.upload(NOTHING, NOTHING, 64, [])
    mover.upload(NOTHING, NOTHING, 64, [])
    assert made[0]() is not None
    monkeypatch.setattr(Event, "query", lambda event: True)
    mover.upload(NOTHING, NOTHING, 64, [])
    assert made[0]() is None and made[1]() is None
