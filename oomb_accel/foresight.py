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

from oomb_accel.pages import Kind, Need, PageShape, Places, Worths
from oomb_accel.past import past_ranges
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from oomb_accel.selection import PageSelector, Reach, TouchedPages

Phase: TypeAlias = Literal["forward", "recompute", "backward"]
"""A run of the model over a chunk: in the forward sweep, again in the backward sweep, and its backward."""

_HORIZON = 4
"""Chunks that are looked at for a page's next use, a bit of a byte each. What comes later counts as never."""
_FADING = -np.log(0.8)
"""A page's count of selections is 0.8 of it a chunk later. Instead later selections count for more: the order is the
same, and nothing changes for a page that was not selected. Logarithms stay small however many chunks there are."""
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
        self._num_heads = shape.num_kv_heads
        self._num_records = schedule.num_pages * shape.num_kv_heads
        self._counts: dict[int, Worths] = {}
        """By layer, logarithms of the counts of all records."""
        self._last_count: dict[int, int] = {}
        """By layer, the last chunk whose selections were counted."""
        self._uses: dict[tuple[Kind, int], npt.NDArray[np.uint8]] = {}
        """Of all records of a layer, which chunks use them: bit ``index % 8`` for each of the chunks below."""
        self._marked: dict[tuple[Kind, int], range] = {}
        self._soonest: tuple[int, Worths] | None = None
        """The next chunk (-1 behind the first), and for each byte of bits the number of the soonest that it names."""

    def begin(self, chunk: Chunk, phase: Phase) -> list[Need]:
        """Tell that a run begins. Returns what it will use, in order, and what the next one uses first."""
        self._now = _Position(chunk, phase)
        needs = list(self._needs(chunk, phase, 0))
        following = self._following(chunk, phase)
        if following is not None:
            last = needs[-1].step + 1 if needs else 0
            needs += [need for need in islice(self._needs(*following, last), 64) if need.step < last + 2]
        return needs

    def worth(self, kind: Kind, layer: int, places: Places) -> Worths:
        """How much these records of the layer are worth on the device."""
        if layer not in self._shape.sparse_layers or self._now is None:
            # Walked through from end to end each time: what stays should stay, and the first pages live longest.
            return -(places // self._num_heads).astype(np.float32)
        if self._now.phase == "forward":
            return self._by_count(layer, places)
        return self._by_next_use(kind, layer, places)

    def _following(self, chunk: Chunk, phase: Phase) -> tuple[Chunk, Phase] | None:
        if phase == "recompute":
            return chunk, "backward"
        step = 1 if phase == "forward" else -1
        index = chunk.index + step
        return (
            (self._chunks[index], "forward" if step == 1 else "recompute") if 0 <= index < len(self._chunks) else None
        )

    def _needs(self, chunk: Chunk, phase: Phase, first_step: int) -> Iterator[Need]:
        if phase == "recompute" and chunk.index in self._skipped:
            return
        layers = range(self._shape.num_layers)
        order: Sequence[int] = layers if phase != "backward" else layers[::-1]
        for step, layer in enumerate(order, start=first_step):
            for use in self._layer_uses(chunk, phase, layer):
                yield Need(step, *use)

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

    def _by_count(self, layer: int, places: Places) -> Worths:
        """By how often records were selected, lately more than long ago; what will be used in any case comes first."""
        assert self._now is not None and self._selector is not None
        if layer not in self._counts:
            self._counts[layer] = np.full(self._num_records, -np.inf, np.float32)
        counts, chunk = self._counts[layer], self._now.chunk
        reach, touched = self._reach(layer, chunk), self._selector.touched(layer, chunk)
        if reach is not None and touched is not None and self._last_count.get(layer) != chunk.index:
            self._last_count[layer] = chunk.index
            named = self._named(reach, touched)
            counts[named] = np.logaddexp(counts[named], np.float32(chunk.index * _FADING))
        worth: Worths = counts[places]
        coming = self._chunks[chunk.index : chunk.index + 2]
        if self._last_count.get(layer) == chunk.index:  # behind its selection the layer has the chunk's use behind it
            coming = coming[1:]
        for pages in (pages for chunk in coming for pages in _always(self._reach(layer, chunk), chunk)):
            here = self._places(pages)
            first, end = np.searchsorted(places, (here.start, here.stop))
            worth[first:end] = _ALWAYS
        return worth

    def _by_next_use(self, kind: Kind, layer: int, places: Places) -> Worths:
        """By how soon records are used: the number of the next chunk, which falls in this sweep."""
        assert self._now is not None
        next_index = self._now.chunk.index - (self._now.phase == "backward")
        key, coming = (kind, layer), range(max(0, next_index - _HORIZON + 1), next_index + 1)
        if key not in self._uses:
            self._uses[key], self._marked[key] = np.zeros(self._num_records, np.uint8), range(0)
        uses, marked = self._uses[key], self._marked[key]
        if marked != coming:
            self._marked[key] = coming
            for index in marked:
                if index not in coming:
                    uses &= ~_bit(index)
            for index in coming:
                if index not in marked:
                    self._mark_uses(uses, kind, layer, self._chunks[index])
        if self._soonest is None or self._soonest[0] != next_index:
            self._soonest = next_index, _soonest(coming)
        worth: Worths = self._soonest[1][uses[places]]
        return worth

    def _mark_uses(self, uses: npt.NDArray[np.uint8], kind: Kind, layer: int, chunk: Chunk) -> None:
        assert self._selector is not None
        bit = _bit(chunk.index)
        reach, touched = self._reach(layer, chunk), self._selector.touched(layer, chunk)
        if reach is None or touched is not None:
            for pages in _always(reach, chunk):
                uses[self._places(pages)] |= bit
        if reach is not None and touched is not None:
            uses[self._named(reach, touched)] |= bit
        if kind == "gradients":
            uses[self._places(chunk.own_pages)] |= bit

    def _named(self, reach: Reach, touched: TouchedPages) -> Places:
        return touched() + reach.candidates.first * self._num_heads

    def _places(self, pages: PageRange) -> slice:
        return slice(pages.first * self._num_heads, pages.end * self._num_heads)


def _always(reach: Reach | None, chunk: Chunk) -> tuple[PageRange, ...]:
    """What a chunk uses whatever it selects. None is a past short enough to attend to everything."""
    return (chunk.past_pages,) if reach is None else (reach.sinks, reach.recents)


def _bit(index: int) -> np.uint8:
    """The bit of a chunk."""
    return np.uint8(1 << index % 8)


def _soonest(coming: range) -> Worths:
    """By bits, the highest number of a chunk among these, whose bit is set; -1 where none is."""
    bits, numbers = np.arange(256), np.full(256, -1, np.float32)
    for index in coming:
        numbers[bits & int(_bit(index)) != 0] = index
    return numbers
