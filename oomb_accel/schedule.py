"""Cutting a stream of documents into chunks. Bookkeeping in whole numbers only: no tensors, no torch.

A stream is the documents of one micro-batch, one after another. Positions here are stream positions.
Pages are cut per document and numbered over the stream; only pages that a later chunk attends to are numbered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one document inside one chunk."""

    document: int
    """Index of the document in the stream."""
    start: int
    """Stream position of the segment's first token."""
    end: int
    """Stream position behind the segment's last token."""
    past_tokens: int
    """Tokens of the same document in earlier chunks; a whole number of pages."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PageRange:
    """Consecutive logical pages ``[first, end)``."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def newest(self, num_pages: int) -> PageRange:
        """The last ``num_pages`` of these pages, or all of them when there are fewer."""
        return PageRange(max(self.first, self.end - num_pages), self.end)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Up to ``chunk_tokens`` consecutive tokens of the stream."""

    index: int
    start: int
    end: int
    segments: tuple[Segment, ...]
    past_pages: PageRange
    """Pages of earlier chunks that the first segment attends to; empty when it starts its document."""
    own_pages: PageRange
    """Pages of the last segment, when its document goes on in the next chunk; empty otherwise."""
    first_target: int
    """Where this chunk's targets start in the stream's list of targets."""
    end_target: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_targets(self) -> int:
        return self.end_target - self.first_target


@dataclass(frozen=True, slots=True)
class ChunkSchedule:
    """All chunks of one stream, left to right."""

    chunks: tuple[Chunk, ...]
    num_tokens: int
    num_pages: int
    page_tokens: int

    @property
    def num_targets(self) -> int:
        return self.chunks[-1].end_target if self.chunks else 0

    @classmethod
    def build(
        cls,
        document_tokens: Sequence[int],
        target_positions: Sequence[int],
        *,
        chunk_tokens: int,
        page_tokens: int,
    ) -> ChunkSchedule:
        """Cut documents into chunks.

        A chunk ends at ``chunk_tokens``, rounded down to a page border of the document that it cuts, or at
        that document's end. So at most the first segment of a chunk has a past, and pasts are whole pages.

        Args:
            document_tokens: length of each document, in stream order; each at least 1.
            target_positions: ascending stream positions whose *next* token is a target.
            chunk_tokens: at least ``page_tokens``.
            page_tokens: tokens per page.

        Raises:
            ValueError: a chunk smaller than a page.
        """
        check_chunk(chunk_tokens, page_tokens)
        chunks: list[Chunk] = []
        num_pages = 0
        for segments in _cut(document_tokens, chunk_tokens, page_tokens):
            start, last = segments[0].start, segments[-1]
            goes_on = last.past_tokens + last.num_tokens < document_tokens[last.document]
            # Only documents that go on are numbered, so the past of a document is always the newest pages.
            past_pages = segments[0].past_tokens // page_tokens
            own_pages = last.num_tokens // page_tokens if goes_on else 0
            chunks.append(
                Chunk(
                    index=len(chunks),
                    start=start,
                    end=last.end,
                    segments=tuple(segments),
                    past_pages=PageRange(num_pages - past_pages, num_pages),
                    own_pages=PageRange(num_pages, num_pages + own_pages),
                    first_target=bisect_left(target_positions, start),
                    end_target=bisect_left(target_positions, last.end),
                )
            )
            num_pages += own_pages
        return cls(tuple(chunks), sum(document_tokens), num_pages, page_tokens)


def check_chunk(chunk_tokens: int, page_tokens: int) -> None:
    """Refuse chunks that cannot be cut.

    Raises:
        ValueError: a chunk smaller than a page.
    """
    if not 1 <= page_tokens <= chunk_tokens:
        raise ValueError(
            f"A chunk must hold at least one page.\n  Got chunk_tokens={chunk_tokens} with "
            f"page_tokens={page_tokens}.\n  Set chunk_tokens={max(page_tokens, 1)} or more."
        )


def _cut(document_tokens: Sequence[int], chunk_tokens: int, page_tokens: int) -> Iterator[list[Segment]]:
    """The segments of each chunk, greedily: as many tokens as fit, down to a page border inside a document."""
    segments: list[Segment] = []
    position = 0
    room = chunk_tokens
    for document, length in enumerate(document_tokens):
        past = 0
        while past < length:
            take = length - past
            if take > room:
                take = room // page_tokens * page_tokens
            if take:
                segments.append(Segment(document, position, position + take, past))
                position, past, room = position + take, past + take, room - take
            if past < length:
                yield segments
                segments, room = [], chunk_tokens
    if segments:
        yield segments
