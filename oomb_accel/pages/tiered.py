"""Records of one kind of which the device holds a part: the others lie in host memory.

Between its uses a layer keeps at most its quota of records on the device, those that are worth most; the slots beyond
all quotas are a reserve. A use brings what is missing into the reserve, and whatever then exceeds the quota leaves when
the layer settles. A record that the host has unchanged leaves for free.

The host's work for a use is in proportion to the records that it names, not to those that there are; where the least
worth are looked for, a mark for each of these comes on top. A small array operation costs microseconds whatever its
size, and so does a call of the driver: what can be one is one.

Legend: L layers, G KV heads, N pages of the stream, n pages of a range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oomb_accel.pages.host_room import HostRoom
from oomb_accel.pages.least_worth import LeastWorth, Places, Worths, least
from oomb_accel.pages.mover import Mark, PageMover
from oomb_accel.pages.pool import PagePool
from oomb_accel.pages.room import DeviceRoom
from oomb_accel.pages.shape import PageShape
from oomb_accel.pages.slots import SlotQueue
from oomb_accel.pages.stored import Wanted, WantedLater
from oomb_accel.pages.table import NO_SLOT
from oomb_accel.schedule import PageRange
from oomb_kernels import clear_records, set_slots

Worth: TypeAlias = Callable[[int, Places], Worths]
"""How much these records of a layer are worth keeping on the device: the least worth leave first. Within a sweep a
record's worth falls with its use; what falls otherwise, as pages of a document that is over do, may stay a while."""


class _Row(NamedTuple):
    """The tables of one layer, each laid out in a row; views."""

    slots: npt.NDArray[np.int32]
    host_slots: npt.NDArray[np.int64]
    changed: npt.NDArray[np.bool_]
    expected: npt.NDArray[np.int8]
    arrivals: npt.NDArray[np.int32]


