"""Moving records between device and host memory, apart from which and when.

A mark stands for a moment on one of three streams: the one that computes, and one for each direction of copying. Work
that must come behind it is given the mark. The host waits for the device nowhere here, but where it is told to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oomb_accel.pages.pinned import PinnedNumbers
from oomb_kernels import CopyMethod, available_copy_methods, best_copy_method, copy_records

Addresses: TypeAlias = npt.NDArray[np.int64]
Mark: TypeAlias = Any
"""A moment on a stream. None is the beginning of time."""


_UNCOUNTED_WAITS = 256


class PageMover(Protocol):
    """Copies in the background, ordered by marks."""

    num_bytes: dict[str, int]
    """Of records copied so far, ``"up"`` to the device and ``"down"`` to the host."""

    def waited_seconds(self) -> float:
        """How long the computing stream stood still for copies, as far as it has come."""

    def now(self) -> Mark:
        """Everything that the computing stream was given so far."""

    def wait(self, marks: Iterable[Mark]) -> None:
        """What the computing stream is given from now on comes behind these marks."""

    def upload(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Mark]) -> Mark:
        """Copy records from the host to the device, behind these marks."""

    def download(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Mark]) -> Mark:
        """Copy records from the device to the host, behind these marks."""

    def launch(self, kernel: Callable[[Tensor], None], *rows: npt.NDArray[np.integer]) -> None:
        """Have the computing stream run a kernel that is given a few numbers, int32 ``[number of rows, M]``. They do
        not queue behind uploads."""

    def synchronize(self) -> None:
        """The host waits for all copies: for a stream that came to no end."""

    def guard(self, storage: Tensor) -> None:
        """Nobody else gets this memory, once it is dropped, before the copies in flight have passed."""


class HostMover:
    """For the CPU: every copy is done at once."""

    def __init__(self) -> None:
        self.num_bytes = {"up": 0, "down": 0}

    def waited_seconds(self) -> float:
        return 0.0

    def now(self) -> Mark:
        return None

    def wait(self, marks: Iterable[Mark]) -> None:
        return None

    def upload(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Mark]) -> Mark:
        self.num_bytes["up"] += len(sources) * record_bytes
        copy_records(sources, targets, record_bytes, to_device=True, device=torch.device("cpu"), method="loop")

    def download(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Mark]) -> Mark:
        self.num_bytes["down"] += len(sources) * record_bytes
        copy_records(sources, targets, record_bytes, to_device=False, device=torch.device("cpu"), method="loop")

    def launch(self, kernel: Callable[[Tensor], None], *rows: npt.NDArray[np.integer]) -> None:
        kernel(torch.from_numpy(np.stack(rows).astype(np.int32)))

    def synchronize(self) -> None:
        return None

    def guard(self, storage: Tensor) -> None:
        return None


class CudaMover:
    """One stream per direction, filled by whoever asks. A thread of its own for that would leave the caller half a
    microsecond per copy, and take more: two threads of Python, and two callers of the driver, hold each other up.

    Args:
        pinned: whether all host memory is. Pinning may be refused at any time.
    """

    def __init__(self, device: torch.device, *, pinned: Callable[[], bool]) -> None:
        self._device = device
        self._pinned = pinned
        self._method: CopyMethod = best_copy_method(device)
        # A copy engine serves its queue in order, so a few bytes would wait behind megabytes.
        self._numbers = PinnedNumbers(device, in_place="kernel" in available_copy_methods(device))
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in_flight: deque[tuple[torch.cuda.Event, object]] = deque()
        """What copies read, and when they have passed."""
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Before and behind each wait that is not counted yet."""
        self._waited_ms = 0.0
        self.num_bytes = {"up": 0, "down": 0}

    def waited_seconds(self) -> float:
        self._count_waits()
        return self._waited_ms / 1000

    def now(self) -> Mark:
        return _record(torch.cuda.current_stream(self._device))

    def wait(self, marks: Iterable[Mark]) -> None:
        ahead = [event for event in marks if event is not None and not event.query()]
        if not ahead:
            return
        stream = torch.cuda.current_stream(self._device)
        before = _record(stream, timed=True)
        self._order(stream, ahead)
        self._waits.append((before, _record(stream, timed=True)))
        if len(self._waits) > _UNCOUNTED_WAITS:
            self._count_waits()

    def upload(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Mark]) -> Mark:
        self.num_bytes["up"] += len(sources) * record_bytes
        return self._copy(self._up, sources, targets, record_bytes, after, to_device=True)

    def download(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Mark]) -> Mark:
        self.num_bytes["down"] += len(sources) * record_bytes
        return self._copy(self._down, sources, targets, record_bytes, after, to_device=False)

    def launch(self, kernel: Callable[[Tensor], None], *rows: npt.NDArray[np.integer]) -> None:
        self._numbers.launch(kernel, *rows)

    def synchronize(self) -> None:
        self._up.synchronize()
        self._down.synchronize()

    def guard(self, storage: Tensor) -> None:
        storage.record_stream(self._up)
        storage.record_stream(self._down)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        sources: Addresses,
        targets: Addresses,
        record_bytes: int,
        after: Iterable[Mark],
        *,
        to_device: bool,
    ) -> Mark:
        self._order(stream, after)
        # A record by itself is for the copy engine, and may have any size.
        method = self._method if self._pinned() and len(sources) > 1 else "loop"
        used = copy_records(
            sources, targets, record_bytes, to_device=to_device, device=self._device, method=method, stream=stream
        )
        event = _record(stream)
        _keep(self._in_flight, used, event)
        return event

    def _order(self, stream: torch.cuda.Stream, marks: Iterable[Mark]) -> None:
        for mark in marks:
            if mark is not None:
                stream.wait_event(mark)

    def _count_waits(self) -> None:
        while self._waits and self._waits[0][1].query():
            before, behind = self._waits.popleft()
            self._waited_ms += before.elapsed_time(behind)


def _record(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def _keep(in_flight: deque[tuple[torch.cuda.Event, object]], used: object, event: torch.cuda.Event) -> None:
    """Hold what a copy reads until it has passed."""
    while in_flight and in_flight[0][0].query():
        in_flight.popleft()
    if used is not None:
        in_flight.append((event, used))
