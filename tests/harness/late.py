"""A mover for tests on the CPU whose streams run at random times: as late as somebody waits for them, or earlier."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from oomb_accel.pages import HostMover, PageMover

Addresses = npt.NDArray[np.int64]


@dataclass(eq=False)
class Work:
    """What a stream was given: it runs behind what that stream was given before, and behind ``after``."""

    stream: deque[Work]
    after: list[Work]
    run: Callable[[], object]
    done: bool = False


@dataclass
class LateMover(PageMover):
    """Two streams that copy, and one that computes where a test gives it work; without that, computing is done at once,
    and all that is put off are copies.

    Args:
        seed: of the delays.
        haste: chance that the first work of a stream is not put off, at each of its chances.
    """

    seed: int
    haste: float = 0.2
    num_copies: int = 0
    num_late: int = 0
    """Times that somebody waited for a copy that had not happened."""
    num_bytes: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._up: deque[Work] = deque()
        self._down: deque[Work] = deque()
        self._computing: deque[Work] = deque()
        self._storages: list[Tensor] = []

    def compute(self, run: Callable[[], object]) -> None:
        """Have the computing stream do this."""
        self._give(self._computing, (), run)

    @property
    def is_computing(self) -> bool:
        """Whether the computing stream has something to do."""
        return bool(self._computing)

    def hurry(self) -> None:
        """Uploads come as early as they may."""
        while self._up:
            self._run(self._up[-1])

    def save(self) -> None:
        """Downloads come as early as they may."""
        while self._down:
            self._run(self._down[-1])

    def synchronize(self) -> None:
        """All streams come to their end, uploads last."""
        for stream in (self._computing, self._down, self._up):
            while stream:
                self._run(stream[-1])

    def waited_seconds(self) -> float:
        return 0.0

    def now(self) -> Work | None:
        self._let_time_pass()
        return self._computing[-1] if self._computing else None

    def wait(self, marks: Iterable[Work | None]) -> None:
        open_marks = [mark for mark in marks if mark is not None and not mark.done]
        self.num_late += len(open_marks)
        if self._computing:
            self._give(self._computing, open_marks, lambda: None)
        else:  # nothing to do before, so the computing stream waits here and now
            for mark in open_marks:
                self._run(mark)

    def upload(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Work | None]) -> Work:
        self.num_bytes["up"] += len(sources) * record_bytes
        return self._copy(self._up, HostMover().upload, sources, targets, record_bytes, after)

    def download(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Work | None]) -> Work:
        self.num_bytes["down"] += len(sources) * record_bytes
        return self._copy(self._down, HostMover().download, sources, targets, record_bytes, after)

    def launch(self, kernel: Callable[[Tensor], None], *rows: npt.NDArray[np.integer]) -> None:
        HostMover().launch(kernel, *rows)

    def guard(self, storage: Tensor) -> None:
        self._storages.append(storage)  # what nobody waited for may be copied after the stream is gone

    def _copy(
        self,
        stream: deque[Work],
        move: Callable[[Addresses, Addresses, int, Iterable[None]], None],
        sources: Addresses,
        targets: Addresses,
        record_bytes: int,
        after: Iterable[Work | None],
    ) -> Work:
        self.num_copies += 1
        sources, targets = sources.copy(), targets.copy()
        return self._give(stream, after, lambda: move(sources, targets, record_bytes, ()))

    def _give(self, stream: deque[Work], after: Iterable[Work | None], run: Callable[[], object]) -> Work:
        work = Work(stream, [other for other in after if other is not None], run)
        stream.append(work)
        self._let_time_pass()
        return work

    def _let_time_pass(self) -> None:
        for stream in (self._up, self._down, self._computing):
            while stream and self._random.random() < self.haste:
                self._run(stream[0])

    def _run(self, work: Work) -> None:
        """Run the work, and what must come before it."""
        while not work.done:
            first = work.stream[0]
            for other in first.after:
                if not other.done:
                    self._run(other)
            if first.done:
                continue
            first.stream.popleft()
            first.done = True
            first.run()
