"""The chunks of a stream as runs of alike ones. A long document may have a million of them, and an estimate looks at
many lengths: what it reckons of a run should not take longer the longer it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomb_accel.schedule import ChunkSchedule, check_chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRun:
    """Consecutive chunks that differ in nothing but their past. Numbers are those of each."""

    index: int = 0
    """Of the first."""
    count: int = 1
    num_tokens: int
    num_targets: int
    past_pages: int
    """Of the first; each one has the pages of those before it."""
    own_pages: int
    """That later chunks attend to."""
    starts: bool
    """Whether the own pages of the first are the first ones of their document."""

    @property
    def last_past_pages(self) -> int:
        return self.past_pages + (self.count - 1) * self.own_pages

    def up_to(self, past_pages: int) -> int:
        """How many chunks have a past of at most so many pages."""
        if past_pages >= self.last_past_pages:
            return self.count
        return max(0, (past_pages - self.past_pages) // max(1, self.own_pages) + 1)

    @property
    def mean_past_pages(self) -> float:
        return (self.past_pages + self.last_past_pages) / 2

    def part(self, first: int, end: int) -> ChunkRun:
        """Its chunks from one on until before another, by their numbers in it."""
        past, starts = self.past_pages + first * self.own_pages, self.starts and first == 0
        return replace(self, index=self.index + first, count=end - first, past_pages=past, starts=starts)


def num_chunks(runs: Sequence[ChunkRun]) -> int:
    return sum(run.count for run in runs)


def runs_of_document(tokens: int, *, chunk_tokens: int, page_tokens: int) -> list[ChunkRun]:
    """Of one document in which every token but the first is a target, cut as `ChunkSchedule.build` does.

    Raises:
        ValueError: a chunk smaller than a page.
    """
    check_chunk(chunk_tokens, page_tokens)
    own = chunk_tokens // page_tokens
    size = own * page_tokens
    before = -(-max(0, tokens - chunk_tokens) // size)  # chunks before the last one, which may be longer than they are
    rest = tokens - before * size
    last = ChunkRun(
        index=before, num_tokens=rest, num_targets=rest - 1, past_pages=before * own, own_pages=0, starts=False
    )
    first = ChunkRun(count=before, num_tokens=size, num_targets=size, past_pages=0, own_pages=own, starts=True)
    return [first, last] if before else [last]


def runs_of(schedule: ChunkSchedule) -> list[ChunkRun]:
    """Of any stream: each chunk is one."""
    return [
        ChunkRun(
            index=chunk.index,
            num_tokens=chunk.num_tokens,
            num_targets=chunk.num_targets,
            past_pages=len(chunk.past_pages),
            own_pages=len(chunk.own_pages),
            starts=bool(chunk.own_pages) and not chunk.segments[-1].past_tokens,
        )
        for chunk in schedule.chunks
    ]
