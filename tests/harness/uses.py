"""What a step's cache is asked for, and what was foretold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from oomb_accel.foresight import Foresight, Phase
from oomb_accel.memory import StreamMemory
from oomb_accel.pages import Kind, Need, PagedKVCache, Places, TieredPages, Wanted, Worths
from oomb_accel.schedule import Chunk, PageRange


@dataclass
class Run:
    """A run of the model over a chunk, or its backward."""

    chunk: Chunk
    phase: Phase
    foretold: list[Need] = field(default_factory=list)
    """Of this run, and of the first steps of the next."""
    num_own: int = 0
    """Those of this run."""
    uses: list[tuple[Kind, int, PageRange]] = field(default_factory=list)
    """In order, without empty ranges."""
    touched: list[tuple[Kind, int, PageRange, Wanted | None]] = field(default_factory=list)
    """The same with the records that were wanted; None is all of them."""
    worths: dict[tuple[Kind, int], npt.NDArray[np.float32]] = field(default_factory=dict)
    """As they were told in this run."""
    uploads: dict[str, int] = field(default_factory=lambda: {"ahead": 0, "late": 0})
    """Records brought before a use, and in it."""

    @property
    def own(self) -> list[tuple[Kind, int, PageRange]]:
        """What was foretold of this run, without empty ranges."""
        return [(need.kind, need.layer, need.pages) for need in self.foretold[: self.num_own] if len(need.pages)]

    def names(self, kind: Kind, layer: int, size: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Which records of a layer it uses, ``[N, G]``."""
        used = np.zeros(size, bool)
        for at_kind, at_layer, pages, wanted in self.touched:
            if (at_kind, at_layer) == (kind, layer):
                here = used[pages.first : pages.end].reshape(-1)
                here[... if wanted is None else wanted] = True
        return used


@contextmanager
def recorded_runs() -> Iterator[list[Run]]:
    """Every run of a step inside that keeps pages in host memory."""
    runs: list[Run] = []
    begin, passed, worth = StreamMemory.begin, PagedKVCache._passed, Foresight.worth
    foretell, bring, expect = Foresight.begin, TieredPages._bring, TieredPages.expect
    wanted_now: list[Wanted | None] = [None]
    ahead = [False]

    def begin_(self: StreamMemory, chunk: Chunk, phase: Phase) -> None:
        runs.append(Run(chunk, phase))
        begin(self, chunk, phase)

    def foretell_(self: Foresight, chunk: Chunk, phase: Phase) -> list[Need]:
        needs = foretell(self, chunk, phase)
        runs[-1].foretold, runs[-1].num_own = needs, len(list(self._needs(chunk, phase, 0)))
        return needs

    def passed_(self: PagedKVCache, kind: Kind, layer: int, *ranges: PageRange) -> None:
        for pages in filter(len, ranges):
            runs[-1].uses.append((kind, layer, pages))
            runs[-1].touched.append((kind, layer, pages, wanted_now[0]))
        passed(self, kind, layer, *ranges)

    def worth_(self: Foresight, kind: Kind, layer: int, places: Places) -> Worths:
        everything = np.arange(self._num_records)
        runs[-1].worths[kind, layer] = worth(self, kind, layer, everything).reshape(-1, self._num_heads)
        return worth(self, kind, layer, places)

    def expect_(self: TieredPages, *arguments: Any) -> int:
        ahead[0] = True
        try:
            return expect(self, *arguments)
        finally:
            ahead[0] = False

    def bring_(self: TieredPages, layer: int, coming: list[Places], marks: list[Any]) -> None:
        runs[-1].uploads["ahead" if ahead[0] else "late"] += sum(map(len, coming))
        bring(self, layer, coming, marks)

    def with_slots(name: str) -> Any:
        original = getattr(PagedKVCache, name)

        def slots_(self: PagedKVCache, layer: int, pages: PageRange, wanted: Any) -> torch.Tensor:
            wanted_now[0] = wanted()
            try:
                slots: torch.Tensor = original(self, layer, pages, wanted)
                return slots
            finally:
                wanted_now[0] = None

        return mock.patch.object(PagedKVCache, name, slots_)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (StreamMemory, "begin", begin_),
            (Foresight, "begin", foretell_),
            (Foresight, "worth", worth_),
            (PagedKVCache, "_passed", passed_),
            (TieredPages, "expect", expect_),
            (TieredPages, "_bring", bring_),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        for name in ("value_slots", "gradient_slots"):
            stack.enter_context(with_slots(name))
        yield runs
