"""Slabs of pinned host memory, made ahead of need by background threads and kept until the arena is closed."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oomb_accel.host.limits import HostLimits, host_limits
from oomb_accel.host.mapping import HostMapping, Pinner, cuda_pinner
from oomb_accel.plan.sizes import LARGEST_SLAB_BYTES, gib_above, gib_text

MOST_THREADS = 8
PART_BYTES = 32 << 20
"""What a thread makes present before it looks again for something more urgent, or for the end."""


class HostMemoryError(RuntimeError):
    """There is not enough host memory for pages: beyond the arena's limit, or beyond what the machine has left."""


@dataclass(frozen=True, eq=False, slots=True)
class Slab:
    """A piece of host memory. Its bytes are zero or whatever the last owner left there."""

    number: int
    address: int
    memory: Tensor
    """uint8 ``[slab_bytes]`` on the CPU."""


@dataclass(eq=False, slots=True)
class _Build:
    """A slab that is being made."""

    number: int
    mapping: HostMapping
    num_untouched: int


@dataclass(slots=True)
class _Resources:
    """What must be given back even when the arena itself is gone. Threads look at ``closing`` between parts."""

    pinner: Pinner | None
    mappings: list[HostMapping] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)


class HostArena:
    """Slabs for everything that one process keeps in host memory. All methods may be called from any thread.

    Slabs are never given back to the system one by one: the next step needs them again. They are released by
    ``close``, when nobody holds the arena any more, and at the end of the interpreter. A forked process has none.

    Args:
        limit_bytes: hard cap on the memory of all slabs; see `host_budget`.
        slab_bytes: of each slab; see `plan.sizes.slab_bytes_for`.
        pin: register the slabs with CUDA, for the current device, where CUDA is there. Where it refuses, there is one
            warning, and that slab and all later ones are pageable.
        pinner: used instead of CUDA.
        limits: looked at before memory is taken.
        num_threads: background threads; as many as this process may use, up to 8, when None.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        slab_bytes: int = LARGEST_SLAB_BYTES,
        pin: bool,
        pinner: Pinner | None = None,
        limits: Callable[[], HostLimits] = host_limits,
        num_threads: int | None = None,
    ) -> None:
        if pin and pinner is None and torch.cuda.is_available():
            pinner = cuda_pinner(torch.cuda.current_device())
        self.limit_bytes = limit_bytes
        self.slab_bytes = slab_bytes
        self._limits = limits
        self._num_threads = num_threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pinned = pin and pinner is not None
        self._changed = threading.Condition()  # guards all that follows
        self._slabs: dict[int, Slab] = {}
        self._free: list[int] = []  # a heap: the lowest number is taken first
        self._taken: set[int] = set()
        self._most_taken = 0
        self._numbers = itertools.count()
        self._builds: set[_Build] = set()
        self._parts: deque[tuple[_Build, int]] = deque()
        self._target = 0  # slabs that exist or will
        self._num_waiting = 0
        self._num_working = 0
        self._failures: list[Exception] = []
        self._resources = _Resources(pinner if pin else None)
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _release, self._resources, self._owner)

    @property
    def num_bytes(self) -> int:
        """Of all slabs that are there, taken or free."""
        return len(self._slabs) * self.slab_bytes

    @property
    def free_bytes(self) -> int:
        """Of the slabs that nobody has taken."""
        return len(self._free) * self.slab_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes of slabs that were taken at any one time."""
        return self._most_taken * self.slab_bytes

    @property
    def pinned(self) -> bool:
        """Whether all slabs that were taken so far are pinned. Look after taking one: False stays False."""
        return self._pinned

    def reserve(self, num_bytes: int) -> None:
        """Start making slabs in the background, until this many bytes are there.

        Raises:
            HostMemoryError: at once, and nothing is started, where that passes the limit or what the machine has left.
        """
        num_slabs = -(-num_bytes // self.slab_bytes)
        with self._changed:
            self._check_open()
            if num_slabs <= self._target:
                return
            self._check_limit(num_slabs)
            self._check_machine(num_slabs - len(self._slabs) - len(self._builds))
            self._aim(num_slabs)

    def wait(self, num_bytes: int) -> None:
        """Until the slabs of this many bytes, which were reserved, are there.

        Raises:
            HostMemoryError: one of them does not come.
        """
        num_slabs = -(-num_bytes // self.slab_bytes)
        with self._changed:
            while len(self._slabs) < num_slabs:
                self._check_open()
                if self._target < num_slabs:
                    raise _as_memory_error(self._failures[-1])
                self._changed.wait()

    def take(self) -> Slab:
        """A free slab; waits for the background where none is free, and has one more made where none is coming.

        Raises:
            HostMemoryError: that would pass the limit, or what the machine has left.
        """
        with self._changed:
            failures = len(self._failures)
            self._num_waiting += 1
            try:
                while not self._free:
                    self._check_open()
                    if self._num_waiting > self._target - len(self._slabs):
                        if len(self._failures) > failures:
                            raise _as_memory_error(self._failures[-1])
                        self._check_limit(self._target + 1)
                        self._aim(self._target + 1)
                    self._changed.wait()
            finally:
                self._num_waiting -= 1
            number = heapq.heappop(self._free)
            self._taken.add(number)
            self._most_taken = max(self._most_taken, len(self._taken))
            return self._slabs[number]

    def give(self, slab: Slab) -> None:
        """Let others have the slab. Its content is lost. Nothing happens when the arena is closed."""
        if os.getpid() != self._owner:  # there nobody has it, and a thread of the parent's may have held the lock
            return
        with self._changed:
            if self._resources.closing.is_set():
                return
            assert slab.number in self._taken and self._slabs[slab.number] is slab, "a slab is given back once"
            self._taken.remove(slab.number)
            heapq.heappush(self._free, slab.number)
            self._changed.notify()

    def close(self) -> None:
        """Stop the background, wait for the device, unpin and give everything back. Slabs become invalid."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._resources.closing.set()
            self._parts.clear()
            self._slabs.clear()
            self._free.clear()
            self._taken.clear()
            self._changed.notify_all()
        self._finalizer()

    def _check_open(self) -> None:
        if self._resources.closing.is_set():
            raise RuntimeError(
                "This arena of host memory was closed.\n  Got a request for more of it.\n  Make a new one."
            )

    def _check_limit(self, num_slabs: int) -> None:
        if num_slabs * self.slab_bytes <= self.limit_bytes:
            return
        needed = num_slabs * self.slab_bytes
        raise HostMemoryError(
            "Pages need more host memory than they may have.\n"
            f"  Needed: {num_slabs} slabs, {gib_text(needed)} GiB; the limit is {gib_text(self.limit_bytes)} GiB, "
            f"and {gib_text(len(self._taken) * self.slab_bytes)} GiB are in use.\n"
            f"  Set host_memory_gib={gib_above(needed)} or more if the machine has it, or train on shorter documents."
        )

    def _check_machine(self, num_slabs: int) -> None:
        """Whether the machine has memory for so many more slabs. Half of the margin of a budget may be used up by what
        else this process needs; the rest is left, because the kernel's answer to too little memory is a kill."""
        limits = self._limits()
        spare = limits.available_bytes - limits.margin_bytes // 2
        untouched = sum(build.num_untouched for build in self._builds) * min(PART_BYTES, self.slab_bytes)
        if num_slabs * self.slab_bytes + untouched <= spare:
            return
        fits = self.num_bytes + max(0, spare)
        raise HostMemoryError(
            "This machine has too little host memory left for pages.\n"
            f"  Needed: {gib_text(num_slabs * self.slab_bytes + untouched)} GiB on top of {gib_text(self.num_bytes)} "
            f"GiB; {gib_text(limits.available_bytes)} GiB are available, of which "
            f"{gib_text(limits.margin_bytes // 2)} GiB are left to others ({limits.scarce}).\n"
            f"  Free memory on this machine, or train on documents that need at most {gib_text(fits)} GiB "
            f"(host_memory_gib={gib_text(fits)} finds longer ones before the step starts)."
        )

    def _aim(self, num_slabs: int) -> None:
        """Have so many slabs made. The caller holds the lock."""
        self._target = num_slabs
        missing = num_slabs - len(self._slabs) - len(self._builds)
        num_parts = missing * _num_parts(self.slab_bytes) + len(self._parts)
        threads = self._resources.threads
        threads[:] = [thread for thread in threads if thread.is_alive()]
        for _ in range(min(self._num_threads - self._num_working, num_parts)):
            thread = threading.Thread(target=self._work, name="oomb-host-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: those that there are will do
                if self._num_working:
                    break
                self._target = len(self._slabs)
                raise _as_memory_error(error) from error
            threads.append(thread)
            self._num_working += 1

    def _work(self) -> None:
        """Make slabs until there are as many as wanted: one thread's share of it."""
        while (part := self._next_part()) is not None:
            build, start = part
            try:
                build.mapping.touch(start, min(start + PART_BYTES, self.slab_bytes))
                with self._changed:
                    build.num_untouched -= 1
                    is_whole = build.num_untouched == 0
                if is_whole:
                    self._pin(build.mapping)
                    self._publish(build)
            except Exception as error:  # whoever waits for the slab must hear of it, whatever it is
                self._fail(build, error)

    def _next_part(self) -> tuple[_Build, int] | None:
        """The next piece of memory to touch: of the slab in hand, or of a new one. None ends the thread."""
        with self._changed:
            if not self._resources.closing.is_set():
                if not self._parts:
                    self._begin_slab()
                if self._parts:
                    return self._parts.popleft()
            self._num_working -= 1
            return None

    def _begin_slab(self) -> None:
        """Map one more slab where one is missing. The caller holds the lock."""
        if len(self._slabs) + len(self._builds) >= self._target:
            return
        try:
            self._check_machine(1)
            mapping = HostMapping(self.slab_bytes)
        except Exception as error:  # whoever waits for the slab must hear of it, whatever it is
            self._fail(None, error)
            return
        self._resources.mappings.append(mapping)
        build = _Build(next(self._numbers), mapping, _num_parts(self.slab_bytes))
        self._builds.add(build)
        self._parts.extend((build, start) for start in range(0, self.slab_bytes, PART_BYTES))

    def _pin(self, mapping: HostMapping) -> None:
        if self._resources.pinner is None or not self._pinned:
            return
        try:
            self._resources.pinner.register(mapping.address, self.slab_bytes)
            mapping.registered = True
        except RuntimeError as error:
            with self._changed:
                is_first, self._pinned = self._pinned, False
            if is_first:
                warnings.warn(self._refused(error), RuntimeWarning, stacklevel=2)

    def _refused(self, error: Exception) -> str:
        limits = self._limits()
        num_pinned = sum(mapping.registered for mapping in self._resources.mappings)
        memlock = "none" if limits.memlock_bytes is None else f"{gib_text(limits.memlock_bytes)} GiB"
        within = f"set host_memory_gib={gib_text(num_pinned * self.slab_bytes)}, which could be pinned"
        return (
            "Pinning host memory was refused: pages go to pageable memory, which copies several times slower, and no "
            "outputs are kept there.\n"
            f"  Pinned so far: {gib_text(num_pinned * self.slab_bytes)} GiB of at most {gib_text(self.limit_bytes)} "
            f"GiB; available: {gib_text(limits.available_bytes)} GiB; memlock limit: {memlock}. {error}\n"
            f"  Raise what refuses it (ulimit -l, the container's settings), or "
            f"{within if num_pinned else 'train on documents whose pages fit the device'}."
        )

    def _publish(self, build: _Build) -> None:
        with self._changed:
            self._builds.discard(build)
            if self._resources.closing.is_set():
                return
            self._slabs[build.number] = Slab(build.number, build.mapping.address, build.mapping.memory)
            heapq.heappush(self._free, build.number)
            self._changed.notify_all()

    def _fail(self, build: _Build | None, error: Exception) -> None:
        """Note that a slab did not come, and expect no more than those that are there or in hand.

        Args:
            build: the slab; None when there was no memory for it.
            error: for those that wait for it.
        """
        with self._changed:
            self._failures.append(error)
            if build is not None and build in self._builds:
                self._builds.remove(build)
                self._resources.mappings.remove(build.mapping)
                build.mapping.close()
                self._parts = deque(part for part in self._parts if part[0] is not build)
            self._target = len(self._slabs) + len(self._builds)
            self._changed.notify_all()


def _num_parts(slab_bytes: int) -> int:
    return -(-slab_bytes // PART_BYTES)


def _as_memory_error(error: Exception) -> HostMemoryError:
    """A new error for each thread that waits."""
    if isinstance(error, HostMemoryError):
        return HostMemoryError(str(error))
    wrapped = HostMemoryError(
        "A slab of host memory could not be made.\n"
        f"  {type(error).__name__}: {error}\n"
        "  Free memory on this machine, or set a lower host_memory_gib and train on shorter documents."
    )
    wrapped.__cause__ = error
    return wrapped


def _release(resources: _Resources, owner: int) -> None:
    """Give everything back, once. In a forked process there is nothing: it has neither the threads nor the memory."""
    if os.getpid() != owner:
        return
    resources.closing.set()
    for thread in resources.threads:
        if thread is not threading.current_thread():
            thread.join()
    pinned = [mapping.address for mapping in resources.mappings if mapping.registered]
    if resources.pinner is not None and pinned:
        with contextlib.suppress(RuntimeError):  # a device that failed before: the driver unpins at the end
            resources.pinner.unregister(pinned)
    while resources.mappings:
        resources.mappings.pop().close()
