"""Records of one kind of which the device holds a part: the others lie in host memory.

Between its uses a layer keeps at most its quota of records on the device, those that are worth most; the slots beyond
all quotas are a reserve. A use brings what is missing into the reserve, and whatever then exceeds the quota leaves when
the layer settles. A record that the host has unchanged leaves for free.

Legend: L layers, G KV heads, N pages of the stream, n pages of a range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oomb_accel.host import HostMemoryError, HostStore
from oomb_accel.pages.mover import Mark, PageMover
from oomb_accel.pages.pool import PagePool
from oomb_accel.pages.room import DeviceRoom
from oomb_accel.pages.shape import PageShape
from oomb_accel.pages.slots import SlotQueue
from oomb_accel.pages.stored import Wanted, WantedLater
from oomb_accel.pages.table import NO_SLOT
from oomb_accel.schedule import PageRange

Worth: TypeAlias = Callable[[int], npt.NDArray[np.float32]]
"""How much each record of a layer is worth keeping on the device, ``[N, G]``: the least worth leave first."""


class TieredPages:
    """Records of one kind on device and host; what `Records` asks for, and `expect`.

    Args:
        num_pages: logical pages of the stream.
        dtype: of the pool.
        host: for records of this size.
    """

    def __init__(
        self,
        shape: PageShape,
        num_pages: int,
        room: DeviceRoom,
        dtype: torch.dtype,
        device: torch.device,
        host: HostStore,
        mover: PageMover,
        worth: Worth,
    ) -> None:
        self.pool = PagePool(room.num_slots, shape.page_tokens, shape.head_dim, dtype, device)
        mover.guard(self.pool.storage)
        self._record_bytes = shape.slot_bytes(dtype)
        self._quotas, self._host, self._mover, self._worth = room.quotas, host, mover, worth
        self._free = SlotQueue(room.num_slots)
        size = (shape.num_layers, num_pages, shape.num_kv_heads)
        self._slots = np.full(size, NO_SLOT, np.int32)
        self._host_slots = np.full(size, NO_SLOT, np.int64)
        self._changed = np.zeros(size, bool)
        """Whether the device has something that the host has not."""
        self._expected = np.zeros(size, np.int8)
        """Uses ahead of which the record was brought, and which have not come yet."""
        self._arrivals = np.zeros(size, np.int32)
        """Number of the upload that brought the record. Uploads pass in order."""
        self._uploads: dict[int, Mark] = {}
        """By number, those that the computing stream does not wait for yet."""
        self._num_uploads = self._uploads_seen = 0
        self._resident = [0] * shape.num_layers
        self._away = [0] * shape.num_layers
        """Records that only the host has."""
        self._in_use: list[list[tuple[slice, Wanted | None]]] = [[] for _ in range(shape.num_layers)]
        """By layer, what was used or added since it settled; None is every record."""
        self._downloads: list[Mark] = [None] * shape.num_layers
        """The last download of each layer."""
        self._largest_use = 0

    def exists(self, layer: int, pages: PageRange) -> Wanted:
        here = slice(pages.first, pages.end)
        return (self._slots[layer, here] != NO_SLOT) | (self._host_slots[layer, here] != NO_SLOT)

    def add(self, layer: int, pages: PageRange, wanted: Wanted | None = None) -> None:
        here = slice(pages.first, pages.end)
        new = np.ones_like(self._changed[layer, here]) if wanted is None else wanted
        assert not (self.exists(layer, pages) & new).any(), "a record is made once"
        slots, marks = self._take(layer, int(new.sum()))
        self._mover.wait(marks)
        self._in_use[layer].append((here, new))
        self._slots[layer, here][new] = slots
        self._changed[layer, here][new] = True

    def clear(self, layer: int, pages: PageRange, wanted: Wanted) -> None:
        slots = self._slots[layer, pages.first : pages.end][wanted]
        self.pool.storage.index_fill_(0, self._mover.to_device(slots).long(), 0)

    def use(self, layer: int, *ranges: PageRange, wanted: WantedLater | None = None, write: bool = False) -> Tensor:
        assert wanted is None or len(ranges) == 1
        # Where nothing is away, nobody has to wait to know what is wanted.
        chosen = wanted() if wanted and (write or self._away[layer]) else None
        # Before anything is brought: what is used must not give way to it.
        self._in_use[layer] += [(slice(pages.first, pages.end), chosen) for pages in ranges]
        arrival, slots_nG = self._uploads_seen, []
        for pages in ranges:
            here = slice(pages.first, pages.end)
            missing = self._missing(layer, pages, chosen)
            if missing.any():
                self._bring(layer, pages, missing)
            slots = self._slots[layer, here]
            used = slots != NO_SLOT if chosen is None else chosen & (slots != NO_SLOT)
            expected = self._expected[layer, here]
            expected -= used & (expected > 0)
            self._changed[layer, here] |= used & write
            arrival = max(arrival, self._latest(layer, here, used))
            slots_nG.append(np.where(used, slots, NO_SLOT))
        self._wait_for(arrival)
        return self._mover.to_device(np.ascontiguousarray(np.concatenate(slots_nG).T))

    def expect(self, layer: int, pages: PageRange, wanted: Wanted | None = None) -> bool:
        """Start to bring what a later use will miss.

        Returns:
            False where free slots are too few for now.
        """
        missing = self._missing(layer, pages, wanted)
        if len(self._free) - int(missing.sum()) < self._largest_use:
            return False
        if missing.any():
            self._bring(layer, pages, missing)
        here = slice(pages.first, pages.end)
        present = self._slots[layer, here] != NO_SLOT
        self._expected[layer, here] += present if wanted is None else present & wanted
        return True

    def forget_expected(self) -> None:
        """Nothing is expected any more: what was brought for uses that never came may leave."""
        self._expected[...] = 0

    def settle(self, layer: int) -> None:
        self._in_use[layer].clear()
        self._evict(layer, keep_expected=True)

    def free(self, layer: int, pages: PageRange) -> None:
        here = slice(pages.first, pages.end)
        slots, host_slots = self._slots[layer, here], self._host_slots[layer, here]
        present = slots != NO_SLOT
        # Nobody may write to a slot, or into the host's copy, under an upload that was never waited for.
        self._wait_for(self._latest(layer, here, present))
        self._free.give(slots[present], (self._mover.now(),))
        self._resident[layer] -= int(present.sum())
        self._away[layer] -= int((~present & (host_slots != NO_SLOT)).sum())
        self._host.free(host_slots[host_slots != NO_SLOT])
        slots[...], host_slots[...] = NO_SLOT, NO_SLOT
        self._changed[layer, here] = False
        self._expected[layer, here] = 0

    def _missing(self, layer: int, pages: PageRange, wanted: Wanted | None) -> Wanted:
        here = slice(pages.first, pages.end)
        missing = (self._slots[layer, here] == NO_SLOT) & (self._host_slots[layer, here] != NO_SLOT)
        return missing if wanted is None else missing & wanted

    def _bring(self, layer: int, pages: PageRange, missing: Wanted) -> None:
        here = slice(pages.first, pages.end)
        slots, marks = self._take(layer, int(missing.sum()))
        self._num_uploads += 1
        self._uploads[self._num_uploads] = self._mover.upload(
            self._host.addresses(self._host_slots[layer, here][missing]),
            self._device_addresses(slots),
            self._record_bytes,
            after=(*marks, self._downloads[layer]),
        )
        self._slots[layer, here][missing] = slots
        self._arrivals[layer, here][missing] = self._num_uploads
        self._away[layer] -= len(slots)

    def _take(self, layer: int, count: int) -> tuple[npt.NDArray[np.int32], list[Mark]]:
        """Free slots for a layer; what others have ahead of time goes back where there are too few."""
        self._largest_use = max(self._largest_use, count)
        for other in range(len(self._quotas)):
            if len(self._free) >= count:
                break
            if other != layer:
                self._evict(other, keep_expected=False)
        if len(self._free) < count:
            self._give_way(layer, count - len(self._free))
        if len(self._free) < count:
            raise RuntimeError(
                f"Layer {layer} needs more pages at once than the device has room for.\n"
                f"  It needs {count:,} records of {self._record_bytes:,} bytes, {len(self._free):,} slots are free.\n"
                "  Set device_pages_gib higher, or chunk_tokens, span_tokens, top_k or page_budget lower."
            )
        self._resident[layer] += count
        return self._free.take(count)

    def _evict(self, layer: int, *, keep_expected: bool) -> None:
        """Bring a layer down to its quota: what is worth least leaves, but for what is expected, if it may stay."""
        excess = self._resident[layer] - self._quotas[layer]
        if excess <= 0:
            return
        slots, expected = self._slots[layer].reshape(-1), self._expected[layer].reshape(-1)
        here = self._least_worth(layer, np.flatnonzero(slots != NO_SLOT), excess)
        self._leave(layer, here[expected[here] == 0] if keep_expected else here)

    def _give_way(self, layer: int, count: int) -> None:
        """So many of a layer's own records leave, among those that it does not use now: brought ahead of time, or for a
        use that never came."""
        idle = self._slots[layer] != NO_SLOT
        for here, chosen in self._in_use[layer]:
            idle[here] &= False if chosen is None else ~chosen
        self._leave(layer, self._least_worth(layer, np.flatnonzero(idle), count))

    def _least_worth(self, layer: int, here: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        if len(here) > count:
            worth = self._worth(layer).reshape(-1)[here]
            here = here[np.argpartition(worth, count - 1)[:count]]
            here.sort()  # neighbours are copied together
        return here

    def _leave(self, layer: int, here: npt.NDArray[np.int64]) -> None:
        """These records leave the device."""
        slots = self._slots[layer].reshape(-1)
        now = self._mover.now()
        changed = self._changed[layer].reshape(-1)[here]
        kept_by_host, only_here = here[~changed], here[changed]
        self._give_back(layer, kept_by_host, now)
        slots[kept_by_host] = NO_SLOT  # before host memory is looked for: what has left is not on the device as well
        self._save(layer, only_here, now)
        slots[only_here] = NO_SLOT
        self._expected[layer].reshape(-1)[here] = 0
        self._resident[layer] -= len(here)
        self._away[layer] += len(here)

    def _give_back(self, layer: int, here: npt.NDArray[np.int64], now: Mark) -> None:
        """Slots of records that the host has, too. An upload that was not waited for may still be writing to them."""
        arrival = int(self._arrivals[layer].reshape(-1)[here].max(initial=0))
        marks = (now, self._uploads[arrival]) if arrival > self._uploads_seen else (now,)
        self._free.give(self._slots[layer].reshape(-1)[here], marks)

    def _save(self, layer: int, here: npt.NDArray[np.int64], now: Mark) -> None:
        """Copy records to the host; their slots are free behind it."""
        if not len(here):
            return
        slots, host_slots = self._slots[layer].reshape(-1)[here], self._host_slots[layer].reshape(-1)
        new = here[host_slots[here] == NO_SLOT]
        host_slots[new] = self._host_room(len(new))
        saved = self._mover.download(
            self._device_addresses(slots), self._host.addresses(host_slots[here]), self._record_bytes, after=(now,)
        )
        self._downloads[layer] = saved
        self._free.give(slots, (saved,))
        self._changed[layer].reshape(-1)[here] = False

    def _host_room(self, count: int) -> npt.NDArray[np.int64]:
        """Host slots; where host memory runs out, of records that the device has as well."""
        try:
            return self._host.allocate(count)
        except HostMemoryError:
            waited_for = self._arrivals <= self._uploads_seen
            twice = (self._slots != NO_SLOT) & (self._host_slots != NO_SLOT) & ~self._changed & waited_for
            if not twice.any():
                raise
            self._host.free(self._host_slots[twice])
            self._host_slots[twice] = NO_SLOT
            self._changed |= twice
            return self._host.allocate(count)

    def _device_addresses(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        return self.pool.storage.data_ptr() + slots.astype(np.int64) * self._record_bytes

    def _latest(self, layer: int, here: slice, records: Wanted) -> int:
        """Number of the last upload among those of some records, as far as one was not waited for."""
        if self._num_uploads == self._uploads_seen:
            return 0
        return int((self._arrivals[layer, here] * records).max(initial=0))

    def _wait_for(self, arrival: int) -> None:
        if arrival > self._uploads_seen:
            self._mover.wait((self._uploads[arrival],))
            for number in range(self._uploads_seen + 1, arrival + 1):
                del self._uploads[number]
            self._uploads_seen = arrival
