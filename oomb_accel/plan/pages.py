"""What a document's pages take: those of K and V, their gradients, and the least that a device must hold of them.

A record is K and V (or their gradients) of one page of one KV head of one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from oomb_accel.plan.runs import ChunkRun
from oomb_accel.plan.sizes import DTYPE_BYTES, SCALE_BYTES, kept_pages, parts_of, record_bytes

LAYERS_AHEAD = 2
"""For how many layers pages are brought to the device ahead of their use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """How a model's pages look and who attends to them. Names as in `OombConfig`."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Sliding window in tokens of each layer; None where the layer attends to everything."""
    sparse_layers: frozenset[int]
    """Layers that select pages."""
    value_dtype: str
    """Storage of K and V: a key of `sizes.DTYPE_BYTES`."""
    grad_dtype: str
    compute_dtype: str
    """Of attention, and of mean keys."""
    page_tokens: int
    span_tokens: int
    top_k: int
    q_block: int
    sink_pages: int
    recent_pages: int
    page_budget: int | None
    distinct: float | None = None
    """Distinct pages that the lists of a chunk name, as a share of the most that they could. None is what lists at
    random come to, which is more than on real text."""

    @property
    def always_pages(self) -> int:
        """Pages of a long past that everybody attends to in a sparse layer."""
        return self.sink_pages + self.recent_pages

    @property
    def full_layers(self) -> int:
        """How many layers attend to everything."""
        return sum(window is None for window in self.windows) - len(self.sparse_layers)

    @property
    def value_record(self) -> int:
        """Bytes."""
        return record_bytes(self.page_tokens, self.head_dim, self.value_dtype)

    @property
    def gradient_record(self) -> int:
        """Bytes."""
        return record_bytes(self.page_tokens, self.head_dim, self.grad_dtype)

    def selects(self, past_pages: float) -> bool:
        """Whether a sparse layer selects from a past of this size, or attends to all of it."""
        return past_pages > self.always_pages + self.top_k

    def num_unselective(self, run: ChunkRun) -> int:
        """How many chunks of a run, the first ones, do not select."""
        return run.up_to(self.always_pages + self.top_k)

    def distinct_pages(self, past_pages: int, num_queries: int) -> float:
        """Distinct pages to which one KV head of a sparse layer attends in a chunk, of its past."""
        return self.distinct_pages_of(num_queries)(past_pages)

    def distinct_pages_of(self, num_queries: int) -> Callable[[int], float]:
        """The same as a function of the past, for many chunks."""
        always, top_k, share, budget = self.always_pages, self.top_k, self.distinct, self.page_budget
        lists = -(-num_queries // self.q_block)

        def distinct_pages(past_pages: int) -> float:
            candidates = past_pages - always
            if candidates <= top_k:  # it does not select
                return past_pages
            if share is None:
                pages = candidates * (1 - (1 - top_k / candidates) ** lists)
            else:
                pages = share * min(candidates, lists * top_k)
            if budget is not None:
                pages = min(pages, budget)
            return always + max(pages, top_k)

        return distinct_pages


def chunks_backwards(
    layout: PageLayout, runs: Sequence[ChunkRun]
) -> Iterator[tuple[ChunkRun, int, Callable[[int], float]]]:
    """Every chunk, the last one first: its run, its number there, and the distinct pages of a past. No object for each,
    since there may be a million of them."""
    for run in reversed(runs):
        distinct_pages = layout.distinct_pages_of(run.num_tokens)
        for number in reversed(range(run.count)):
            yield run, number, distinct_pages


@dataclass(frozen=True, kw_only=True, slots=True)
class PageDemand:
    """Bytes of one stream's pages."""

    value_dtype: str
    grad_dtype: str
    """Storage of both, by name."""
    value_bytes: int
    """K and V of all pages that a later chunk attends to."""
    gradient_bytes: int
    """Gradients of all of them, without those of sinks where they lie apart."""
    least_value_bytes: int
    """What layers need at once for one chunk: the one that computes and those whose pages are on their way."""
    least_gradient_bytes: int
    """The same, and no less than the mean keys, which lie there in the forward sweep."""
    sink_gradient_bytes: int = 0
    """In fp32, always on the device."""
    mean_key_bytes: int = 0
    """Gone when the backward sweep begins."""
    scale_bytes: int = 0
    """Of float8 pages."""
    list_bytes: int = 0
    """Recorded page lists of all chunks."""
    may_be_float8: bool = True
    """Whether the GPU can read K and V in float8, for advice."""
    most_bytes: int | None = None
    """Most bytes of values and gradients that exist at one moment, where that is less than all of them: gradients come
    into being at their first contribution, and both go chunk by chunk in the backward sweep."""
    most_gradient_bytes: int | None = None
    """Likewise of gradients by themselves, when some values may be gone."""
    most_dense_gradient_bytes: int = 0
    """Likewise of gradients in layers that do not select pages, where each chunk adds to all of its past; 0 where no
    layer selects."""
    most_dense_bytes: int = 0
    """Likewise of all values and these gradients."""
    dense_share: float = 1.0
    """Of all records, those of layers that do not select pages."""
    chunk_bytes: int = 0
    """Of the pages of one chunk and their gradients."""

    @property
    def resident_bytes(self) -> int:
        """What stays on the device in any case."""
        return self.sink_gradient_bytes + self.scale_bytes + self.list_bytes

    @property
    def living_bytes(self) -> int:
        """Most bytes of values and gradients that exist at one moment."""
        return self.value_bytes + self.gradient_bytes if self.most_bytes is None else self.most_bytes


def page_demand(layout: PageLayout, runs: Sequence[ChunkRun]) -> PageDemand:
    """What the pages of a stream take."""
    heads, num_layers = layout.num_kv_heads, len(layout.windows)
    num_records = heads * sum(
        kept_pages(run.own_pages, window, layout.page_tokens) * layers * run.count
        for window, layers in Counter(layout.windows).items()
        for run in runs
    )
    sparse_heads = len(layout.sparse_layers) * heads
    sinks_apart = layout.grad_dtype == "bfloat16"
    num_pages = sum(run.count * run.own_pages for run in runs)
    num_sinks = sparse_heads * _sinks(layout, runs, num_pages) if sinks_apart else 0
    mean_keys = sparse_heads * num_pages * parts_of(layout.page_tokens) * layout.head_dim
    mean_key_bytes = mean_keys * DTYPE_BYTES[layout.compute_dtype]
    lists = sum(-(-run.num_tokens // layout.q_block) * (run.count - layout.num_unselective(run)) for run in runs)
    at_once = min(num_records, min(1 + LAYERS_AHEAD, num_layers) * heads * _layer_pages(layout, runs))
    longest_chunk = max((run.own_pages for run in runs), default=0)
    dense_share = 1 - sparse_heads * num_pages / max(1, num_records)
    most = _most_bytes(layout, runs, num_pages, num_records, dense_share)
    return PageDemand(
        value_dtype=layout.value_dtype,
        grad_dtype=layout.grad_dtype,
        value_bytes=num_records * layout.value_record,
        gradient_bytes=(num_records - num_sinks) * layout.gradient_record,
        least_value_bytes=at_once * layout.value_record,
        least_gradient_bytes=max(at_once * layout.gradient_record, mean_key_bytes),
        sink_gradient_bytes=num_sinks * record_bytes(layout.page_tokens, layout.head_dim, "float32"),
        mean_key_bytes=mean_key_bytes,
        scale_bytes=num_layers * heads * num_pages * SCALE_BYTES if layout.value_dtype == "float8" else 0,
        list_bytes=4 * sparse_heads * lists * (layout.top_k + 1),
        **most,
        dense_share=dense_share,
        chunk_bytes=longest_chunk * heads * num_layers * (layout.value_record + layout.gradient_record),
    )


def _sinks(layout: PageLayout, runs: Sequence[ChunkRun], num_pages: int) -> int:
    """Sink pages of all documents of the stream."""
    borders, page = [], 0
    for run in runs:
        if run.starts:
            borders.append(page)
        page += run.count * run.own_pages
    return sum(min(layout.sink_pages, end - first) for first, end in pairwise([*borders, num_pages]))


def _layer_pages(layout: PageLayout, runs: Sequence[ChunkRun]) -> int:
    """Pages that one KV head of the hungriest layer needs at once: a chunk's own, and a span of its past or what it
    selects."""
    most, dense = 0, layout.full_layers > 0
    for run in runs:
        unselective = layout.num_unselective(run)
        # The more past the more is needed, among chunks that select and among those that do not.
        for number in {unselective - 1, run.count - 1} - {-1}:
            past = run.past_pages + number * run.own_pages
            span = min(past, max(1, layout.span_tokens // layout.page_tokens))
            need = span if dense or not layout.selects(past) else 0
            if layout.sparse_layers and layout.selects(past):
                need = max(need, int(layout.distinct_pages(past, run.num_tokens)) + 1)
            most = max(most, need + run.own_pages)
    return most


def _most_bytes(
    layout: PageLayout, runs: Sequence[ChunkRun], num_pages: int, num_records: int, dense: float
) -> dict[str, Any]:
    """See `PageDemand.most_bytes` and what follows it there, by these names. A chunk touches what it selects of its
    past, and everything in other layers. Pages of documents before that have values alone.

    Args:
        dense: share of the records of layers that select nothing.
    """
    if not layout.sparse_layers or not num_pages:
        return {}

    def in_all(num_bytes: float) -> int:
        """Of all layers and heads."""
        return int(num_bytes / num_pages * num_records)

    value_record, gradient_record = layout.value_record, layout.gradient_record
    most, most_gradients, most_dense, most_dense_gradients = 0.0, 0.0, 0.0, 0.0
    untouched, there = 1.0, num_pages
    for run, number, distinct_pages in chunks_backwards(layout, runs):
        # Chunks before this one find no more pages, and gradients of all of them.
        values, whole = there * value_record, there * gradient_record
        of_all = whole <= most_gradients and whole + values <= most
        if of_all and whole * dense <= most_dense_gradients and whole * dense + values <= most_dense:
            break
        past = run.past_pages + number * run.own_pages
        if not run.own_pages or (run.starts and number == 0):  # the past is another document's than what comes next
            untouched = 1.0
        if past:
            untouched *= 1 - distinct_pages(past) / past
        gradients = past * (1 - (1 - dense) * untouched) * gradient_record
        of_dense = past * dense * gradient_record
        most_gradients, most = max(most_gradients, gradients), max(most, values + gradients)
        most_dense_gradients, most_dense = max(most_dense_gradients, of_dense), max(most_dense, values + of_dense)
        there -= run.own_pages
    return {
        "most_bytes": in_all(most),
        "most_gradient_bytes": in_all(most_gradients),
        "most_dense_gradient_bytes": in_all(most_dense_gradients),
        "most_dense_bytes": in_all(most_dense),
    }
