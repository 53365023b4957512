"""Which records leave the device first, found without asking for the worth of everything that lies there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from oomb_accel.pages.table import NO_SLOT

Places: TypeAlias = npt.NDArray[np.int64]
"""Records of a layer: their places in ``[N, G]`` laid out in a row, ascending and distinct."""
Worths: TypeAlias = npt.NDArray[np.float32]

_TIMES = 8
"""So many times those that leave at once are candidates, behind a look at everything."""
_LEAST_CANDIDATES = 1024
_MOST_NOTED = 1 << 15
"""With more records a look at everything is cheaper."""


class LeastWorth:
    """The records of one layer on the device that are worth least.

    Now and then all records are compared, and the lower ones become candidates. Until these run short, only they and
    what `note` was told of are compared: others cannot have become worth less.
    """

    def __init__(self) -> None:
        self._candidates: Places | None = None
        """None where everything must be looked at."""
        self._limit = np.float32(np.inf)
        """No record that is not a candidate, nor noted, is worth less."""
        self._noted: list[Places] = []
        self._num_noted = 0

    def note(self, places: Places) -> None:
        """These records have come to the device, or were used: their worth may be less than it was."""
        if self._candidates is not None:
            self._noted.append(places)
            self._num_noted += len(places)
            if self._num_noted > _MOST_NOTED:
                self.forget()

    def forget(self) -> None:
        """Records were used, and nobody knows which."""
        self._candidates, self._noted, self._num_noted = None, [], 0

    def find(self, count: int, slots: npt.NDArray[np.int32], worth: Callable[[Places], Worths]) -> Places:
        """The least worth on the device, or all where there are no more than ``count``; the oldest pages of those that
        are worth the same.

        Args:
            slots: of all records of the layer, in a row.
        """
        places, worths = self._compared(slots, worth)
        if len(places) < count:
            self._limit = np.float32(np.inf)
            places = np.flatnonzero(slots != NO_SLOT)
            worths = worth(places)
        most = max(_TIMES * count, _LEAST_CANDIDATES)
        if len(places) > 2 * most:
            lower = least(worths, most)
            places, worths = places[lower], worths[lower]
            self._limit = worths.max()
        self._candidates, self._noted, self._num_noted = places, [], 0
        return places[least(worths, count)]

    def _compared(self, slots: npt.NDArray[np.int32], worth: Callable[[Places], Worths]) -> tuple[Places, Worths]:
        """Candidates that are still on the device and worth no more than the limit."""
        if self._candidates is None:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        asked = np.zeros(len(slots), bool)  # marks in a row are a sorted list without repetitions, for less than a sort
        for places in (self._candidates, *self._noted):
            asked[places] = True
        asked &= slots != NO_SLOT
        places = np.flatnonzero(asked)
        worths = worth(places)
        low = worths <= self._limit
        return places[low], worths[low]


def least(worths: Worths, count: int) -> npt.NDArray[np.bool_]:
    """Marks the ``count`` lowest numbers; of equal ones the first."""
    if len(worths) <= count:
        return np.ones(len(worths), bool)
    border = np.sort(worths)[count - 1]  # np.partition is up to 30 times slower where many are equal
    chosen: npt.NDArray[np.bool_] = worths < border
    equal = np.flatnonzero(worths == border)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return chosen
