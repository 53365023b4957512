"""The reference for sparse attention: plain transformers over each document alone, with a mask of the recorded pages.

What a layer selects is taken from our run; everything else (which keys a query sees beside them, the softmax, all
gradients) is computed without oomb_accel, on whole documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from oomb_accel import OombConfig
from oomb_accel.integrations.support import base_model_of
from oomb_accel.pages import PagedKVCache
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from oomb_accel.selection import PageSelector, Reach
from oomb_kernels import PageLists
from tests.harness.batches import Document, Layout
from tests.harness.float8 import as_stored, same_chunk
from tests.harness.models import twin
from tests.harness.parity import (
    Result,
    assert_same_result,
    assert_twice_plain_result,
    chunked,
    config,
    reference,
)

MASKED = "oomb_test_masked"


def sparse(chunk: int = 16, page: int = 4, **settings: Any) -> OombConfig:
    """Settings under which documents of the tests' lengths select pages."""
    defaults = {"top_k": 2, "sink_pages": 1, "recent_pages": 1, "q_block": 64}
    return config(chunk, page, attention="sparse", **{**defaults, **settings})


@dataclass(frozen=True)
class Selected:
    """One call of `PageSelector.select`."""

    layer: int
    chunk: Chunk
    reach: Reach
    lists: PageLists

    def pages(self, group: int, block: int) -> list[int]:
        """The list of a KV head and block, numbered from the document's first page."""
        first = self.reach.candidates.first - self.reach.sinks.first
        chosen = self.lists.pages_GBK[group, block, : int(self.lists.counts_GB[group, block])]
        return [first + page for page in chosen.tolist()]


@dataclass(frozen=True)
class Seen:
    """What attention was given in one layer for one whole document, without oomb_accel."""

    q_HTD: Tensor
    k_GTD: Tensor
    scale: float
    softcap: float | None


@contextmanager
def recorded_selections() -> Iterator[list[Selected]]:
    """Every selection made inside."""
    calls: list[Selected] = []
    original = PageSelector.select

    def select(
        self: PageSelector, layer: int, chunk: Chunk, q: Tensor, centroids: Tensor, reach: Reach, *rest: Any
    ) -> PageLists:
        lists = original(self, layer, chunk, q, centroids, reach, *rest)
        calls.append(Selected(layer, chunk, reach, lists))
        return lists

    with mock.patch.object(PageSelector, "select", select):
        yield calls


@contextmanager
def candidates_kept() -> Iterator[None]:
    """Inside, sparse layers go through selection and its kernels wherever there is a candidate, also where a list has
    room for all of them."""

    def reach(self: PageSelector, layer: int, past: PageRange) -> Reach | None:
        first, end = past.first + self._settings.sink_pages, past.end - self._settings.recent_pages
        if layer not in self._sparse_layers or first >= end:
            return None
        return Reach(PageRange(past.first, first), PageRange(end, past.end), PageRange(first, end))

    with mock.patch.object(PageSelector, "reach", reach):
        yield


@contextmanager
def collected_page_gradients() -> Iterator[dict[tuple[int, int], tuple[Tensor, Tensor]]]:
    """What later chunks left for each chunk, by (layer, index of the chunk): dK, dV ``[G, T, D]`` of its tokens."""
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    original = PagedKVCache.collect_gradients

    def collect(self: PagedKVCache, layer: int, chunk: Chunk, dk: Tensor, dv: Tensor) -> None:
        zero = torch.zeros_like(dk), torch.zeros_like(dv)
        original(self, layer, chunk, *zero)
        found[layer, chunk.index] = zero
        original(self, layer, chunk, dk, dv)

    with mock.patch.object(PagedKVCache, "collect_gradients", collect):
        yield found


