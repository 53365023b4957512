"""What a stream remembers between passes over its chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from oomb_accel.foresight import Foresight, Phase
from oomb_accel.kept_on_host import KeptOnHost
from oomb_accel.kept_results import ChunkResults
from oomb_accel.pages import PagedKVCache, PageRooms
from oomb_accel.schedule import Chunk
from oomb_accel.selection import PageSelector


@dataclass(slots=True)
class StreamMemory:
    """Pages, selections and kept outputs of one stream. Each chunk is released as soon as its backward has run."""

    cache: PagedKVCache
    selector: PageSelector | None = None
    """None where every layer attends to everything, or to its window."""
    results: dict[int, ChunkResults] = field(default_factory=dict)
    """By index of the chunk, for those of which anything is kept for the recompute."""
    on_host: KeptOnHost | None = None
    """Moves what is kept on the host; None where nothing is."""
    foresight: Foresight | None = None
    """None where all pages stay on the device."""
    rooms: PageRooms | None = None
    """How pages are divided between device and host, where not all stay on the device."""

    def device_bytes(self) -> dict[str, int]:
        """Device bytes of what is kept from chunk to chunk, by tier."""
        kept = sum(results.device_bytes for results in self.results.values())
        if self.on_host is not None:
            kept += self.on_host.device_bytes
        return {**self.cache.device_bytes(), "kept_outputs": kept}

    def begin(self, chunk: Chunk, phase: Phase) -> None:
        """A run of the model over a chunk begins, or its backward. After the forward sweep nothing is selected."""
        if phase != "forward":
            self.cache.drop_centroids()
            self._bring_results(chunk, phase)
        if self.foresight is not None:
            self.cache.begin(self.foresight.begin(chunk, phase))

    def release(self, chunk: Chunk) -> None:
        """Forget a chunk: nothing will ask for it again."""
        if chunk.index in self.results:
            self.results.pop(chunk.index).release()
        self.cache.release(chunk)
        if self.selector is not None:
            self.selector.release(chunk)

    def _bring_results(self, chunk: Chunk, phase: Phase) -> None:
        """Those of the host, ahead of the recompute; beside a backward, the first of the chunk that comes next."""
        if self.on_host is not None:
            self.on_host.settle()
        index = chunk.index if phase == "recompute" else chunk.index - 1
        if index in self.results:
            self.results[index].bring(recomputes=phase == "recompute")
