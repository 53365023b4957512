"""What one run of the model over one chunk tells its attention layers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from oomb_accel.kept_results import NOTHING_KEPT, ChunkResults
from oomb_accel.memory import StreamMemory
from oomb_accel.schedule import Chunk

Sweep = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """How attention is computed, for the whole run."""

    backend: str
    span_pages: int
    page_tokens: int
    deterministic: bool


@dataclass(slots=True)
class ChunkPass:
    """Travels to the attention layers as a keyword. In the forward sweep a layer stores its K and V and selects pages;
    in the backward sweep it only reads."""

    chunk: Chunk
    sweep: Sweep
    memory: StreamMemory
    settings: AttentionSettings
    windows: tuple[int | None, ...]
    layers_seen: set[int] = field(default_factory=set)
    in_common: dict[Hashable, Any] = field(default_factory=dict)
    """What was worked out for one layer and is the same for others."""

    @property
    def results(self) -> ChunkResults:
        """What is kept of this chunk between the sweeps."""
        return self.memory.results.get(self.chunk.index, NOTHING_KEPT)

    @property
    def first_rows(self) -> slice:
        """Rows of the chunk's first segment, the only one that may have a past."""
        return slice(0, self.chunk.segments[0].num_tokens)

    def rounding_seed(self, layer: int) -> int:
        """For stochastic rounding of page gradients: its own for every chunk and layer, the same in every run."""
        return self.chunk.index * len(self.windows) + layer


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asks of attention, apart from the tensors."""

    layer: int
    scale: float
    softcap: float | None
