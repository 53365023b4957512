"""The paged KV cache of one stream: K and V of earlier chunks, and the gradients that later chunks owe them.

Legend: G KV heads, T tokens, D head_dim, P page_tokens, n pages, N candidate pages, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oomb_accel.pages.centroids import CentroidBank
from oomb_accel.pages.mover import NullMover, PageMover
from oomb_accel.pages.shape import PageShape
from oomb_accel.pages.stored import StoredPages
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from oomb_kernels import accumulate_pages, load_pages, store_pages


class PagedKVCache:
    """Pages of one stream, for one forward and one backward sweep.

    Pools are sized exactly by the schedule and come into being with the first page or gradient. A page takes
    a gradient slot at its first contribution, which is stored; later ones are added. A page without a slot has
    a zero gradient, and no uninitialised slot is ever read.

    Sparse layers have two things more: the mean keys of each page, and, where page gradients are bf16, a pool in
    fp32 for those of sink pages, since every later chunk of the document adds to them.
    """

    def __init__(
        self, shape: PageShape, schedule: ChunkSchedule, device: torch.device, mover: PageMover | None = None
    ) -> None:
        self._shape = shape
        self._device = device
        self._mover: PageMover = mover or NullMover()
        self._num_pages = schedule.num_pages
        self._num_slots = shape.num_slots(schedule)
        self._sinks = [sinks for sinks in shape.sinks(schedule) if sinks] if shape.sinks_apart else []
        self._num_sink_slots = shape.num_kv_heads * len(shape.sparse_layers) * sum(map(len, self._sinks))
        self._values: StoredPages | None = None
        self._centroids: CentroidBank | None = None
        self._gradients: StoredPages | None = None
        self._sink_gradients: StoredPages | None = None

    @property
    def num_bytes(self) -> int:
        """Device bytes of all pools as they are now."""
        stores = (self._values, self._gradients, self._sink_gradients)
        centroids = self._centroids.num_bytes if self._centroids else 0
        return centroids + sum(pages.pool.num_bytes for pages in stores if pages)

    def store(self, layer: int, chunk: Chunk, k_GTD: Tensor, v_GTD: Tensor) -> None:
        """Keep K and V (after RoPE) of the chunk's own pages, as far as later chunks attend to them.

        Args:
            k_GTD, v_GTD: the whole chunk's, ``[G, T, D]``.
        """
        pages = self._shape.kept_pages(layer, chunk.own_pages)
        if not pages:
            return
        if self._values is None:
            self._values = StoredPages(self._shape, self._num_pages, self._num_slots, k_GTD.dtype, self._device)
        self._values.allocate(layer, pages)
        start = chunk.num_tokens - len(pages) * self._shape.page_tokens  # own pages end where the chunk ends
        slots = self._values.device_slots(layer, pages)
        store_pages(self._values.pool.storage, slots, k_GTD[:, start:], v_GTD[:, start:])
        if layer in self._shape.sparse_layers:
            if self._centroids is None:
                self._centroids = CentroidBank(self._shape, self._num_pages, k_GTD.dtype, self._device)
            self._centroids.store(layer, pages, k_GTD[:, start:])
        self._mover.written(layer, pages)

    def load(self, layer: int, *ranges: PageRange) -> tuple[Tensor, Tensor]:
        """K and V of earlier pages, gathered one range after another: two contiguous ``[G, n * P, D]``."""
        values = self._stored_values()
        for pages in ranges:
            self._mover.fetch(layer, pages)
        return load_pages(values.pool.storage, values.device_slots(layer, *ranges))

    def centroids(self, layer: int, pages: PageRange) -> Tensor:
        """Mean keys of the parts of earlier pages of a sparse layer: ``[G, C, D]`` in K's dtype, a view. Each page has
        the same number of parts."""
        assert self._centroids is not None, "a past was stored before it is read"
        return self._centroids.of(layer, pages)

    @property
    def value_pool(self) -> Tensor:
        """K and V of all stored pages by slot, ``[S, 2, P, D]``."""
        return self._stored_values().pool.storage

    def value_slots(self, layer: int, pages: PageRange) -> Tensor:
        """Where K and V of earlier pages lie in ``value_pool``: int32 ``[G, N]``. Valid until pages move."""
        values = self._stored_values()
        self._mover.fetch(layer, pages)
        return values.device_slots(layer, pages)

    @property
    def gradient_pool(self) -> Tensor:
        """Gradients by slot, ``[S, 2, P, D]``; those of sinks may lie elsewhere."""
        return self._gradient_pages().pool.storage

    def gradient_slots(self, layer: int, pages: PageRange) -> Tensor:
        """Where a kernel adds gradients of these pages in ``gradient_pool``: int32 ``[G, N]``.

        Each of them has a slot afterwards, and a page that had none a gradient of zero.

        Args:
            pages: no sinks of a sparse layer.
        """
        gradients = self._gradient_pages()
        assert self._sinks_among(layer, pages) is None, "gradients of sinks lie in their own pool"
        for run, held in gradients.table.runs(layer, pages):
            if not held:
                gradients.allocate(layer, run)
                slots = gradients.device_slots(layer, run)
                nothing = gradients.pool.storage.new_zeros(1, 1, self._shape.head_dim)
                zeros_GTD = nothing.expand(self._shape.num_kv_heads, len(run) * self._shape.page_tokens, -1)
                accumulate_pages(gradients.pool.storage, slots, zeros_GTD, zeros_GTD, first=True, seed=0)
        return gradients.device_slots(layer, pages)

    def add_gradients(self, layer: int, pages: PageRange, dk_GTD: Tensor, dv_GTD: Tensor, *, seed: int) -> None:
        """Add what a later chunk owes to these pages.

        Args:
            dk_GTD, dv_GTD: ``[G, n * P, D]``.
            seed: for stochastic rounding; the same step must use the same seeds.
        """
        for part, gradients in self._by_store(layer, pages):
            for run, held in gradients.table.runs(layer, part):
                if not held:
                    gradients.allocate(layer, run)
                rows = self._token_rows(run, pages)
                slots = gradients.device_slots(layer, run)
                accumulate_pages(
                    gradients.pool.storage,
                    slots,
                    dk_GTD[:, rows],
                    dv_GTD[:, rows],
                    first=not held,
                    seed=seed,
                )

    def collect_gradients(self, layer: int, chunk: Chunk, dk_GTD: Tensor, dv_GTD: Tensor) -> None:
        """Add the gradients that later chunks left in the chunk's own pages to dK, dV of the chunk, in place.

        Args:
            dk_GTD, dv_GTD: the whole chunk's, ``[G, T, D]``.
        """
        start = chunk.num_tokens - len(chunk.own_pages) * self._shape.page_tokens
        for gradients in (self._gradients, self._sink_gradients):
            if gradients is None or not chunk.own_pages:
                continue
            for run, held in gradients.table.runs(layer, chunk.own_pages):
                if not held:
                    continue
                rows = self._token_rows(run, chunk.own_pages, start)
                past_dk, past_dv = load_pages(gradients.pool.storage, gradients.device_slots(layer, run))
                dk_GTD[:, rows] += past_dk
                dv_GTD[:, rows] += past_dv

    def release(self, chunk: Chunk) -> None:
        """Free the chunk's own pages and their gradients: nothing will ask for them again."""
        for pages in (self._values, self._gradients, self._sink_gradients):
            if pages:
                for layer in range(self._shape.num_layers):
                    pages.table.free(layer, chunk.own_pages)

    def _stored_values(self) -> StoredPages:
        assert self._values is not None, "a past was stored before it is read"
        return self._values

    def _gradient_pages(self) -> StoredPages:
        if self._gradients is None:
            num_slots = self._num_slots - self._num_sink_slots
            self._gradients = StoredPages(self._shape, self._num_pages, num_slots, self._shape.grad_dtype, self._device)
        return self._gradients

    def _sink_gradient_pages(self) -> StoredPages:
        if self._sink_gradients is None:
            self._sink_gradients = StoredPages(
                self._shape, self._num_pages, self._num_sink_slots, torch.float32, self._device
            )
        return self._sink_gradients

    def _sinks_among(self, layer: int, pages: PageRange) -> PageRange | None:
        """Those of ``pages``, all of one document, whose gradients lie in the sinks' own pool."""
        if layer not in self._shape.sparse_layers:
            return None
        for sinks in self._sinks:
            if pages.first < sinks.end and sinks.first < pages.end:
                return PageRange(max(pages.first, sinks.first), min(pages.end, sinks.end))
        return None

    def _by_store(self, layer: int, pages: PageRange) -> Iterator[tuple[PageRange, StoredPages]]:
        """``pages``, all of one document, cut by the pool in which their gradients lie."""
        sinks = self._sinks_among(layer, pages)
        if sinks is not None:
            assert sinks.first == pages.first, "a document starts with its sinks"
            yield sinks, self._sink_gradient_pages()
            pages = PageRange(sinks.end, pages.end)
        if pages:
            yield pages, self._gradient_pages()

    def _token_rows(self, run: PageRange, pages: PageRange, start: int = 0) -> slice:
        tokens = self._shape.page_tokens
        return slice(start + (run.first - pages.first) * tokens, start + (run.end - pages.first) * tokens)