def masked_reference(
    model: nn.Module,
    documents: tuple[Document, ...],
    calls: list[Selected],
    page: int,
    *,
    embeds: bool = False,
    num_targets: int | None = None,
    seen: dict[tuple[int, int], Seen] | None = None,
    float8: ChunkSchedule | None = None,
) -> Result:
    """`reference`, each (layer, query head, query) attending to the recorded pages of ``page`` tokens only.

    Args:
        float8: the chunks, where pages are stored in 8 bits.
        seen: is filled, by (index among the documents with targets, layer).
    """
    # In a stream there are only documents with targets.
    in_stream = [index for index, document in enumerate(documents) if len(document.target_columns)]
    numbers = iter(range(len(documents)))
    current: dict[str, Any] = {}

    def next_document() -> None:
        number = next(numbers)
        mine = [c for c in calls if in_stream[c.chunk.segments[0].document] == number]
        current.update(tokens=len(documents[number]), calls=mine, number=number)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        del attention_mask
        num_heads, num_groups, num_tokens = query.shape[1], key.shape[1], query.shape[2]
        assert num_tokens == current["tokens"]
        calls_here = [c for c in current["calls"] if c.layer == module.layer_idx]
        allowed = allowed_keys(calls_here, num_groups, num_tokens, page, kwargs.get("sliding_window"))
        bias_GTT = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
        bias_1HTT = bias_GTT.to(query).repeat_interleave(num_heads // num_groups, 0)[None]
        keys = key.repeat_interleave(num_heads // num_groups, 1)
        values = value.repeat_interleave(num_heads // num_groups, 1)
        scores = query @ keys.transpose(2, 3) * kwargs["scaling"]
        own_TT = None
        if float8 is not None and current["number"] in in_stream:
            own_TT = same_chunk(float8, in_stream.index(current["number"]), num_tokens).to(query.device)
            read_keys = as_stored(key[0], page)[None].repeat_interleave(num_heads // num_groups, 1)
            read_values = as_stored(value[0], page)[None].repeat_interleave(num_heads // num_groups, 1)
            scores = torch.where(own_TT, scores, query @ read_keys.transpose(2, 3) * kwargs["scaling"])
        softcap = kwargs.get("softcap")
        if seen is not None and current["number"] in in_stream:
            place = in_stream.index(current["number"]), module.layer_idx
            seen[place] = Seen(query[0].detach(), key[0].detach(), kwargs["scaling"], softcap)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.softmax(scores + bias_1HTT, -1)
        if own_TT is not None:
            out = weights * own_TT @ values + weights * ~own_TT @ read_values
            return out.transpose(1, 2), None
        return (weights @ values).transpose(1, 2), None

    AttentionInterface.register(MASKED, attend)
    base_model_of(model).set_attn_implementation(MASKED)
    return reference(model, documents, embeds=embeds, num_targets=num_targets, before_each=next_document)


def allowed_keys(calls: list[Selected], num_groups: int, num_tokens: int, page: int, window: int | None) -> Tensor:
    """Which keys each query of a document sees in one layer, ``[G, T, T]``; calls of this document and layer."""
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    allowed_GTT = ((distance >= 0) & (distance < (window or num_tokens))).repeat(num_groups, 1, 1)
    for call in calls:
        segment, origin = call.chunk.segments[0], call.reach.sinks.first
        past, block_tokens = segment.past_tokens, call.lists.block_tokens
        assert call.chunk.past_pages == PageRange(origin, origin + past // page)
        for group in range(num_groups):
            for block in range(-(-segment.num_tokens // block_tokens)):
                seen = torch.zeros(past, dtype=torch.bool)
                always = [*range(call.reach.sinks.first, call.reach.sinks.end)]
                always += range(call.reach.recents.first, call.reach.recents.end)
                for number in [*(p - origin for p in always), *call.pages(group, block)]:
                    seen[number * page : (number + 1) * page] = True
                first = past + block * block_tokens
                rows = slice(first, min(first + block_tokens, past + segment.num_tokens))
                allowed_GTT[group, rows, :past] &= seen
    return allowed_GTT


def schedule_of(layout: Layout, settings: OombConfig) -> ChunkSchedule:
    """The chunks of a batch whose documents are labelled throughout."""
    page = settings.page_tokens
    lengths = [min(len(d), -(-(len(d) - 1) // page) * page) for d in layout.documents]
    return ChunkSchedule.build(lengths, [], chunk_tokens=settings.known_chunk_tokens, page_tokens=page)


def check_selection(call: Selected, seen: Seen, schedule: ChunkSchedule, settings: OombConfig) -> None:
    """A selection against its definition, on whole documents: the pages whose mean keys the block's pooled queries want
    most, by the squares of their softmax weight. Ties within rounding may go either way."""
    assert schedule.chunks[call.chunk.index].segments == call.chunk.segments
    newest = schedule.chunks[call.chunk.index - 1].segments[-1].num_tokens
    segment, first = call.chunk.segments[0], call.reach.candidates.first - call.reach.sinks.first
    past, q_block, page = segment.past_tokens, settings.q_block, settings.page_tokens
    tokens = slice(first * page, (first + len(call.reach.candidates)) * page)
    part = 16 if page % 16 == 0 and (page // 16).bit_count() == 1 else page
    centroids_GCD = torch.stack(seen.k_GTD[:, :past][:, tokens].split(part, 1), 1).mean(2)
    group = len(seen.q_HTD) // len(centroids_GCD)
    for block in range(call.lists.pages_GBK.shape[1]):
        start = past + block * q_block
        end = min(start + q_block, past + segment.num_tokens)
        if settings.causal_selection:
            before = q_block if block else min(q_block, newest)  # the chunk before may have had less than a block
            start, end = start - before, start
        pooled_HRD = torch.stack([rows.mean(1) for rows in seen.q_HTD[:, start:end].split(16, 1)], 1)
        scores = pooled_HRD @ centroids_GCD.repeat_interleave(group, 0).transpose(1, 2) * seen.scale
        if seen.softcap is not None:
            scores = seen.softcap * torch.tanh(scores / seen.softcap)
        weights_HRN = torch.softmax(scores, -1).unflatten(-1, (-1, page // part)).sum(-1)
        mass_GN = (weights_HRN * (weights_HRN + 1e-6)).sum(1).unflatten(0, (-1, group)).sum(1)
        if settings.select_per == "layer":
            mass_GN = mass_GN.sum(0, keepdim=True).expand_as(mass_GN)
        for number, mass_N in enumerate(mass_GN):
            chosen = torch.tensor(call.pages(number, block)) - first
            assert len(chosen) == min(settings.top_k, len(mass_N)) and chosen.unique().numel() == len(chosen)
            others = torch.ones(len(mass_N), dtype=torch.bool).index_fill(0, chosen, False)
            assert mass_N[chosen].min() >= mass_N[others].max() - 1e-4 * mass_N.sum()


def check_sparse_twice_plain(
    model: nn.Module, layout: Layout, settings: OombConfig, *, dtype: torch.dtype = torch.bfloat16
) -> list[Selected]:
    """Rule 2 for a model whose weights are rounded to ``dtype``, both references with the lists of our run."""
    low = twin(model).to(dtype)
    with recorded_selections() as calls:
        ours = chunked(twin(low), layout, settings)
    float8 = schedule_of(layout, settings) if settings.page_dtype == "float8" else None
    exact = masked_reference(twin(low).float(), layout.documents, calls, settings.page_tokens, float8=float8)
    plain = masked_reference(twin(low), layout.documents, calls, settings.page_tokens, float8=float8)
    assert_twice_plain_result(ours, plain, exact, dtype)
    return calls


def check_sparse(
    model: nn.Module, layout: Layout, settings: OombConfig, *, embeds: bool = False
) -> tuple[Result, list[Selected]]:
    """Run both on copies of the model and compare everything; returns our result and what was selected. Pages in 8 bits
    need fp64: a rounding error of fp32 takes a number to the other side of a border now and then."""
    with recorded_selections() as calls:
        ours = chunked(twin(model), layout, settings, embeds=embeds)
    made = [(call.layer, call.chunk.index) for call in calls]
    assert len(made) == len(set(made)), "a layer of a chunk selects once"
    float8 = schedule_of(layout, settings) if settings.page_dtype == "float8" else None
    wanted = masked_reference(twin(model), layout.documents, calls, settings.page_tokens, embeds=embeds, float8=float8)
    assert_same_result(ours, wanted)
    return ours, calls
