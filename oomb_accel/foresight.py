"""What the passes over a stream will use: so that pages are brought ahead of their use, and the right ones leave.

In dense layers, and wherever lists are recorded, it is known. While pages are being selected for the first time, those
that were selected lately are the best guess.

Legend: L layers, G KV heads, N pages of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from oomb_accel.pages import Kind, Need, PageShape
from oomb_accel.past import past_ranges
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from oomb_accel.selection import PageSelector, Reach, TouchedPages

Phase: TypeAlias = Literal["forward", "recompute", "backward"]
"""A run of the model over a chunk: in the forward sweep, again in the backward sweep, and its backward."""

_HORIZON = 4
"""Chunks that are looked at for a page's next use. What comes later counts as never."""
_MEMORY = 0.8
"""How much of a page's count of selections is left a chunk later."""
_ALWAYS = np.float32(np.inf)


@dataclass(slots=True)
class _Position:
    chunk: Chunk
    phase: Phase


class Foresight:
    """Knows the uses of one stream.

    Args:
        selector: None where every layer attends to everything, or to its window.
        span_pages: most pages of a dense call.
        skipped: chunks whose recompute uses no pages, since their attention outputs are kept.
    """

    def __init__(
        self,
        shape: PageShape,
        schedule: ChunkSchedule,
        selector: PageSelector | None,
        *,
        span_pages: int,
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        self._shape, self._selector, self._span_pages, self._skipped = shape, selector, span_pages, skipped
        self._chunks = schedule.chunks
        self._now: _Position | None = None
        self._size = (schedule.num_pages, shape.num_kv_heads)
        self._oldest_first = np.broadcast_to(-np.arange(schedule.num_pages, dtype=np.float32)[:, None], self._size)
        self._counts: dict[int, npt.NDArray[np.float32]] = {}
        self._last_count: dict[int, int] = {}
        self._worths: dict[tuple[Kind, int], tuple[int, Phase, npt.NDArray[np.float32]]] = {}

    def begin(self, chunk: Chunk, phase: Phase) -> list[Need]:
        """Tell that a run begins. Returns what it will use, in order, and what the next one uses first."""
        self._now = _Position(chunk, phase)
        needs = self._needs(chunk, phase, 0)
        following = self._following(chunk, phase)
        if following is not None:
            last = needs[-1].step + 1 if needs else 0
            needs += [need for need in islice(self._needs(*following, last), 64) if need.step < last + 2]
        return needs

    def worth(self, kind: Kind, layer: int) -> npt.NDArray[np.float32]:
        """How much each record of the layer is worth on the device, ``[N, G]``."""
        if layer not in self._shape.sparse_layers or self._now is None:
            # Walked through from end to end each time: what stays should stay, and the first pages live longest.
            return self._oldest_first
        position = self._now
        known = self._worths.get((kind, layer))
        if known is not None and known[:2] == (position.chunk.index, position.phase):
            return known[2]
        worth = self._by_count(layer) if position.phase == "forward" else self._by_next_use(kind, layer)
        if position.phase != "forward" or self._last_count.get(layer) == position.chunk.index:
            self._worths[kind, layer] = position.chunk.index, position.phase, worth
        return worth

    def _following(self, chunk: Chunk, phase: Phase) -> tuple[Chunk, Phase] | None:
        if phase == "recompute":
            return chunk, "backward"
        step = 1 if phase == "forward" else -1
        index = chunk.index + step
        return (
            (self._chunks[index], "forward" if step == 1 else "recompute") if 0 <= index < len(self._chunks) else None
        )

    def _needs(self, chunk: Chunk, phase: Phase, first_step: int) -> list[Need]:
        if phase == "recompute" and chunk.index in self._skipped:
            return []
        layers = range(self._shape.num_layers)
        order: Sequence[int] = layers if phase != "backward" else layers[::-1]
        return [
            Need(step, *use)
            for step, layer in enumerate(order, start=first_step)
            for use in self._layer_uses(chunk, phase, layer)
        ]

    def _layer_uses(
        self, chunk: Chunk, phase: Phase, layer: int
    ) -> Iterator[tuple[Kind, int, PageRange, TouchedPages | None]]:
        reach = self._reach(layer, chunk)
        kinds: tuple[Kind, ...] = ("values", "gradients") if phase == "backward" else ("values",)
        calls = past_ranges(
            chunk.past_pages,
            self._shape.windows[layer],
            reach,
            span_pages=self._span_pages,
            page_tokens=self._shape.page_tokens,
        )
        for ranges in calls:
            for kind in kinds:
                for pages in ranges:
                    yield kind, layer, pages, None
        touched = self._selector.touched(layer, chunk) if self._selector is not None else None
        if reach is not None and touched is not None and phase != "forward":
            for kind in kinds:
                yield kind, layer, reach.candidates, touched
        if phase == "backward" and chunk.own_pages:
            yield "gradients", layer, chunk.own_pages, None

    def _reach(self, layer: int, chunk: Chunk) -> Reach | None:
        return self._selector.reach(layer, chunk.past_pages) if self._selector is not None else None

    def _by_count(self, layer: int) -> npt.NDArray[np.float32]:
        """By how often records were selected, lately more than long ago; what is used in any case comes first."""
        assert self._now is not None and self._selector is not None
        counts = self._counts.setdefault(layer, np.zeros(self._size, np.float32))
        chunk = self._now.chunk
        reach, touched = self._reach(layer, chunk), self._selector.touched(layer, chunk)
        if reach is not None and touched is not None and self._last_count.get(layer) != chunk.index:
            self._last_count[layer] = chunk.index
            counts *= _MEMORY
            counts[reach.candidates.first : reach.candidates.end].reshape(-1)[touched.numbers()] += 1
        worth = counts.copy()
        self._mark_always(worth, layer, chunk)
        following = self._chunks[chunk.index + 1] if chunk.index + 1 < len(self._chunks) else None
        if following is not None:
            self._mark_always(worth, layer, following)
        return worth

    def _by_next_use(self, kind: Kind, layer: int) -> npt.NDArray[np.float32]:
        """By how soon records are used: the number of the next chunk, which falls in this sweep."""
        assert self._now is not None
        worth = np.full(self._size, -1, np.float32)
        next_index = self._now.chunk.index - (self._now.phase == "backward")
        for index in range(max(0, next_index - _HORIZON + 1), next_index + 1):  # the soonest is written last
            self._mark_uses(worth, kind, layer, self._chunks[index])
        return worth

    def _mark_uses(self, worth: npt.NDArray[np.float32], kind: Kind, layer: int, chunk: Chunk) -> None:
        assert self._selector is not None
        reach, touched = self._reach(layer, chunk), self._selector.touched(layer, chunk)
        if reach is None:  # short enough to attend to everything
            worth[chunk.past_pages.first : chunk.past_pages.end] = chunk.index
        elif touched is not None:
            candidates = worth[reach.candidates.first : reach.candidates.end].reshape(-1)
            candidates[touched.numbers()] = chunk.index
            for pages in (reach.sinks, reach.recents):
                worth[pages.first : pages.end] = chunk.index
        if kind == "gradients":
            worth[chunk.own_pages.first : chunk.own_pages.end] = chunk.index

    def _mark_always(self, worth: npt.NDArray[np.float32], layer: int, chunk: Chunk) -> None:
        reach = self._reach(layer, chunk)
        ranges = (chunk.past_pages,) if reach is None else (reach.sinks, reach.recents)
        for pages in ranges:
            worth[pages.first : pages.end] = _ALWAYS
