"""Which earlier pages each block of queries attends to in a sparse layer. Policy only; `oomb_kernels` does the sums.

A document's past is cut into sinks (its first pages) and recents (its last), to which everybody attends, and the
candidates between them. Every block of queries has a list of candidates per KV head: those whose mean keys its pooled
queries would attend to most, if they were all the keys there are. Lists are chosen once, in the pass that first runs a
chunk, and are replayed whenever the chunk runs again. Selection has no gradient.

Legend: H query heads, G KV heads, T tokens, D head_dim, R pooled query rows, B query blocks, N candidate pages,
C their parts, M pages within the budget, K pages per list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from oomb_accel.pages import Wanted
from oomb_accel.schedule import Chunk, PageRange
from oomb_accel.selection_tally import HostCopy, SelectionTally
from oomb_kernels import PageLists, page_mass, pool_queries, top_pages

POOLED_TOKENS = 16
"""Queries whose mean is scored; a block has several such means, so that one topic in it cannot hide another."""
_WORD_BITS = 64
"""Words without a bit are passed over at once."""


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """How pages are selected, for the whole run."""

    top_k: int
    """Pages per list."""
    q_block: int
    """Queries that share a list."""
    sink_pages: int
    recent_pages: int
    page_budget: int | None
    """Most distinct pages that the lists of one chunk may name, per layer and KV head; at least ``top_k``. They are
    the heaviest of the whole chunk, or where selection is causal, of its first block."""
    select_per: Literal["kv_head", "layer"]
    """Whether each KV head has its own lists, or all heads of a layer the same."""
    causal_selection: bool
    """Whether a block is scored by the queries right before it instead of its own."""

    @property
    def pooled_tokens(self) -> int:
        """Queries per pooled row: a divisor of the block."""
        return math.gcd(POOLED_TOKENS, self.q_block)


@dataclass(frozen=True, slots=True)
class Reach:
    """The past of a chunk in a sparse layer, as three ranges one after another."""

    sinks: PageRange
    recents: PageRange
    candidates: PageRange


class TouchedPages:
    """Which candidates a chunk's lists name, on the host as soon as the device has found out.

    Args:
        lists: all of one length.
    """

    def __init__(self, lists: PageLists) -> None:
        pages_GX = lists.pages_GBK.flatten(1)
        device, self._num_heads = pages_GX.device, pages_GX.shape[0]
        num_words = -(-lists.num_pages * self._num_heads // _WORD_BITS)
        named = torch.zeros(num_words * _WORD_BITS // 8, 8, dtype=torch.uint8, device=device)
        places_GX = pages_GX.long() * self._num_heads + torch.arange(self._num_heads, device=device)[:, None]
        named.view(-1).index_fill_(0, places_GX.flatten(), 1)
        bits = (named << torch.arange(8, dtype=torch.uint8, device=device)).sum(1, dtype=torch.uint8)
        self._bits: HostCopy | None = HostCopy(bits)
        self._numbers: Wanted | None = None

    def __call__(self) -> Wanted:
        """Their places in ``[N, G]`` laid out in a row, ascending. Waits where the device is not there yet."""
        if self._numbers is None:
            assert self._bits is not None
            words = self._bits.wait().numpy().view(np.uint64)
            used = np.flatnonzero(words)
            places = np.flatnonzero(np.unpackbits(words[used].view(np.uint8), bitorder="little").view(bool))
            self._numbers = used[places // _WORD_BITS] * _WORD_BITS + places % _WORD_BITS
            self._bits = None  # pinned memory is for the next lists
        return self._numbers


OnSelection: TypeAlias = Callable[[int, Chunk, Reach, PageLists], None]
"""Told the layer, the chunk, how its past is cut, and the lists that were chosen."""


class PageSelector:
    """Chooses the lists of one stream and keeps them until their chunk is released.

    Args:
        sparse_layers: layers that select pages; all others attend to everything they can reach.
        on_selection: called with every choice.
        tally: counts what is selected.
        tell_pages: whether somebody asks which pages are touched.
    """

    def __init__(
        self,
        settings: SelectionSettings,
        sparse_layers: frozenset[int],
        on_selection: OnSelection | None = None,
        tally: SelectionTally | None = None,
        *,
        tell_pages: bool = True,
    ) -> None:
        assert settings.page_budget is None or settings.page_budget >= settings.top_k
        self._settings = settings
        self._sparse_layers = sparse_layers
        self._on_selection = on_selection
        self._tally = tally
        self._tell_pages = tell_pages
        self._sampled = sorted(sparse_layers)
        self._lists: dict[int, dict[int, PageLists]] = {}
        """By chunk, then layer."""
        self._touched: dict[int, dict[int, TouchedPages]] = {}
        self._reaches: dict[PageRange, Reach | None] = {}
        """Of the pasts of sparse layers so far."""
        self._last_queries: dict[int, tuple[int, Tensor]] = {}
        """By layer: a chunk, and the pooled queries ``[H, R, D]`` at its end."""

    def reach(self, layer: int, past: PageRange) -> Reach | None:
        """How the past is cut, or None where the layer attends to all of it.

        That is so in a layer that is not sparse, and while a list has room for every candidate: one dense call is
        faster then, and the same.

        Args:
            past: all earlier pages of the document.
        """
        if layer not in self._sparse_layers:
            return None
        if past not in self._reaches:
            self._reaches[past] = _divided(past, self._settings)
        return self._reaches[past]

    def note_queries(self, layer: int, chunk: Chunk, q_HTD: Tensor) -> None:
        """Tell the selector the queries of a chunk that runs for the first time, whether or not it selects pages.

        The causal variant scores the first block of the document's next chunk with the last of them. Comes after
        ``select`` of the same chunk and layer, which needs those of the chunk before.

        Args:
            q_HTD: the whole chunk's, ``[H, T, D]`` after RoPE.
        """
        settings = self._settings
        if settings.causal_selection and layer in self._sparse_layers and chunk.own_pages:
            newest = min(settings.q_block, chunk.segments[-1].num_tokens)
            with torch.no_grad():
                pooled_HRD = pool_queries(q_HTD[:, q_HTD.shape[1] - newest :], settings.pooled_tokens)
            self._last_queries[layer] = (chunk.index, pooled_HRD)

    def select(
        self,
        layer: int,
        chunk: Chunk,
        q_HTD: Tensor,
        centroids_GCD: Tensor,
        reach: Reach,
        scale: float,
        softcap: float | None = None,
    ) -> PageLists:
        """Choose the lists of a chunk's first segment, and record them.

        Args:
            q_HTD: that segment's queries, ``[H, T, D]`` after RoPE.
            centroids_GCD: mean keys of the candidates, the same number for each.
            scale, softcap: of the layer's attention scores.

        Returns:
            Lists that number pages from ``reach.candidates.first``.
        """
        settings = self._settings
        parts, odd = divmod(centroids_GCD.shape[1], len(reach.candidates))
        assert q_HTD.shape[1] == chunk.segments[0].num_tokens and parts and not odd
        recorded = self._lists.setdefault(chunk.index, {})
        assert layer not in recorded, "lists are chosen once and then replayed"
        mass_GBN = self._mass(layer, chunk, q_HTD, centroids_GCD, parts, scale, softcap)
        if settings.select_per == "layer":
            mass_GBN = mass_GBN.sum(0, keepdim=True)
        pages_GBK = self._heaviest(mass_GBN)
        if settings.select_per == "layer":
            pages_GBK = pages_GBK.expand(centroids_GCD.shape[0], -1, -1).contiguous()
        counts_GB = next(iter(recorded.values())).counts_GB if recorded else _full_counts(pages_GBK)
        recorded[layer] = PageLists(pages_GBK, counts_GB, settings.q_block, len(reach.candidates))
        if self._tell_pages:
            self._touched.setdefault(chunk.index, {})[layer] = TouchedPages(recorded[layer])
        if self._on_selection is not None:
            self._on_selection(layer, chunk, reach, recorded[layer])
        if self._tally is not None and layer == self._sampled[chunk.index % len(self._sampled)]:
            self._tally.sample(
                q_HTD,
                centroids_GCD,
                recorded[layer],
                pooled_tokens=settings.pooled_tokens,
                scale=scale,
                softcap=softcap,
            )
        return recorded[layer]

    def recorded(self, layer: int, chunk: Chunk) -> PageLists:
        """The lists that ``select`` chose."""
        return self._lists[chunk.index][layer]

    def touched(self, layer: int, chunk: Chunk) -> TouchedPages | None:
        """Which candidates they name; None where the layer did not select, or nobody asks."""
        return self._touched.get(chunk.index, {}).get(layer)

    def release(self, chunk: Chunk) -> None:
        """Forget the chunk's lists: it has run for the last time."""
        lists = self._lists.pop(chunk.index, {})
        self._touched.pop(chunk.index, None)
        if self._tally is not None and lists:
            self._tally.count(list(lists.values()))

    def _mass(
        self,
        layer: int,
        chunk: Chunk,
        q_HTD: Tensor,
        centroids_GCD: Tensor,
        parts: int,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """How much each block's scoring queries want each candidate, ``[G, B, N]``."""
        settings = self._settings
        block_rows = settings.q_block // settings.pooled_tokens

        def mass_of(pooled_HRD: Tensor) -> Tensor:
            return page_mass(
                pooled_HRD, centroids_GCD, parts=parts, scale=scale, block_rows=block_rows, softcap=softcap
            )

        if not settings.causal_selection:
            return mass_of(pool_queries(q_HTD, settings.pooled_tokens))
        index, before_HRD = self._last_queries[layer]
        assert index == chunk.index - 1, "the chunk before this one noted its queries"
        # A call of its own, since the document may have had less than a block of queries so far.
        first_GBN = mass_of(before_HRD)
        followed_tokens = (q_HTD.shape[1] - 1) // settings.q_block * settings.q_block
        if not followed_tokens:
            return first_GBN
        return torch.cat([first_GBN, mass_of(pool_queries(q_HTD[:, :followed_tokens], settings.pooled_tokens))], 1)

    def _heaviest(self, mass_GBN: Tensor) -> Tensor:
        """The lists, ``[G, B, K]``: the heaviest pages of each block among those that the chunk may touch."""
        settings = self._settings
        if settings.page_budget is None or settings.page_budget >= mass_GBN.shape[2]:
            return top_pages(mass_GBN, settings.top_k)
        deciding_G1N = mass_GBN[:, :1] if settings.causal_selection else mass_GBN.sum(1, keepdim=True)
        allowed_G1M = top_pages(deciding_G1N, settings.page_budget).long()
        allowed_GBM = allowed_G1M.expand(-1, mass_GBN.shape[1], -1)
        # Both lists ascend, so the pages do.
        chosen_GBK = top_pages(mass_GBN.gather(2, allowed_GBM), settings.top_k).long()
        return allowed_GBM.gather(2, chosen_GBK).to(torch.int32)


def _divided(past: PageRange, settings: SelectionSettings) -> Reach | None:
    if len(past) <= settings.sink_pages + settings.top_k + settings.recent_pages:
        return None
    first, end = past.first + settings.sink_pages, past.end - settings.recent_pages
    return Reach(PageRange(past.first, first), PageRange(end, past.end), PageRange(first, end))


def _full_counts(pages_GBK: Tensor) -> Tensor:
    """int32 ``[G, B]``: every list is full. The same for all layers of a chunk."""
    return torch.full(pages_GBK.shape[:2], pages_GBK.shape[2], dtype=torch.int32, device=pages_GBK.device)
