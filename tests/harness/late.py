"""A mover for tests on the CPU whose copies happen at random times: as late as somebody waits for them, or earlier."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oomb_accel.pages import HostMover, PageMover

Addresses = npt.NDArray[np.int64]


@dataclass(eq=False)
class Copy:
    """A copy that has been asked for."""

    lane: list[Copy]
    sources: Addresses
    targets: Addresses
    record_bytes: int
    to_device: bool
    after: list[Copy]
    done: bool = False


@dataclass
class LateMover(PageMover):
    """Copies of one direction happen in their order, each behind what it must wait for, and otherwise at random.

    Args:
        seed: of the delays.
        haste: chance that a copy is not put off, at each of its chances.
    """

    seed: int
    haste: float = 0.2
    num_copies: int = 0
    num_late: int = 0
    """Copies that happened only because somebody waited for them."""
    lanes: tuple[list[Copy], list[Copy]] = field(default_factory=lambda: ([], []))

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def now(self) -> None:
        self._let_time_pass()

    def wait(self, marks: Iterable[Copy | None]) -> None:
        for mark in marks:
            if mark is not None and not mark.done:
                self.num_late += 1
                self._run(mark)

    def upload(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Copy | None]) -> Copy:
        return self._ask(0, sources, targets, record_bytes, after)

    def download(self, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Copy | None]) -> Copy:
        return self._ask(1, sources, targets, record_bytes, after)

    def to_device(self, array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.copy())

    def guard(self, storage: Tensor) -> None:
        self._storage = storage  # what is never waited for may be copied after the stream is gone

    def _ask(
        self, lane: int, sources: Addresses, targets: Addresses, record_bytes: int, after: Iterable[Copy | None]
    ) -> Copy:
        copy = Copy(
            self.lanes[lane], sources.copy(), targets.copy(), record_bytes, lane == 0, [c for c in after if c is not None]
        )
        copy.lane.append(copy)
        self.num_copies += 1
        self._let_time_pass()
        return copy

    def _let_time_pass(self) -> None:
        for lane in self.lanes:
            while lane and self._random.random() < self.haste:
                self._run(lane[0])

    def _run(self, copy: Copy) -> None:
        while not copy.done:
            first = copy.lane[0]
            for other in first.after:
                if not other.done:
                    self._run(other)
            if first.done:
                continue
            first.lane.pop(0)
            first.done = True
            move = HostMover().upload if first.to_device else HostMover().download
            move(first.sources, first.targets, first.record_bytes, ())
