"""Bringing records ahead of their use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from oomb_accel.pages.room import Kind
from oomb_accel.pages.stored import Wanted, WantedLater
from oomb_accel.schedule import PageRange

STEPS_AHEAD = 2
"""Layers ahead of the one in use."""
_LOOK = 64
"""Needs among which a use is looked for."""


@dataclass(frozen=True, slots=True)
class Need:
    """A use that lies ahead."""

    step: int
    """Counts layers in the order in which they run."""
    kind: Kind
    layer: int
    pages: PageRange
    wanted: WantedLater | None
    """None is every record of these pages."""


class Bringer(Protocol):
    """Records that can be on the host."""

    def expect(self, layer: int, pages: PageRange, wanted: Wanted | None = None) -> bool:
        """Start to bring what a later use will miss; False where there is no room for now."""

    def forget_expected(self) -> None:
        """Nothing is expected any more."""


class Itinerary:
    """The uses of a run in their order. Uses that are not in it are passed over: it only ever makes things faster."""

    def __init__(self) -> None:
        self._needs: Sequence[Need] = ()
        self._done = 0
        """Needs before this one lie behind."""
        self._brought = 0
        """Needs before this one were brought."""

    def begin(self, needs: Sequence[Need]) -> None:
        """Follow these needs from now on."""
        self._needs, self._done, self._brought = needs, 0, 0

    def passed(self, kind: Kind, layer: int, *ranges: PageRange) -> None:
        """Tell of a use."""
        for pages in ranges:
            for number in range(self._done, min(self._done + _LOOK, len(self._needs))):
                need = self._needs[number]
                if need.layer == layer and need.kind == kind and need.pages == pages:
                    self._done = number + 1
                    break

    def bring(self, records: dict[Kind, Bringer]) -> None:
        """Bring what comes next, as far as there is room, at most two layers ahead."""
        self._brought = max(self._brought, self._done)
        step = self._needs[self._done - 1].step if self._done else 0
        while self._brought < len(self._needs):
            need = self._needs[self._brought]
            if need.step > step + STEPS_AHEAD:
                break
            keeper = records.get(need.kind)
            wanted = need.wanted() if need.wanted is not None and keeper is not None else None
            if keeper is not None and not keeper.expect(need.layer, need.pages, wanted):
                break
            self._brought += 1
