"""Bringing records ahead of their use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
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

    def expect(self, layer: int, uses: Iterable[tuple[PageRange, Wanted | None]]) -> int:
        """Start to bring what later uses will miss, in order as far as there is room for now. Returns for how many."""

    def forget_expected(self) -> None:
        """Nothing is expected any more."""


class Itinerary:
    """The uses of a run in their order. Uses that are not in it are passed over: it only ever makes things faster."""

    def __init__(self) -> None:
        self._needs: Sequence[Need] = ()
        self._done = 0
        """Needs before this one lie behind."""
        self._numbers: dict[Kind, list[int]] = {}
        """Of the needs of each kind."""
        self._brought: dict[Kind, int] = {}
        """So many of them were brought, or lie behind."""

    def begin(self, needs: Sequence[Need]) -> None:
        """Follow these needs from now on."""
        self._needs, self._done, self._numbers = needs, 0, {}
        for number, need in enumerate(needs):
            self._numbers.setdefault(need.kind, []).append(number)
        self._brought = dict.fromkeys(self._numbers, 0)

    def passed(self, kind: Kind, layer: int, *ranges: PageRange) -> None:
        """Tell of a use."""
        for pages in ranges:
            for number in range(self._done, min(self._done + _LOOK, len(self._needs))):
                need = self._needs[number]
                if need.layer == layer and need.kind == kind and need.pages == pages:
                    self._done = number + 1
                    break

    def bring(self, records: dict[Kind, Bringer]) -> None:
        """Bring what comes next, as far as there is room, at most two layers ahead: the needs of a step and kind at
        once, since every batch of copies has a price."""
        last = (self._needs[self._done - 1].step if self._done else 0) + STEPS_AHEAD
        for kind, keeper in records.items():
            numbers, brought = self._numbers.get(kind, []), self._brought.get(kind, 0)
            while brought < len(numbers):
                first = self._needs[numbers[brought]]
                if numbers[brought] < self._done:
                    brought += 1
                    continue
                if first.step > last:
                    break
                step = self._of_step(numbers, brought)
                uses = ((need.pages, None if need.wanted is None else need.wanted()) for need in step)
                count = keeper.expect(first.layer, uses)
                brought += count
                if count < len(step):
                    break
            self._brought[kind] = brought

    def _of_step(self, numbers: list[int], first: int) -> list[Need]:
        """The needs of one step, from this one on."""
        step = self._needs[numbers[first]].step
        return list(takewhile(lambda need: need.step == step, (self._needs[n] for n in islice(numbers, first, None))))
