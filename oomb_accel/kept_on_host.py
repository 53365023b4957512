"""Results of the forward sweep in host memory: copied down behind the layers that make them, and up again ahead of the
recompute's.

The recompute asks in the order in which the forward sweep gave. A tensor on its way down is held until its copy has
passed, one that comes is held until it is asked for; of both together the device has no more than a few layers' at a
time. The computing stream waits for copies, the host does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oomb_accel.host import HostMemoryError, HostStore
from oomb_accel.host.store import Slots
from oomb_accel.pages import Mark, PageMover

BLOCK_BYTES = 64 << 10
"""Of host memory: each tensor begins its own."""
LAYERS_AT_ONCE = 3
"""Whose results may be on their way at a time: of the one in use, and of two ahead."""


@dataclass(eq=False, slots=True)
class _Tensor:
    """One tensor of a result, as it lies in host memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    slots: Slots


@dataclass(eq=False, slots=True)
class _Result:
    tensors: list[_Tensor] = field(default_factory=list)
    sent: Mark = None
    """Behind the copies down."""
    usable: bool = True
    """Whether it was copied, nobody changed it meanwhile, and nobody has had it."""
    here: tuple[Tensor, ...] | None = None
    """What comes back."""
    arrival: Mark = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


class KeptOnHost:
    """Of one stream.

    Args:
        store: of blocks.
        device_bytes: for tensors on their way, in either direction.
        host_bytes: that were reserved.
    """

    def __init__(
        self, store: HostStore, mover: PageMover, device: torch.device, device_bytes: int, host_bytes: int
    ) -> None:
        assert store.record_bytes == BLOCK_BYTES
        self._store, self._mover, self._device, self._most_bytes = store, mover, device, device_bytes
        self.leaving: deque[tuple[_Result, list[Tensor], list[int]]] = deque()
        """What is being copied down, and versions; the oldest first."""
        self.coming: dict[int, _Result] = {}
        """What was brought and not asked for, by identity."""
        self.host_bytes = host_bytes
        self.device_bytes = 0
        """Of both."""

    def send(self, result: tuple[Tensor, ...]) -> _Result:
        """Copy a result down. Where host memory runs out it is lost: it can be made again."""
        sent = _Result()
        whole = [tensor if _is_whole(tensor) else tensor.contiguous() for tensor in result]
        try:
            for tensor in whole:
                num_bytes = tensor.numel() * tensor.element_size()
                slots = self._slots(num_bytes)
                sent.tensors.append(_Tensor(tensor.shape, tensor.stride(), tensor.dtype, num_bytes, slots))
        except HostMemoryError:
            self.free(sent)
            return _Result(usable=False)
        # Held before it is copied, whatever becomes of the step.
        self.leaving.append((sent, whole, [tensor._version for tensor in whole]))
        self.device_bytes += sent.num_bytes
        now = self._mover.now()
        for tensor, kept in zip(whole, sent.tensors, strict=True):
            for offset, address, size in self._runs(kept):
                sent.sent = self._mover.download(
                    _number(tensor.data_ptr() + offset), _number(address), size, after=(now,)
                )
        while self.device_bytes > self._most_bytes:
            self._let_go()
        return sent

    def settle(self) -> None:
        """Everything has been sent."""
        while self.leaving:
            self._let_go()

    def bring(self, result: _Result) -> None:
        """Begin to copy a result up."""
        here = [
            torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device=self._device)
            for kept in result.tensors
        ]
        result.here = tuple(here)
        self.coming[id(result)] = result
        self.device_bytes += result.num_bytes
        marks = (result.sent, self._mover.now())  # what lay in this memory before has been computed with
        for tensor, kept in zip(here, result.tensors, strict=True):
            for offset, address, size in self._runs(kept):
                result.arrival = self._mover.upload(
                    _number(address), _number(tensor.data_ptr() + offset), size, after=marks
                )

    def has_room(self, result: _Result) -> bool:
        """Whether a result may be brought ahead of its use."""
        return not self.coming or self.device_bytes + result.num_bytes <= self._most_bytes

    def arrived(self, result: _Result) -> tuple[Tensor, ...]:
        """A result that was brought, for what is computed from now on."""
        here = result.here
        assert here is not None
        self._mover.wait((result.arrival,))
        result.here = None
        del self.coming[id(result)]
        self.device_bytes -= result.num_bytes
        return here

    def free(self, result: _Result) -> None:
        """Nobody will ask for it."""
        if result.here is not None:
            self.arrived(result)
        for kept in result.tensors:
            if kept.slots.size:
                self._store.free(kept.slots)
        result.tensors.clear()

    def _let_go(self) -> None:
        """Of the oldest that is being copied: its memory may be used again behind the copy."""
        result, tensors, versions = self.leaving.popleft()
        self._mover.wait((result.sent,))
        result.usable = versions == [tensor._version for tensor in tensors]
        self.device_bytes -= result.num_bytes

    def _slots(self, num_bytes: int) -> Slots:
        return self._store.allocate(-(-num_bytes // BLOCK_BYTES)) if num_bytes else np.empty(0, np.int64)

    def _runs(self, kept: _Tensor) -> Iterator[tuple[int, int, int]]:
        """The pieces in which a tensor lies: bytes before it, address and bytes of each."""
        if not kept.slots.size:
            return
        addresses = self._store.addresses(kept.slots)
        firsts = np.flatnonzero(np.diff(addresses, prepend=-1) != BLOCK_BYTES).tolist()
        for first, end in zip(firsts, [*firsts[1:], len(addresses)], strict=True):
            offset = first * BLOCK_BYTES
            yield offset, int(addresses[first]), min(end * BLOCK_BYTES, kept.num_bytes) - offset


class ChunkOnHost:
    """Results of one chunk.

    Args:
        keys: whose results these are.
    """

    def __init__(self, keys: Collection[Hashable], host: KeptOnHost) -> None:
        self.keys = frozenset(keys)
        self.returns = False
        """Whether the recompute has begun."""
        self._host = host
        self._results: list[_Result] = []
        """In the order in which they came, and will be asked for."""
        self._by_key: dict[Hashable, deque[_Result]] = {}
        self._next = 0
        """Results before this one were brought."""

    def send(self, key: Hashable, result: tuple[Tensor, ...]) -> None:
        """Copy a result down."""
        self._results.append(self._host.send(result))
        self._by_key.setdefault(key, deque()).append(self._results[-1])

    def bring(self) -> None:
        """Begin to copy up what will be asked for next, as far as there is room."""
        while self._next < len(self._results):
            result = self._results[self._next]
            if result.usable and result.here is None:
                if not self._host.has_room(result):
                    break
                self._host.bring(result)
            self._next += 1

    def take(self, key: Hashable) -> tuple[Tensor, ...] | None:
        """The oldest result under this key, for what is computed from now on; None where there is none."""
        if not self._by_key.get(key):
            return None
        result = self._by_key[key].popleft()
        here = None
        if result.usable:
            if result.here is None:  # asked for in another order
                self._host.bring(result)
            here = self._host.arrived(result)
            result.usable = False
        self.bring()
        return here

    def release(self) -> None:
        """Nobody will ask for the rest."""
        for result in self._results:
            self._host.free(result)


def _is_whole(tensor: Tensor) -> bool:
    """Whether its numbers fill a piece of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _number(value: int) -> npt.NDArray[np.int64]:
    return np.array([value], np.int64)
