"""Free slots of a device pool whose last use may still lie ahead on a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from oomb_accel.pages.mover import Mark

Slots: TypeAlias = npt.NDArray[np.int32]


class SlotQueue:
    """Slots in the order in which they were given back, each batch with the marks behind which it may be written.

    The oldest come first: their marks have most likely passed.
    """

    def __init__(self, num_slots: int) -> None:
        self._batches: deque[tuple[Slots, tuple[Mark, ...]]] = deque()
        self._count = 0
        self.give(np.arange(num_slots, dtype=np.int32), ())

    def __len__(self) -> int:
        return self._count

    def give(self, slots: Slots, marks: Iterable[Mark]) -> None:
        """These slots are free behind the marks."""
        if slots.size:
            self._batches.append((slots, tuple(marks)))
            self._count += slots.size

    def take(self, count: int) -> tuple[Slots, list[Mark]]:
        """That many slots, and the marks behind which they may be written."""
        assert count <= self._count, f"{count} slots wanted, {self._count} are free"
        self._count -= count
        taken: list[Slots] = []
        marks: list[Mark] = []
        while count:
            slots, waiting = self._batches.popleft()
            if slots.size > count:
                self._batches.appendleft((slots[count:], waiting))
                slots = slots[:count]
            taken.append(slots)
            marks.extend(waiting)
            count -= slots.size
        return np.concatenate(taken) if taken else np.zeros(0, np.int32), marks
