"""Machines and CUDA as the tests of host memory want them."""

import threading
import time
from collections.abc import Callable, Sequence

from oomb_accel.host import HostArena, HostLimits, Pinner

MIB = 1 << 20
GIB = 1 << 30
SLAB = 64 * 1024
WAIT_S = 20


def machine(available_bytes: int, total_bytes: int = 256 * GIB) -> HostLimits:
    """A machine without cgroups. Its margin is 4 GiB."""
    return HostLimits(total_bytes=total_bytes, system_available_bytes=available_bytes)


class FakeCuda:
    """Keeps account of what is pinned. ``before`` runs in front of every registration and may refuse it."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self._before = before
        self._lock = threading.Lock()
        self._num_asked = 0
        self.pinned: dict[int, int] = {}
        self.most_bytes = 0
        self.unpinned: list[int] = []

    @property
    def pinner(self) -> Pinner:
        return Pinner(self._register, self._unregister)

    def _register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            number, self._num_asked = self._num_asked, self._num_asked + 1
        self._before(number)
        with self._lock:
            assert address not in self.pinned
            self.pinned[address] = num_bytes
            self.most_bytes = max(self.most_bytes, sum(self.pinned.values()))

    def _unregister(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            del self.pinned[address]
            self.unpinned.append(address)


def make_arena(
    num_slabs: int,
    cuda: FakeCuda | None = None,
    *,
    slab_bytes: int = SLAB,
    limits: Callable[[], HostLimits] = lambda: machine(64 * GIB),
    num_threads: int = 3,
) -> HostArena:
    pinner = None if cuda is None else cuda.pinner
    return HostArena(
        num_slabs * slab_bytes,
        slab_bytes=slab_bytes,
        pin=cuda is not None,
        pinner=pinner,
        limits=limits,
        num_threads=num_threads,
    )


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


def wait_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S)
