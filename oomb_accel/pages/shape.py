"""What pages of a model look like, and how many a stream needs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from oomb_accel.plan.sizes import SCALE_BYTES, parts_of
from oomb_accel.schedule import ChunkSchedule, PageRange
from oomb_kernels import FLOAT8


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
    sparse_layers: frozenset[int] = frozenset()
    """Layers that select pages, by their mean keys. None of them has a window."""
    sink_pages: int = 0
    """Pages at the start of each document to which every later chunk attends in a sparse layer."""
    float8: bool = False
    """Whether K and V are stored in e4m3 with scales; otherwise they are as the model has them."""

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of stored K and V, for those of the model."""
        return FLOAT8 if self.float8 else dtype

    def kept_pages(self, layer: int, pages: PageRange) -> PageRange:
        """Those of ``pages`` that a token right behind them can still attend to in this layer."""
        window = self.windows[layer]
        return pages if window is None else pages.newest(-(-(window - 1) // self.page_tokens))

    def num_records(self, layer: int, schedule: ChunkSchedule) -> int:
        """Records of a layer, for every page of the stream that a later chunk attends to."""
        return self.num_kv_heads * sum(len(self.kept_pages(layer, chunk.own_pages)) for chunk in schedule.chunks)

    def num_slots(self, schedule: ChunkSchedule) -> int:
        """Records of all layers."""
        return sum(self.num_records(layer, schedule) for layer in range(self.num_layers))

    def sinks(self, schedule: ChunkSchedule) -> list[PageRange]:
        """The sink pages of each document that has pages."""
        starts = [c.own_pages.first for c in schedule.chunks if c.own_pages and not c.segments[-1].past_tokens]
        return [
            PageRange(first, min(first + self.sink_pages, end))
            for first, end in pairwise([*starts, schedule.num_pages])
        ]

    @property
    def parts(self) -> int:
        """Mean keys of a page by which it is selected."""
        return parts_of(self.page_tokens)

    def num_bytes(self, schedule: ChunkSchedule, dtype: torch.dtype) -> int:
        """Bytes of everything that a stream keeps in a cache in its backward sweep: pages and their gradients. Mean
        keys are gone by then, and are less than the gradients.

        Args:
            dtype: of the model's K and V.
        """
        num_slots = self.num_slots(schedule)
        gradients = (num_slots - self.num_sink_slots(schedule)) * self.slot_bytes(self.grad_dtype)
        return num_slots * self.slot_bytes(self.value_dtype(dtype)) + gradients + self.fixed_bytes(schedule)

    def fixed_bytes(self, schedule: ChunkSchedule) -> int:
        """Bytes of what always stays on the device: scales, and gradients of sinks that lie apart."""
        scales = self.num_layers * self.num_kv_heads * schedule.num_pages * SCALE_BYTES if self.float8 else 0
        return scales + self.num_sink_slots(schedule) * self.slot_bytes(torch.float32)

    def mean_key_bytes(self, schedule: ChunkSchedule, dtype: torch.dtype) -> int:
        """Bytes of the mean keys by which pages are selected, in the forward sweep.

        Args:
            dtype: of the model's K and V.
        """
        heads = len(self.sparse_layers) * self.num_kv_heads
        return heads * schedule.num_pages * self.parts * self.head_dim * dtype.itemsize

    def num_sink_slots(self, schedule: ChunkSchedule) -> int:
        """Gradients of sinks that lie apart."""
        heads = len(self.sparse_layers) * self.num_kv_heads
        return heads * sum(map(len, self.sinks(schedule))) if self.sinks_apart else 0

    @property
    def sinks_apart(self) -> bool:
        """Whether gradients of sinks have a pool of their own: in fp32, since every later chunk adds to them."""
        return bool(self.sparse_layers) and self.grad_dtype == torch.bfloat16

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page of one KV head."""
        return 2 * self.page_tokens * self.head_dim * dtype.itemsize
