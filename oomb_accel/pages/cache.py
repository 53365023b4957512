"""The paged KV cache of one stream: K and V of earlier chunks, and the gradients that later chunks owe them.

Legend: G KV heads, T tokens, D head_dim, P page_tokens, n pages, N candidate pages, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oomb_accel.pages.ahead import Bringer, Itinerary, Need
from oomb_accel.pages.centroids import CentroidBank
from oomb_accel.pages.room import Kind
from oomb_accel.pages.scales import ScaleBank
from oomb_accel.pages.shape import PageShape
from oomb_accel.pages.stored import Records, StoredPages, Wanted, WantedLater
from oomb_accel.pages.tiered import TieredPages
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from oomb_kernels import accumulate_pages, add_pages_, load_pages, of_rows, store_pages

MakeRecords: TypeAlias = Callable[[Kind, int, torch.dtype], Records]
"""Makes the records of a kind, given for how many there must be room and their dtype."""


class PagedKVCache:
    """Pages of one stream, for one forward and one backward sweep.

    Pools are sized exactly by the schedule and come into being with the first page or gradient. A page takes
    a gradient slot at its first contribution, which is stored; later ones are added. Where a kernel adds to selected
    pages they take theirs before, filled with zeros. A page without a slot has a zero gradient, and no uninitialised
    slot is ever read.

    Sparse layers have two things more: the mean keys of each page, until the backward sweep begins, and, where page
    gradients are bf16, a pool in fp32 for those of sink pages, since every later chunk of the document adds to them.

    K and V stored in e4m3 have scales beside them. Every pass reads them as they were stored, in the model's dtype.

    Args:
        make_records: for values and gradients that are more than the device holds; None keeps everything there.
    """

    def __init__(
        self,
        shape: PageShape,
        schedule: ChunkSchedule,
        device: torch.device,
        make_records: MakeRecords | None = None,
    ) -> None:
        self._shape = shape
        self._device = device
        self._make_records = make_records  # no own method: a cycle would keep the pools alive
        self._num_pages = schedule.num_pages
        self._num_slots = shape.num_slots(schedule)
        self._sinks = [sinks for sinks in shape.sinks(schedule) if sinks] if shape.sinks_apart else []
        self._num_sink_slots = shape.num_sink_slots(schedule)
        self._values: Records | None = None
        self._centroids: CentroidBank | None = None
        self._scales: ScaleBank | None = None
        self._dtype: torch.dtype | None = None
        """That stored K and V are read in; None is their own."""
        self._gradients: Records | None = None
        self._sink_gradients: Records | None = None
        self._itinerary = Itinerary()
        self._tiered: dict[Kind, Bringer] = {}

    def begin(self, needs: Sequence[Need]) -> None:
        """A run of the model begins, which will use these pages in about this order."""
        for records in self._tiered.values():
            records.forget_expected()
        self._itinerary.begin(needs)

    @property
    def num_bytes(self) -> int:
        """Device bytes of all pools as they are now."""
        return sum(self.device_bytes().values())

    def device_bytes(self) -> dict[str, int]:
        """Device bytes by what they are for."""
        gradients = [records.pool.num_bytes for records in (self._gradients, self._sink_gradients) if records]
        scales = self._scales.num_bytes if self._scales else 0
        return {
            "mean_keys": self._centroids.num_bytes if self._centroids else 0,
            "pages": scales + (self._values.pool.num_bytes if self._values else 0),
            "page_gradients": sum(gradients),
        }

    def store(self, layer: int, chunk: Chunk, k_GTD: Tensor, v_GTD: Tensor) -> None:
        """Keep K and V (after RoPE) of the chunk's own pages, as far as later chunks attend to them.

        Args:
            k_GTD, v_GTD: the whole chunk's, ``[G, T, D]``.
        """
        pages = self._shape.kept_pages(layer, chunk.own_pages)
        if not pages:
            return
        if self._values is None:
            self._values = self._made("values", self._num_slots, self._shape.value_dtype(k_GTD.dtype))
            if self._shape.float8:
                self._scales = ScaleBank(self._shape, self._num_pages, self._device)
                self._dtype = k_GTD.dtype
        self._values.add(layer, pages)
        start = chunk.num_tokens - len(pages) * self._shape.page_tokens  # own pages end where the chunk ends
        slots = self._values.use(layer, pages, write=True)
        scales = self.value_scales(layer, pages)
        tokens = slice(start, chunk.num_tokens)
        k_GTD = of_rows(k_GTD, tokens)
        store_pages(self._values.pool.storage, slots, k_GTD, of_rows(v_GTD, tokens), scales)
        if layer in self._shape.sparse_layers:
            if self._centroids is None:
                self._centroids = CentroidBank(self._shape, self._num_pages, k_GTD.dtype, self._device)
            self._centroids.store(layer, pages, k_GTD)

    def load(self, layer: int, *ranges: PageRange) -> tuple[Tensor, Tensor]:
        """K and V of earlier pages, gathered one range after another: two contiguous ``[G, n * P, D]``."""
        values = self._stored_values()
        slots_GN = values.use(layer, *ranges)
        self._bring_next("values", layer, *ranges)
        loaded = load_pages(values.pool.storage, slots_GN, self.value_scales(layer, *ranges), self._dtype)
        self._settle_dense(layer, values)
        return loaded

    def centroids(self, layer: int, pages: PageRange) -> Tensor:
        """Mean keys of the parts of earlier pages of a sparse layer: ``[G, C, D]`` in K's dtype, a view. Each page has
        the same number of parts."""
        assert self._centroids is not None, "a past was stored before it is read"
        return self._centroids.of(layer, pages)

    def drop_centroids(self) -> None:
        """No page will be selected any more: what is selected was recorded."""
        self._centroids = None

    @property
    def value_pool(self) -> Tensor:
        """K and V of all stored pages by slot, ``[S, 2, P, D]``."""
        return self._stored_values().pool.storage

    def value_slots(self, layer: int, pages: PageRange, wanted: WantedLater | None) -> Tensor:
        """Where K and V of earlier pages lie in ``value_pool``: int32 ``[G, N]``. Valid until the layer settles.

        Args:
            wanted: others may lie nowhere; None is all.
        """
        slots_GN = self._stored_values().use(layer, pages, wanted=wanted)
        self._passed("values", layer, pages)  # others are brought when the kernels that wait for these are launched
        return slots_GN

    def value_scales(self, layer: int, *ranges: PageRange) -> Tensor | None:
        """Scales of K and V of these pages, fp32 ``[G, N, 2]``; None where pages have none."""
        return self._scales.of(layer, *ranges) if self._scales else None

    @property
    def gradient_pool(self) -> Tensor:
        """Gradients by slot, ``[S, 2, P, D]``; those of sinks may lie elsewhere."""
        return self._gradient_records().pool.storage

    def gradient_slots(self, layer: int, pages: PageRange, wanted: WantedLater | None) -> Tensor:
        """Where a kernel adds gradients of these pages in ``gradient_pool``: int32 ``[G, N]``, until the layer settles.

        Each that is wanted has a slot afterwards, and one that had none a gradient of zero.

        Args:
            pages: no sinks of a sparse layer.
            wanted: None is all.
        """
        gradients = self._gradient_records()
        assert self._sinks_among(layer, pages) is None, "gradients of sinks lie in their own pool"
        _add_zeros(gradients, layer, pages, gradients.lacking(layer, pages, wanted))
        slots_GN = gradients.use(layer, pages, wanted=wanted, write=True)
        self._passed("gradients", layer, pages)
        return slots_GN

    def add_gradients(self, layer: int, pages: PageRange, dk_GTD: Tensor, dv_GTD: Tensor, *, seed: int) -> None:
        """Add what a later chunk owes to these pages.

        Args:
            dk_GTD, dv_GTD: ``[G, n * P, D]``.
            seed: for stochastic rounding; the same step must use the same seeds.
        """
        for part, gradients in self._by_store(layer, pages):
            exists = gradients.exists(layer, part)
            all_exist = exists.all()
            for run, held in [(part, True)] if all_exist else _runs(part, exists):
                if not held:
                    gradients.add(layer, run)
                elif not all_exist:  # selected pages may have gradients of some heads only
                    _add_zeros(gradients, layer, run, gradients.lacking(layer, run, None))
                rows = self._token_rows(run, pages)
                slots = gradients.use(layer, run, write=True)
                accumulate_pages(
                    gradients.pool.storage,
                    slots,
                    of_rows(dk_GTD, rows),
                    of_rows(dv_GTD, rows),
                    first=not held,
                    seed=seed,
                )
                self._settle_dense(layer, gradients)
        self._bring_next("gradients", layer, pages)

    def collect_gradients(self, layer: int, chunk: Chunk, dk_GTD: Tensor, dv_GTD: Tensor) -> None:
        """Add the gradients that later chunks left in the chunk's own pages to dK, dV of the chunk, in place.

        Args:
            dk_GTD, dv_GTD: the whole chunk's, ``[G, T, D]``.
        """
        tokens = slice(chunk.num_tokens - len(chunk.own_pages) * self._shape.page_tokens, chunk.num_tokens)
        for gradients in (self._gradients, self._sink_gradients):
            if gradients is not None and gradients.exists(layer, chunk.own_pages).any():
                # Pages without gradients are zeros: in one piece, since few kernels cost less than few bytes.
                slots = gradients.use(layer, chunk.own_pages)
                add_pages_(gradients.pool.storage, slots, of_rows(dk_GTD, tokens), of_rows(dv_GTD, tokens))
        self._bring_next("gradients", layer, chunk.own_pages)

    def settle(self, layer: int) -> None:
        """All kernels of this layer that use pages have been launched: pages may move."""
        for records in (self._values, self._gradients):
            if records:
                records.settle(layer)
        if self._tiered:
            self._itinerary.bring(self._tiered)

    def release(self, chunk: Chunk) -> None:
        """Free the chunk's own pages and their gradients: nothing will ask for them again."""
        for records in (self._values, self._gradients, self._sink_gradients):
            if records:
                records.free(chunk.own_pages)

    def _passed(self, kind: Kind, layer: int, *ranges: PageRange) -> None:
        if self._tiered:
            self._itinerary.passed(kind, layer, *ranges)

    def _bring_next(self, kind: Kind, layer: int, *ranges: PageRange) -> None:
        self._passed(kind, layer, *ranges)
        if self._tiered:
            self._itinerary.bring(self._tiered)

    def _settle_dense(self, layer: int, records: Records) -> None:
        """Dense layers walk through more pages than the device may hold: each part leaves once it is used."""
        if layer not in self._shape.sparse_layers:
            records.settle(layer)

    def _stored_values(self) -> Records:
        assert self._values is not None, "a past was stored before it is read"
        return self._values

    def _gradient_records(self) -> Records:
        if self._gradients is None:
            num_slots = self._num_slots - self._num_sink_slots
            self._gradients = self._made("gradients", num_slots, self._shape.grad_dtype)
        return self._gradients

    def _sink_gradient_records(self) -> Records:
        if self._sink_gradients is None:
            self._sink_gradients = self._on_device("gradients", self._num_sink_slots, torch.float32)
        return self._sink_gradients

    def _made(self, kind: Kind, num_slots: int, dtype: torch.dtype) -> Records:
        if self._make_records is None:
            return self._on_device(kind, num_slots, dtype)
        records = self._make_records(kind, num_slots, dtype)
        if isinstance(records, TieredPages):
            self._tiered[kind] = records
        return records

    def _on_device(self, kind: Kind, num_slots: int, dtype: torch.dtype) -> Records:
        return StoredPages(self._shape, self._num_pages, num_slots, dtype, self._device)

    def _sinks_among(self, layer: int, pages: PageRange) -> PageRange | None:
        """Those of ``pages``, all of one document, whose gradients lie in the sinks' own pool."""
        if layer not in self._shape.sparse_layers:
            return None
        for sinks in self._sinks:
            if pages.first < sinks.end and sinks.first < pages.end:
                return PageRange(max(pages.first, sinks.first), min(pages.end, sinks.end))
        return None

    def _by_store(self, layer: int, pages: PageRange) -> Iterator[tuple[PageRange, Records]]:
        """``pages``, all of one document, cut by the pool in which their gradients lie."""
        sinks = self._sinks_among(layer, pages)
        if sinks is not None:
            assert sinks.first == pages.first, "a document starts with its sinks"
            yield sinks, self._sink_gradient_records()
            pages = PageRange(sinks.end, pages.end)
        if pages:
            yield pages, self._gradient_records()

    def _token_rows(self, run: PageRange, pages: PageRange) -> slice:
        tokens = self._shape.page_tokens
        return slice((run.first - pages.first) * tokens, (run.end - pages.first) * tokens)


def _add_zeros(gradients: Records, layer: int, pages: PageRange, new: Wanted) -> None:
    if len(new):
        gradients.add(layer, pages, new)
        gradients.clear(layer, pages, new)


def _runs(pages: PageRange, exists: npt.NDArray[np.bool_]) -> list[tuple[PageRange, bool]]:
    """These pages as maximal runs that all have a record of some head (True) or all have none (False)."""
    held = np.logical_or.reduce(exists, axis=1)
    cuts = [0, *(np.flatnonzero(held[1:] != held[:-1]) + 1).tolist(), len(pages)]
    return [(PageRange(pages.first + a, pages.first + b), bool(held[a])) for a, b in pairwise(cuts) if b > a]
