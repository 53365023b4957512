"""Host memory of one stream: records of all kinds share it, and what lies on the device as well makes room."""

from __future__ import annotations

import weakref
from typing import Protocol

from oomb_accel.host import HostMemoryError, HostStore
from oomb_accel.host.store import Slots


class Holder(Protocol):
    """Records of a kind, some of which lie on the device and on the host."""

    def give_up_copies(self, count: int) -> int:
        """Free the host slots of so many of these, or of all. Returns of how many."""


class HostRoom:
    """Slots for records of several sizes, each a multiple of the store's.

    Args:
        store: of the smallest records.
    """

    def __init__(self, store: HostStore) -> None:
        self.store = store
        self._holders: list[weakref.ref[Holder]] = []

    def add_holder(self, holder: Holder) -> None:
        """Ask these records, too, where host memory ends. The first ones are asked first."""
        self._holders.append(weakref.ref(holder))

    def allocate(self, count: int, record_bytes: int) -> Slots:
        """Slots for so many records of this size, ascending.

        Raises:
            HostMemoryError: there is no room, even where the device has it all as well.
        """
        width = self._width(record_bytes)
        while True:
            try:
                return self.store.allocate(count, width)
            except HostMemoryError:
                # A slab's worth at a time: whatever gives up its copy must be written again if it leaves.
                wanted = max(count * width, self.store.records_per_slab)
                if not any(holder.give_up_copies(wanted) for holder in self._there()):
                    raise

    def free(self, slots: Slots, record_bytes: int) -> None:
        """Forget these records; all of them must be allocated, with this size."""
        self.store.free(slots, self._width(record_bytes))

    def addresses(self, slots: Slots) -> Slots:
        """Address of each record; all of them must be allocated."""
        return self.store.addresses(slots)

    def _there(self) -> list[Holder]:
        return [holder for reference in self._holders if (holder := reference()) is not None]

    def _width(self, record_bytes: int) -> int:
        width, odd = divmod(record_bytes, self.store.record_bytes)
        assert width and not odd, "a record is a whole number of slots"
        return width
