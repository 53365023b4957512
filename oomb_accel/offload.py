"""Host memory for the pages of a model and for kept results: what stays over steps, and what one stream has there."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from oomb_accel.foresight import Foresight
from oomb_accel.host import (
    HostArena,
    HostLimits,
    HostMemoryError,
    HostStack,
    HostStore,
    cuda_pinner,
    host_budget,
    host_limits,
)
from oomb_accel.kept_on_host import KeptOnHost
from oomb_accel.pages import (
    CudaMover,
    HostMover,
    HostRoom,
    Kind,
    PageMover,
    PageRooms,
    PageShape,
    Records,
    StoredPages,
    TieredPages,
)
from oomb_accel.plan.limits import host_share
from oomb_accel.plan.places import ALIGNED_BYTES, host_bytes_for_results
from oomb_accel.plan.sizes import gib_above, gib_text, in_slabs, slab_bytes_for
from oomb_accel.schedule import ChunkSchedule

_SHORTER = "Train on shorter documents, or free host memory."


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
    _limits: HostLimits | None = None
    """Of the machine, before any rank has pinned memory; None where this process is alone and looks when it must."""
    _budget: int | None = None
    _keeps_results: bool = True
    """False once pinning was refused."""
    _streams: weakref.WeakSet[StreamRecords] = field(default_factory=weakref.WeakSet)
    """With pages here."""
    _kept: weakref.WeakSet[KeptOnHost] = field(default_factory=weakref.WeakSet)
    """Results of streams before their backward."""

    def __post_init__(self) -> None:
        if self.ranks_on_host > 1:
            self._limits = host_limits()

    def check_setting(self) -> None:
        """Refuse a `host_memory_gib` that the machine does not have, whether or not pages need so much.

        Raises:
            ValueError: it is more.
        """
        if self.host_memory_gib != "auto":
            self._known_budget()

    def check(self, num_bytes: int, record_bytes: int, remedy: Callable[[Sequence[str]], str] | None = None) -> int:
        """Refuse what is more host memory than there may be, beside what other streams hold. What is kept of them gives
        way, see `reserve`; nothing does so here.

        Args:
            record_bytes: of the largest record.
            remedy: makes the sentence that says what to do, of settings that are enough.

        Returns:
            Bytes that the arena must have room for.

        Raises:
            ValueError: naming a setting that would do.
        """
        budget, needed = self._known_budget(), self._needed(num_bytes, record_bytes)
        if needed > budget:
            enough = self._higher_limit(needed)
            raise ValueError(
                "The pages of this document need more host memory than they may have.\n"
                f"  Needed: {gib_above(needed)} GiB beside those on the device; the limit is "
                f"{gib_text(budget)} GiB (host_memory_gib={self.host_memory_gib}).\n"
                f"  {_SHORTER if remedy is None else remedy(enough)}"
            )
        return needed

    def has_room(self, num_bytes: int, record_bytes: int) -> bool:
        """Whether `check` accepts them."""
        return self._needed(num_bytes, record_bytes) <= self._known_budget()

    def _needed(self, num_bytes: int, record_bytes: int) -> int:
        """Of the budget; without what gives way, where it must."""
        needed = self._with_what_is_used(num_bytes, record_bytes)
        return needed if needed <= self._known_budget() else needed - self._kept_bytes()

    def _higher_limit(self, needed: int) -> list[str]:
        """The setting, where it is what forbids so much and the machine has it."""
        if self.host_memory_gib == "auto":
            return []
        limits = self._limits or host_limits()
        # What is here already is not available any more.
        here = 0 if self._limits is not None or self.arena is None else self.arena.num_bytes
        share = host_share(limits.available_bytes + here, limits.margin_bytes, self.ranks_on_host)
        return [f"host_memory_gib={gib_above(needed)} or 'auto'"] if needed <= share else []

    def made_for(self, num_bytes: int, record_bytes: int) -> int:
        """Host memory that is made for pages of so many bytes."""
        there = 0 if self.arena is None else self.arena.slab_bytes
        return in_slabs(num_bytes, max(there, slab_bytes_for(num_bytes, record_bytes)))

    def reserve(self, num_bytes: int, record_bytes: int, device: torch.device) -> None:
        """Have this much host memory made. Where it is not to be had, kept results of other streams give way.

        It is waited for: CUDA launches nothing while it pins memory, so a step beside it loses more time than the
        wait takes (on an H200 8 of 40 s for 26 GiB, which by themselves took 2).

        Args:
            record_bytes: of the largest record.

        Raises:
            ValueError: it is more than the setting or the machine allows, or the system has refused it.
        """
        needed, slab_bytes = self.check(num_bytes, record_bytes), slab_bytes_for(num_bytes, record_bytes)
        if needed < self._with_what_is_used(num_bytes, record_bytes):
            self._drop_results()
        try:
            self._make(needed, slab_bytes, device)
        except HostMemoryError as error:
            if not self._kept_bytes():
                raise ValueError(str(error)) from None
            self._drop_results()
            self.reserve(num_bytes, record_bytes, device)

    def _make(self, needed: int, slab_bytes: int, device: torch.device) -> None:
        """Have so much host memory made, in slabs of this size if there are none."""
        arena = self.arena
        # A stream that waits for its backward has its pages in the arena that is there, or will have gradients there.
        unused = arena is not None and arena.free_bytes == arena.num_bytes and not self._awaited_bytes()
        if arena is None or (arena.slab_bytes < slab_bytes and unused):
            if arena is not None:
                arena.close()
            pinner = None
            if device.type == "cuda":
                pinner = cuda_pinner(torch.cuda.current_device() if device.index is None else device.index)
            arena = self.arena = HostArena(
                self._known_budget(), slab_bytes=slab_bytes, pin=pinner is not None, pinner=pinner
            )
        if self.mover is None:  # it measures how copies are fastest: before threads fill the memory bus
            self.mover = CudaMover(device, pinned=self._is_pinned) if device.type == "cuda" else HostMover()
        arena.reserve(needed)
        arena.wait(needed)

    def spare_bytes(self) -> int:
        """Host memory that results may take beside what is in use, in whole slabs: of what the machine has left only a
        share, unless the setting says how much this process may have."""
        if not self._keeps_results:
            return 0
        now, arena = host_limits(), self.arena
        asked = self.host_memory_gib != "auto"
        left = host_share(now.available_bytes, now.margin_bytes, self.ranks_on_host)
        there = host_bytes_for_results(left, is_asked_for=asked) + (0 if arena is None else arena.free_bytes)
        most = host_bytes_for_results(self._known_budget(), is_asked_for=asked) - self.host_bytes()["page_memory_used"]
        spare = min(there, most) - self._awaited_bytes()
        slab_bytes = max(slab_bytes_for(spare, ALIGNED_BYTES), 0 if arena is None else arena.slab_bytes)
        return max(0, spare // slab_bytes * slab_bytes)

    def made_with(self, num_bytes: int) -> int:
        """Host memory that there will be with results of so many bytes."""
        return self.host_bytes()["page_memory_used"] + self._awaited_bytes() + num_bytes

    def kept_on_host(self, num_bytes: int, staging_bytes: int, device: torch.device) -> KeptOnHost | None:
        """Host memory for results of one stream, as much as comes; None where there is none, or it would be too slow.

        Args:
            num_bytes: of all results.
            staging_bytes: device memory for results on their way.
        """
        used, awaited = self.host_bytes()["page_memory_used"], self._awaited_bytes()
        try:
            self._make(self.made_with(num_bytes), slab_bytes_for(num_bytes, ALIGNED_BYTES), device)
        except HostMemoryError:
            num_bytes = min(num_bytes, (0 if self.arena is None else self.arena.free_bytes) - awaited)
            if num_bytes <= 0:
                return None
        assert self.arena is not None and self.mover is not None
        if device.type == "cuda" and not self.arena.pinned:  # the host would wait for each copy
            self._keeps_results = False
            if not used and not awaited:
                self.arena.close()
                self.arena = None
            return None
        stack = HostStack(self.arena)
        kept = KeptOnHost(stack, self.mover, device, staging_bytes, num_bytes)
        self._kept.add(kept)
        # What is on its way lives until the device has passed.
        weakref.finalize(kept, _give_back, stack, self.mover, kept.leaving, kept.coming).atexit = False
        return kept

    def add_stream(self, records: StreamRecords) -> None:
        """These pages have the host memory that was reserved last."""
        self._streams.add(records)

    def _awaited_bytes(self) -> int:
        """Of host memory that pages of streams before their backward have not taken yet: their gradients will."""
        if self.arena is None:
            return 0
        made = {records: in_slabs(records.rooms.host_bytes, self.arena.slab_bytes) for records in self._streams}
        return sum(max(0, num_bytes - records.host_bytes) for records, num_bytes in made.items())

    def _with_what_is_used(self, num_bytes: int, record_bytes: int) -> int:
        return self.made_for(num_bytes, record_bytes) + self.host_bytes()["page_memory_used"]

    def _kept_bytes(self) -> int:
        """Of slabs that kept results lie in."""
        return sum(kept.taken_bytes for kept in self._kept)

    def _drop_results(self) -> None:
        """Streams before their backward will make them again."""
        for kept in list(self._kept):
            kept.give_way()

    def _known_budget(self) -> int:
        if self._budget is None:
            limits = self._limits or host_limits()
            self._budget = host_budget(self.host_memory_gib, limits, ranks_on_host=self.ranks_on_host)
        return self._budget

    def _is_pinned(self) -> bool:
        return self.arena is not None and self.arena.pinned

    def host_bytes(self) -> dict[str, int]:
        """Host memory for pages and kept results: what there is, what of it is in use, and what is pinned."""
        arena = self.arena
        if arena is None:
            return {"page_memory_used": 0, "page_memory": 0, "pinned": 0}
        there = arena.num_bytes
        return {
            "page_memory_used": there - arena.free_bytes,
            "page_memory": there,
            "pinned": there if arena.pinned else 0,
        }

    def copied_bytes(self) -> dict[str, int]:
        """Of pages and kept results copied so far, ``"up"`` to the device and ``"down"`` to the host."""
        return {"up": 0, "down": 0} if self.mover is None else dict(self.mover.num_bytes)

    def waited_seconds(self) -> float:
        """How long computing stood still for copies so far."""
        return 0.0 if self.mover is None else self.mover.waited_seconds()

    def close(self) -> None:
        """Give all host memory back."""
        if self.arena is not None:
            self.arena.close()
        self.arena = self.mover = None


@dataclass(eq=False)
class StreamRecords:
    """Makes the records of one stream by how its pages are divided."""

    offload: Offload
    shape: PageShape
    schedule: ChunkSchedule
    rooms: PageRooms
    foresight: Foresight
    device: torch.device
    _room: HostRoom | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.offload.add_stream(self)

    @property
    def host_bytes(self) -> int:
        """Of slabs that they lie in."""
        return 0 if self._room is None else self._room.store.num_bytes

    def __call__(self, kind: Kind, num_slots: int, dtype: torch.dtype) -> Records:
        """Records of a kind, on the device or in two tiers."""
        room = self.rooms.values if kind == "values" else self.rooms.gradients
        if room is None:
            return StoredPages(self.shape, self.schedule.num_pages, num_slots, dtype, self.device)
        assert self.offload.mover is not None, "host memory was reserved"
        return TieredPages(
            self.shape,
            self.schedule.num_pages,
            room,
            dtype,
            self.device,
            self._host_room(dtype),
            self.offload.mover,
            lambda layer, places: self.foresight.worth(kind, layer, places),
        )

    def _host_room(self, dtype: torch.dtype) -> HostRoom:
        """The stream's, with slots for the smallest records. Values come first, of this dtype."""
        if self._room is None:
            assert self.offload.arena is not None and self.offload.mover is not None, "host memory was reserved"
            smallest = min(self.shape.slot_bytes(dtype), self.shape.slot_bytes(self.shape.grad_dtype))
            store = HostStore(self.offload.arena, smallest)
            self._room = HostRoom(store)
            weakref.finalize(self._room, _give_back, store, self.offload.mover).atexit = False
        return self._room


def _give_back(store: HostStore | HostStack, mover: PageMover, *_in_flight: object) -> None:
    """Slabs of records that nobody has any more. A step to its end has freed them; one that failed, or whose loss was
    dropped, may have copies in flight."""
    if store.num_bytes:
        with contextlib.suppress(RuntimeError):  # after a failure of the device itself there are no copies
            mover.synchronize()
        store.close()
