"""How a layer takes its past: which ranges of earlier pages it attends to as a whole, one kernel call each."""

from __future__ import annotations

from oomb_accel.schedule import PageRange
from oomb_accel.selection import Reach


def past_ranges(
    past: PageRange, window: int | None, reach: Reach | None, *, span_pages: int, page_tokens: int
) -> list[tuple[PageRange, ...]]:
    """The ranges of each call, in order. Selected pages are not among them.

    Args:
        past: all earlier pages of the document.
        window: sliding window of the layer in tokens.
        reach: how the past is divided where pages are selected.
        span_pages: most pages of a call.
    """
    if not past:
        return []
    if window is not None:
        return [(past.newest(-(-(window - 1) // page_tokens)),)]
    if reach is None:
        return [(span,) for span in _spans(past, span_pages)]
    ranges = tuple(filter(len, (reach.sinks, reach.recents)))
    return [ranges] if ranges else []


def _spans(pages: PageRange, span_pages: int) -> list[PageRange]:
    """The past in spans of a few fixed sizes: whole spans, then falling powers of two of pages.

    cuDNN plans once per shape, so an arbitrary remainder would cost a plan for each chunk.
    """
    spans = []
    first = pages.first
    while first < pages.end:
        left = pages.end - first
        size = span_pages if left >= span_pages else 1 << (left.bit_length() - 1)
        spans.append(PageRange(first, first + size))
        first += size
    return spans
