"""The paged KV cache of one stream: K and V of earlier chunks, and the gradients that later chunks owe them.

Legend: G KV heads, T tokens, D head_dim, P page_tokens, n pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oomb_accel.pages.mover import NullMover, PageMover
from oomb_accel.pages.pool import PagePool
from oomb_accel.pages.table import PageTable
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from oomb_kernels import accumulate_pages, load_pages, store_pages


@dataclass(frozen=True, slots=True)
class PageShape:
    """What pages of a model look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    grad_dtype: torch.dtype
    windows: tuple[int | None, ...]
    """Sliding window in tokens of each layer; None where the layer attends to everything."""

    def kept_pages(self, layer: int, pages: PageRange) -> PageRange:
        """Those of ``pages`` that a token right behind them can still attend to in this layer."""
        window = self.windows[layer]
        return pages if window is None else pages.newest(-(-(window - 1) // self.page_tokens))

    def num_slots(self, schedule: ChunkSchedule) -> int:
        """Slots for every page of the stream that a later chunk attends to."""
        return self.num_kv_heads * sum(
            len(self.kept_pages(layer, chunk.own_pages))
            for chunk in schedule.chunks
            for layer in range(self.num_layers)
        )

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page of one KV head."""
        return 2 * self.page_tokens * self.head_dim * dtype.itemsize


class PagedKVCache:
    """Pages of one stream, for one forward and one backward sweep.

    Both pools are sized exactly by the schedule and come into being with the first page or gradient. A page takes
    a gradient slot at its first contribution, which is stored; later ones are added. A page without a slot has
    a zero gradient, and no uninitialised slot is ever read.
    """

    def __init__(
        self, shape: PageShape, schedule: ChunkSchedule, device: torch.device, mover: PageMover | None = None
    ) -> None:
        self._shape = shape
        self._device = device
        self._mover: PageMover = mover or NullMover()
        self._num_pages = schedule.num_pages
        self._num_slots = shape.num_slots(schedule)
        self._values: _Pages | None = None
        self._gradients: _Pages | None = None

    @property
    def num_bytes(self) -> int:
        """Device bytes of both pools as they are now."""
        return sum(pages.pool.num_bytes for pages in (self._values, self._gradients) if pages)

    def store(self, layer: int, chunk: Chunk, k_GTD: Tensor, v_GTD: Tensor) -> None:
        """Keep K and V (after RoPE) of the chunk's own pages, as far as later chunks attend to them.

        Args:
            k_GTD, v_GTD: the whole chunk's, ``[G, T, D]``.
        """
        pages = self._shape.kept_pages(layer, chunk.own_pages)
        if not pages:
            return
        if self._values is None:
            self._values = self._new_pages(k_GTD.dtype)
        self._values.allocate(layer, pages)
        start = chunk.num_tokens - len(pages) * self._shape.page_tokens  # own pages end where the chunk ends
        slots = self._values.device_slots(layer, pages)
        store_pages(self._values.pool.storage, slots, k_GTD[:, start:], v_GTD[:, start:])
        self._mover.written(layer, pages)

    def load(self, layer: int, pages: PageRange) -> tuple[Tensor, Tensor]:
        """K and V of earlier pages, gathered: two contiguous ``[G, n * P, D]``."""
        assert self._values is not None, "a past was stored before it is read"
        self._mover.fetch(layer, pages)
        return load_pages(self._values.pool.storage, self._values.device_slots(layer, pages))

    def add_gradients(self, layer: int, pages: PageRange, dk_GTD: Tensor, dv_GTD: Tensor, *, seed: int) -> None:
        """Add what a later chunk owes to these pages.

        Args:
            dk_GTD, dv_GTD: ``[G, n * P, D]``.
            seed: for stochastic rounding; the same step must use the same seeds.
        """
        if self._gradients is None:
            self._gradients = self._new_pages(self._shape.grad_dtype)
        for run, held in self._gradients.table.runs(layer, pages):
            if not held:
                self._gradients.allocate(layer, run)
            rows = self._token_rows(run, pages)
            slots = self._gradients.device_slots(layer, run)
            accumulate_pages(
                self._gradients.pool.storage,
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
        if self._gradients is None or not chunk.own_pages:
            return
        start = chunk.num_tokens - len(chunk.own_pages) * self._shape.page_tokens
        for run, held in self._gradients.table.runs(layer, chunk.own_pages):
            if not held:
                continue
            rows = self._token_rows(run, chunk.own_pages, start)
            slots = self._gradients.device_slots(layer, run)
            past_dk, past_dv = load_pages(self._gradients.pool.storage, slots)
            dk_GTD[:, rows] += past_dk
            dv_GTD[:, rows] += past_dv

    def release(self, chunk: Chunk) -> None:
        """Free the chunk's own pages and their gradients: nothing will ask for them again."""
        for pages in (self._values, self._gradients):
            if pages:
                for layer in range(self._shape.num_layers):
                    pages.table.free(layer, chunk.own_pages)

    def _token_rows(self, run: PageRange, pages: PageRange, start: int = 0) -> slice:
        tokens = self._shape.page_tokens
        return slice(start + (run.first - pages.first) * tokens, start + (run.end - pages.first) * tokens)

    def _new_pages(self, dtype: torch.dtype) -> _Pages:
        shape = self._shape
        return _Pages(
            PageTable(shape.num_layers, shape.num_kv_heads, self._num_pages, self._num_slots),
            PagePool(self._num_slots, shape.page_tokens, shape.head_dim, dtype, self._device),
            torch.empty(shape.num_layers, self._num_pages, shape.num_kv_heads, dtype=torch.int32, device=self._device),
        )


@dataclass(slots=True)
class _Pages:
    """A table, its pool, and the table's copy on the device."""

    table: PageTable
    pool: PagePool
    mirror: Tensor
    """int32 ``[num_layers, num_pages, G]``."""

    def allocate(self, layer: int, pages: PageRange) -> None:
        self.table.allocate(layer, pages)
        host = torch.from_numpy(self.table.slots(layer, pages).copy())
        if self.mirror.is_cuda:
            host = host.pin_memory()  # a pageable copy would wait for the stream
        self.mirror[layer, pages.first : pages.end].copy_(host, non_blocking=True)

    def device_slots(self, layer: int, pages: PageRange) -> Tensor:
        """int32 ``[G, n]``."""
        return self.mirror[layer, pages.first : pages.end].t().contiguous()
