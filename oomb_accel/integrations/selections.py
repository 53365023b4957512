"""What sparse attention attended to, written down while a model runs: for checks and reports.

Legend: G KV heads, B query blocks, R query rows, T tokens of a document, N pages of a past.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oomb_accel.schedule import Chunk, Segment
from oomb_accel.selection import Reach
from oomb_kernels import PageLists


@dataclass(frozen=True, slots=True)
class Selection:
    """What one layer attended to in the past of one chunk."""

    layer: int
    chunk: Chunk
    reach: Reach
    lists: PageLists

    @property
    def segment(self) -> Segment:
        """Whose past it is."""
        return self.chunk.segments[0]

    def pages_GBN(self) -> Tensor:
        """bool: which pages of the past each query block attends to; sinks and recent pages are among them."""
        lists, reach, origin = self.lists, self.reach, self.reach.sinks.first
        num_entries = lists.pages_GBK.shape[-1]
        used_GBK = torch.arange(num_entries, device=lists.counts_GB.device) < lists.counts_GB[..., None]
        # An entry beyond its list's count goes to a page that does not exist.
        index_GBK = torch.where(used_GBK, lists.pages_GBK.long(), lists.num_pages)
        chosen = torch.zeros(*lists.counts_GB.shape, lists.num_pages + 1, dtype=torch.bool, device=index_GBK.device)
        chosen.scatter_(-1, index_GBK, True)
        pages = chosen.new_zeros(*lists.counts_GB.shape, len(self.chunk.past_pages))
        pages[..., reach.candidates.first - origin : reach.candidates.end - origin] = chosen[..., :-1]
        for always in (reach.sinks, reach.recents):
            pages[..., always.first - origin : always.end - origin] = True
        return pages


@dataclass(slots=True)
class SelectionRecord:
    """All selections of one step, by layer and chunk. Called with each of them."""

    found: dict[tuple[int, int], Selection] = field(default_factory=dict)

    def __call__(self, layer: int, chunk: Chunk, reach: Reach, lists: PageLists) -> None:
        self.found[layer, chunk.index] = Selection(layer, chunk, reach, lists)

    def of(self, layer: int, document: int | None = None) -> list[Selection]:
        """Those of a layer, and of one document of the stream."""
        return [
            selection
            for (at, _), selection in self.found.items()
            if at == layer and document in (None, selection.segment.document)
        ]


def causal_keys(rows: range, num_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """bool ``[R, T]``: the keys of a document that these queries see in a dense layer, or in one with a window."""
    distance_RT = _tensor(rows, device)[:, None] - torch.arange(num_tokens, device=device)
    return (distance_RT >= 0) & (distance_RT < (window or num_tokens))


def attended_keys(
    selections: Iterable[Selection],
    rows: range,
    num_tokens: int,
    *,
    num_groups: int,
    page_tokens: int,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """bool ``[G, R, T]``: the keys of a document that these queries attended to in one layer.

    Args:
        selections: of this layer and document; where a chunk has none, its queries attended to everything.
        rows: ascending positions of the queries in the document.
        window: of the layer.
    """
    seen_GRT = causal_keys(rows, num_tokens, window, device).repeat(num_groups, 1, 1)
    for selection in selections:
        past, end = selection.segment.past_tokens, selection.segment.past_tokens + selection.segment.num_tokens
        mine = slice(bisect_left(rows, past), bisect_left(rows, end))
        if not rows[mine]:
            continue
        block_R = (_tensor(rows[mine], device) - past) // selection.lists.block_tokens
        keys_GRT = selection.pages_GBN()[:, block_R].repeat_interleave(page_tokens, -1)
        seen_GRT[:, mine, :past] &= keys_GRT
    return seen_GRT


def _tensor(rows: range, device: torch.device) -> Tensor:
    return torch.arange(rows.start, rows.stop, rows.step, device=device)