class TieredPages:
    """Records of one kind on device and host; what `Records` asks for, and `expect`.

    Args:
        num_pages: logical pages of the stream.
        dtype: of the pool.
        host: for those of the stream.
    """

    def __init__(
        self,
        shape: PageShape,
        num_pages: int,
        room: DeviceRoom,
        dtype: torch.dtype,
        device: torch.device,
        host: HostRoom,
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
        self._layers_expected: set[int] = set()
        self._arrivals = np.zeros(size, np.int32)
        """Number of the upload that brought the record. Uploads pass in order."""
        self._uploads: dict[int, Mark] = {}
        """By number, those that the computing stream does not wait for yet."""
        self._num_uploads = self._uploads_seen = 0
        tables = (self._slots, self._host_slots, self._changed, self._expected, self._arrivals)
        self._rows = [_Row(*(table[layer].reshape(-1) for table in tables)) for layer in range(shape.num_layers)]
        self._resident = [0] * shape.num_layers
        self._away = [0] * shape.num_layers
        """Records that only the host has."""
        self._in_use: list[list[Places | slice]] = [[] for _ in range(shape.num_layers)]
        """By layer, what was used or added since it settled."""
        self._least_worth = [LeastWorth() for _ in range(shape.num_layers)]
        self._mirror = torch.full(size, NO_SLOT, dtype=torch.int32, device=device)
        """The slots, for kernels: right for what is in use, and where no record is."""
        self._slots_GN = self._mirror.transpose(1, 2).unbind()
        """The same by layer, views."""
        self._moved: list[list[Places]] = [[] for _ in range(shape.num_layers)]
        """By layer, records that got slots of which the mirror does not know yet."""
        self._num_heads = shape.num_kv_heads
        self._downloads: list[Mark] = [None] * shape.num_layers
        """The last download of each layer."""
        self._largest_use = 0
        host.add_holder(self)

    def exists(self, layer: int, pages: PageRange) -> npt.NDArray[np.bool_]:
        here = slice(pages.first, pages.end)
        on_device: npt.NDArray[np.bool_] = self._slots[layer, here] != NO_SLOT
        return on_device | (self._host_slots[layer, here] != NO_SLOT)

    def lacking(self, layer: int, pages: PageRange, wanted: WantedLater | None) -> Wanted:
        here, row = self._places(pages, wanted and wanted()), self._rows[layer]
        new = here[(row.slots[here] == NO_SLOT) & (row.host_slots[here] == NO_SLOT)]
        return new - pages.first * self._num_heads

    def add(self, layer: int, pages: PageRange, wanted: Wanted | None = None) -> None:
        here = self._places(pages, wanted)
        for table in self._rows[layer][:2]:
            assert (table[here] == NO_SLOT).all(), "a record is made once"
        slots, marks = self._room(layer, len(here))
        self._mover.wait(marks)
        self._in_use[layer].append(here)
        self._put(layer, here, slots)
        self._least_worth[layer].note(here)
        self._rows[layer].changed[here] = True

    def clear(self, layer: int, pages: PageRange, wanted: Wanted) -> None:
        slots = self._rows[layer].slots[self._places(pages, wanted)]
        self._mover.launch(lambda numbers: clear_records(self.pool.storage, numbers[0]), slots)

    def use(self, layer: int, *ranges: PageRange, wanted: WantedLater | None = None, write: bool = False) -> Tensor:
        assert wanted is None or len(ranges) == 1
        if wanted is not None and not write and not self._away[layer]:
            arrival = self._use_any(layer, ranges[0])  # everything is here: nobody waits to know what is wanted
        else:
            arrival = self._use(layer, [self._places(pages, wanted and wanted()) for pages in ranges], write)
        slots_GN = self._slots_for_kernels(layer, ranges)  # while uploads are on their way
        self._wait_for(arrival)
        return slots_GN

    def expect(self, layer: int, uses: Iterable[tuple[PageRange, Wanted | None]]) -> int:
        """Start to bring what later uses will miss.

        Returns:
            For how many of them, in order, free slots are enough for now.
        """
        expected, coming, marks = list[Places](), list[Places](), list[Mark]()
        for pages, wanted in uses:
            here = self._places(pages, wanted)
            absent, missing = self._missing(layer, here)
            if len(self._free) - len(missing) < self._largest_use:
                break
            if len(missing):
                coming.append(missing)
                marks += self._take(layer, missing)
            expected.append(self._existing(layer, here, absent, missing))
        self._bring(layer, coming, marks)
        for missing in coming:
            self._least_worth[layer].note(missing)
        for here in expected:
            self._rows[layer].expected[here] += 1
        self._layers_expected.add(layer)
        return len(expected)

    def forget_expected(self) -> None:
        """Nothing is expected any more: what was brought for uses that never came may leave."""
        for layer in self._layers_expected:
            self._expected[layer] = 0
        self._layers_expected.clear()

    def settle(self, layer: int) -> None:
        self._in_use[layer].clear()
        self._evict(layer, keep_expected=True)

    def free(self, pages: PageRange) -> None:
        here = (slice(None), slice(pages.first, pages.end))
        slots, host_slots = self._slots[here], self._host_slots[here]
        present, on_host = slots != NO_SLOT, host_slots != NO_SLOT
        # Nobody may write to a slot, or into the host's copy, under an upload that was never waited for.
        self._wait_for(int(self._arrivals[here].max(initial=0, where=present)))
        self._free.give(slots[present], (self._mover.now(),))
        for layer, (leaving, away) in enumerate(zip(present, on_host & ~present, strict=True)):
            self._resident[layer] -= np.count_nonzero(leaving)
            self._away[layer] -= np.count_nonzero(away)
        self._host.free(host_slots[on_host], self._record_bytes)
        slots[...], host_slots[...], self._mirror[here] = NO_SLOT, NO_SLOT, NO_SLOT
        self._changed[here], self._expected[here] = False, 0

    def give_up_copies(self, count: int) -> int:
        """Free the host slots of records that the device has as well: those of the last pages, whose chunks are over
        the soonest, so that most of them never leave again. Returns of how many."""
        twice = self._on_both()
        if not twice.any():
            self._wait_for(self._num_uploads)
            twice = self._on_both()
        from_page = np.cumsum(twice.sum((0, 2))[::-1])[::-1]
        twice[:, : max(0, np.count_nonzero(from_page >= count) - 1)] = False
        self._host.free(self._host_slots[twice], self._record_bytes)
        self._host_slots[twice] = NO_SLOT
        self._changed |= twice
        return int(np.count_nonzero(twice))

    def _places(self, pages: PageRange, wanted: Wanted | None) -> Places:
        first = pages.first * self._num_heads
        return np.arange(first, pages.end * self._num_heads) if wanted is None else wanted + first

    def _use(self, layer: int, uses: list[Places], write: bool) -> int:
        """Have these records on the device. Returns the upload that has to be waited for, 0 where there is none."""
        # Before anything is brought: what is used must not give way to it.
        self._in_use[layer] += uses
        used, coming, marks, arrival = list[Places](), list[Places](), list[Mark](), 0
        for here in uses:
            absent, missing = self._missing(layer, here)
            if len(missing):
                coming.append(missing)
                marks += self._take(layer, missing)
            used.append(self._existing(layer, here, absent, missing))
        self._bring(layer, coming, marks)
        for here in used:
            if layer in self._layers_expected:
                expected = self._rows[layer].expected
                expected[here] = np.maximum(expected[here], 1) - 1
            if write:
                self._rows[layer].changed[here] = True
            if self._num_uploads > self._uploads_seen:
                arrival = max(arrival, int(self._rows[layer].arrivals[here].max(initial=0)))
            self._least_worth[layer].note(here)
        return arrival

    def _use_any(self, layer: int, pages: PageRange) -> int:
        """The same for some of these records, all of which the device has."""
        here = slice(pages.first, pages.end)
        self._in_use[layer].append(slice(pages.first * self._num_heads, pages.end * self._num_heads))
        if layer in self._layers_expected:
            expected = self._expected[layer, here]
            expected -= expected > 0
        self._least_worth[layer].forget()
        unseen = self._num_uploads > self._uploads_seen
        return int(self._arrivals[layer, here].max(initial=0)) if unseen else 0

    def _on_both(self) -> npt.NDArray[np.bool_]:
        """Which records device and host have alike; not those that are on their way."""
        on_both: npt.NDArray[np.bool_] = (self._slots != NO_SLOT) & (self._host_slots != NO_SLOT) & ~self._changed
        return on_both & (self._arrivals <= self._uploads_seen)

    def _slots_for_kernels(self, layer: int, ranges: Iterable[PageRange]) -> Tensor:
        """int32 ``[G, n]``, as the mirror has them once it knows what has moved."""
        if self._moved[layer]:
            moved, slots = np.concatenate(self._moved[layer]), self._rows[layer].slots
            self._moved[layer].clear()
            self._mover.launch(functools.partial(set_slots, self._mirror, layer * slots.size), moved, slots[moved])
        slots_GN = self._slots_GN[layer]
        parts = [slots_GN[:, pages.first : pages.end] for pages in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _missing(self, layer: int, here: Places) -> tuple[Places, Places]:
        """Those that are not on the device, and those of them that the host has."""
        absent = here[self._rows[layer].slots[here] == NO_SLOT]
        if not len(absent) or not self._away[layer]:
            return absent, absent[:0]
        return absent, absent[self._rows[layer].host_slots[absent] != NO_SLOT]

    def _existing(self, layer: int, here: Places, absent: Places, missing: Places) -> Places:
        """Those of these records that there are, when what was missing has slots."""
        return here if len(absent) == len(missing) else here[self._rows[layer].slots[here] != NO_SLOT]

    def _take(self, layer: int, missing: Places) -> list[Mark]:
        """Give slots to records that only the host has. Returns the marks behind which they may be brought."""
        slots, marks = self._room(layer, len(missing))
        self._put(layer, missing, slots)
        self._rows[layer].arrivals[missing] = self._num_uploads + 1  # at once: until then the host must keep them
        self._away[layer] -= len(missing)
        return marks

    def _bring(self, layer: int, coming: list[Places], marks: list[Mark]) -> None:
        """Copy records that have just got slots to the device."""
        if not coming:
            return
        missing = coming[0] if len(coming) == 1 else np.concatenate(coming)
        self._num_uploads += 1
        self._uploads[self._num_uploads] = self._mover.upload(
            self._host.addresses(self._rows[layer].host_slots[missing]),
            self._device_addresses(self._rows[layer].slots[missing]),
            self._record_bytes,
            after=(*marks, self._downloads[layer]),
        )

    def _put(self, layer: int, here: Places, slots: npt.NDArray[np.int32]) -> None:
        """Records get slots."""
        self._rows[layer].slots[here] = slots
        self._moved[layer].append(here)

    def _room(self, layer: int, count: int) -> tuple[npt.NDArray[np.int32], list[Mark]]:
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
        row = self._rows[layer]
        here = self._least_worth[layer].find(excess, row.slots, functools.partial(self._worth, layer))
        if keep_expected and layer in self._layers_expected:
            here = here[row.expected[here] == 0]
        self._leave(layer, here)

    def _give_way(self, layer: int, count: int) -> None:
        """So many of a layer's own records leave, among those that it does not use now: brought ahead of time, or for a
        use that never came."""
        idle = self._rows[layer].slots != NO_SLOT
        for here in self._in_use[layer]:
            idle[here] = False
        places = np.flatnonzero(idle)
        self._leave(layer, places[least(self._worth(layer, places), count)])

    def _leave(self, layer: int, here: Places) -> None:
        """These records leave the device."""
        if not len(here):
            return
        row, now = self._rows[layer], self._mover.now()
        changed = row.changed[here]
        if changed.all():
            only_here = here
        else:
            kept_by_host, only_here = here[~changed], here[changed]
            self._give_back(layer, kept_by_host, now)
            row.slots[kept_by_host] = NO_SLOT  # before host memory is looked for: they are not on the device as well
        if len(only_here):
            self._save(layer, only_here, now)
            row.slots[only_here] = NO_SLOT
        if layer in self._layers_expected:
            row.expected[here] = 0
        self._resident[layer] -= len(here)
        self._away[layer] += len(here)

    def _give_back(self, layer: int, here: Places, now: Mark) -> None:
        """Slots of records that the host has, too. An upload that was not waited for may still be writing to them."""
        marks = [now]
        if self._num_uploads > self._uploads_seen:
            arrival = int(self._rows[layer].arrivals[here].max())
            marks += [self._uploads[arrival]] if arrival > self._uploads_seen else []
        self._free.give(self._rows[layer].slots[here], marks)

    def _save(self, layer: int, here: Places, now: Mark) -> None:
        """Copy records to the host; their slots are free behind it."""
        slots, host_slots = self._rows[layer].slots[here], self._rows[layer].host_slots
        targets = host_slots[here]
        new = here[targets == NO_SLOT]
        if len(new):
            host_slots[new] = self._host.allocate(len(new), self._record_bytes)
            targets = host_slots[here]
            now = self._mover.now()  # behind uploads that are waited for since then, from a place that was given up
        saved = self._mover.download(
            self._device_addresses(slots), self._host.addresses(targets), self._record_bytes, after=(now,)
        )
        self._downloads[layer] = saved
        self._free.give(slots, (saved,))
        self._rows[layer].changed[here] = False

    def _device_addresses(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        return self.pool.storage.data_ptr() + slots.astype(np.int64) * self._record_bytes

    def _wait_for(self, arrival: int) -> None:
        if arrival > self._uploads_seen:
            self._mover.wait((self._uploads[arrival],))
            for number in range(self._uploads_seen + 1, arrival + 1):
                del self._uploads[number]
            self._uploads_seen = arrival
