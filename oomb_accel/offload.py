"""Host memory for the pages of a model: what is kept over steps, and the records of one stream."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Literal

import torch

from oomb_accel.foresight import Foresight
from oomb_accel.host import HostArena, HostMemoryError, HostStore, host_budget, host_limits, slab_bytes_for
from oomb_accel.pages import (
    CudaMover,
    HostMover,
    Kind,
    PageMover,
    PageRooms,
    PageShape,
    Records,
    StoredPages,
    TieredPages,
)
from oomb_accel.schedule import ChunkSchedule

GIB = 2**30


@dataclass(slots=True)
class Offload:
    """What one process keeps between steps: its host memory, and what copies to and from it.

    Attributes:
        host_memory_gib: the setting.
        ranks_on_host: processes that share the machine's memory.
    """

    host_memory_gib: float | Literal["auto"] = "auto"
    ranks_on_host: int = 1
    arena: HostArena | None = None
    mover: PageMover | None = None
    budget: int | None = None
    """Most bytes of host memory, once it was looked up."""

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """Have this much host memory made, in the background.

        Raises:
            ValueError: it is more than the setting or the machine allows.
        """
        if self.budget is None:
            self.budget = host_budget(self.host_memory_gib, host_limits(), ranks_on_host=self.ranks_on_host)
        slab_bytes = slab_bytes_for(num_bytes)
        if self.arena is None or self.arena.slab_bytes < slab_bytes:
            if self.arena is not None:
                self.arena.close()
            self.arena = HostArena(self.budget, slab_bytes=slab_bytes, pin=device.type == "cuda")
        try:
            self.arena.reserve(num_bytes)
        except HostMemoryError as error:
            raise ValueError(str(error)) from None
        if self.mover is None:
            self.arena.give(self.arena.take())  # whether pinning is refused shows with the first slab
            self.mover = CudaMover(device, pinned=self.arena.pinned) if device.type == "cuda" else HostMover()

    def host_bytes(self) -> dict[str, int]:
        """Host memory for pages: what there is, and what of it is in use."""
        arena = self.arena
        if arena is None:
            return {"page_memory_used": 0, "page_memory": 0}
        return {"page_memory_used": arena.num_bytes - arena.free_bytes, "page_memory": arena.num_bytes}

    def copied_bytes(self) -> dict[str, int]:
        """Of pages copied so far, ``"up"`` to the device and ``"down"`` to the host."""
        return {"up": 0, "down": 0} if self.mover is None else dict(self.mover.num_bytes)

    def close(self) -> None:
        """Give all host memory back."""
        if self.arena is not None:
            self.arena.close()
        self.arena = self.mover = None


@dataclass(slots=True)
class StreamRecords:
    """Makes the records of one stream by how its pages are divided."""

    offload: Offload
    shape: PageShape
    schedule: ChunkSchedule
    rooms: PageRooms
    foresight: Foresight
    device: torch.device

    def __call__(self, kind: Kind, num_slots: int, dtype: torch.dtype) -> Records:
        """Records of a kind, on the device or in two tiers."""
        room = self.rooms.values if kind == "values" else self.rooms.gradients
        if room is None:
            return StoredPages(self.shape, self.schedule.num_pages, num_slots, dtype, self.device)
        assert self.offload.arena is not None and self.offload.mover is not None, "host memory was reserved"
        store = HostStore(self.offload.arena, self.shape.slot_bytes(dtype))
        records = TieredPages(
            self.shape,
            self.schedule.num_pages,
            room,
            dtype,
            self.device,
            store,
            self.offload.mover,
            lambda layer: self.foresight.worth(kind, layer),
        )
        weakref.finalize(records, _give_back, store, self.device).atexit = False
        return records


def _give_back(store: HostStore, device: torch.device) -> None:
    """Slabs of records that nobody has any more. A step to its end has freed them; one that failed, or whose loss was
    dropped, may have copies in flight."""
    if store.num_bytes:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # after a failure of the device itself there are no copies either
                torch.cuda.synchronize(device)
        store.close()
