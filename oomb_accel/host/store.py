"""Records in slabs of an arena. Numbers only: what a record means, and when it moves, others know."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oomb_accel.host.arena import HostArena, Slab

Slots = npt.NDArray[np.int64]


class HostStore:
    """Slots for records in host memory. Slot ``place * records_per_slab + i`` is record ``i`` of the slab in a place.

    A slot keeps its number and its address until it is freed. A record never straddles slabs. A slab without records
    goes back to the arena at once. Not for several threads.

    A wider record takes several neighbours, the first of which is a multiple of its width and gives it its number.

    Args:
        arena: where slabs come from.
        record_bytes: of the smallest records.
    """

    def __init__(self, arena: HostArena, record_bytes: int) -> None:
        assert 0 < record_bytes <= arena.slab_bytes, "a record fits a slab"
        self.record_bytes = record_bytes
        self.records_per_slab = arena.slab_bytes // record_bytes
        self._arena = arena
        self._slabs: list[Slab | None] = []  # by place
        self._slab_addresses = np.zeros(0, dtype=np.int64)  # by place
        self._addresses = np.zeros(1, dtype=np.int64)  # of allocated slots, others 0; the last always 0, for slot -1
        self._is_free = np.zeros((0, self.records_per_slab), dtype=bool)  # nothing is free where there is no slab
        self._num_free = np.zeros(0, dtype=np.int64)  # by place
        self._longest = np.zeros(0, dtype=np.int64)  # by place: no run of free slots is longer, it may be shorter

    @property
    def num_records(self) -> int:
        """Records that are allocated."""
        return self._num_slabs * self.records_per_slab - int(self._num_free.sum())

    @property
    def num_bytes(self) -> int:
        """Of the slabs that this store holds."""
        return self._num_slabs * self._arena.slab_bytes

    @property
    def _num_slabs(self) -> int:
        return sum(slab is not None for slab in self._slabs)

    def allocate(self, count: int, width: int = 1) -> Slots:
        """Slots for so many records, ascending. Free slots of slabs that are held come before a new slab.

        They are one run of adjacent addresses where there is a place for it, the lowest such place; or else the lowest
        free slots.

        Args:
            width: slots that each of them takes.

        Raises:
            HostMemoryError: the arena has no slab for them. Nothing is allocated then.
        """
        slots = self._free_slots(count, width)
        if slots.size < count:
            self._add_slabs(-(-(count - slots.size) // (self.records_per_slab // width)))
            slots = self._free_slots(count, width)
        self._mark(_widened(slots, width), False)
        return slots

    def free(self, slots: Slots, width: int = 1) -> None:
        """Forget these records; all of them must be allocated, with this width."""
        slots = _widened(slots, width)
        addresses, numbers = self.addresses(slots), np.arange(slots.size)
        self._addresses[slots] = numbers
        distinct = np.array_equal(self._addresses[slots], numbers)  # of equal slots, one has the number of another
        self._addresses[slots] = addresses
        assert distinct, "a slot is freed once"
        change = self._mark(slots, True)
        for place in np.flatnonzero((change > 0) & (self._num_free == self.records_per_slab)).tolist():
            self._give(place)

    def addresses(self, slots: Slots) -> Slots:
        """Address of each record; all of them must be allocated."""
        try:
            addresses: Slots = self._addresses[slots]
        except IndexError:
            addresses = np.zeros(1, dtype=np.int64)
        assert addresses.all(), "only what is allocated has an address"
        return addresses

    def close(self) -> None:
        """Give all slabs back. All slots become invalid."""
        for place, slab in enumerate(self._slabs):
            if slab is not None:
                self._give(place)

    def _free_slots(self, count: int, width: int) -> Slots:
        """Where so many records would lie; fewer where there is no room for all."""
        run = self._run(count, width)
        return self._lowest(count, width) if run is None else run

    def _wide(self, places: slice | int, width: int) -> npt.NDArray[np.bool_]:
        """Which aligned groups of so many neighbours are free as a whole, the last axis one slab's."""
        groups = self.records_per_slab // width
        free = self._is_free[places][..., : groups * width]
        whole: npt.NDArray[np.bool_] = np.logical_and.reduce(free.reshape(*free.shape[:-1], groups, width), axis=-1)
        return whole

    def _run(self, count: int, width: int) -> Slots | None:
        """The lowest run of free slots within a slab that is long enough."""
        for place in np.flatnonzero(self._longest >= max(count, 1) * width).tolist():
            free = self._is_free[place] if width == 1 else self._wide(place, width)
            bounded = np.zeros(len(free) + 2, bool)
            bounded[1:-1] = free
            edges = np.flatnonzero(bounded[1:] != bounded[:-1])
            starts, lengths = edges[::2], edges[1::2] - edges[::2]
            if width == 1:
                self._longest[place] = lengths.max(initial=0)
            fitting = starts[lengths >= count]
            if fitting.size:
                return place * self.records_per_slab + width * (int(fitting[0]) + np.arange(count, dtype=np.int64))
        return None

    def _lowest(self, count: int, width: int) -> Slots:
        """The lowest free slots, of as few slabs as that takes."""
        if width > 1:
            free = np.flatnonzero(self._wide(slice(None), width))[:count]
            places, groups = np.divmod(free, self.records_per_slab // width)
            wide: Slots = places * self.records_per_slab + groups * width
            return wide
        first, last = np.searchsorted(
            np.cumsum(self._num_free), [1, count]
        ).tolist()  # places of the first and the last
        lowest: Slots = np.flatnonzero(self._is_free[first : last + 1])[:count] + first * self.records_per_slab
        return lowest

    def _mark(self, slots: Slots, is_free: bool) -> Slots:
        """Returns how many it were in each place."""
        places = slots // self.records_per_slab
        self._is_free.reshape(-1)[slots] = is_free
        change = np.bincount(places, minlength=len(self._slabs))
        if is_free:
            self._addresses[slots] = 0
            self._num_free += change
            # A freed slot may join two runs; how long they are is found out when it matters.
            self._longest = np.where(change > 0, self._num_free, self._longest)
        else:
            records = slots - places * self.records_per_slab
            self._addresses[slots] = self._slab_addresses[places] + records * self.record_bytes
            self._num_free -= change
            self._longest = np.minimum(self._longest, self._num_free)
        return change

    def _add_slabs(self, count: int) -> None:
        """Take so many slabs, or none."""
        taken: list[Slab] = []
        try:
            for _ in range(count):
                taken.append(self._arena.take())
        except BaseException:  # an interruption as well: a slab that nobody knows is lost
            for slab in taken:
                self._arena.give(slab)
            raise
        for slab in taken:
            self._hold(slab)

    def _hold(self, slab: Slab) -> None:
        """Put a slab in the lowest empty place."""
        if None not in self._slabs:
            self._slabs.append(None)
            self._slab_addresses = np.append(self._slab_addresses, 0)
            if len(self._addresses) <= len(self._slabs) * self.records_per_slab:  # doubled, or many slabs make it slow
                more = np.zeros(len(self._addresses) + self.records_per_slab, dtype=np.int64)
                self._addresses = np.concatenate([self._addresses, more])
            self._num_free = np.append(self._num_free, 0)
            self._longest = np.append(self._longest, 0)
            self._is_free = np.concatenate([self._is_free, np.zeros((1, self.records_per_slab), dtype=bool)])
        self._set(self._slabs.index(None), slab)

    def _give(self, place: int) -> None:
        slab = self._slabs[place]
        assert slab is not None, "there is a slab in this place"
        self._set(place, None)
        self._arena.give(slab)

    def _set(self, place: int, slab: Slab | None) -> None:
        """Fill a place with an empty slab, or empty it."""
        num_free = 0 if slab is None else self.records_per_slab
        self._slabs[place] = slab
        self._slab_addresses[place] = 0 if slab is None else slab.address
        self._addresses[place * self.records_per_slab : (place + 1) * self.records_per_slab] = 0
        self._is_free[place] = slab is not None
        self._num_free[place] = self._longest[place] = num_free


def _widened(slots: Slots, width: int) -> Slots:
    """All slots of records of a width."""
    if width == 1:
        return slots
    wide: Slots = (slots[:, None] + np.arange(width)).reshape(-1)
    return wide
