"""Results of the forward sweep in host memory: copied down behind the layers that make them, and up again ahead of the
recompute's.

The recompute asks in the order in which the forward sweep gave. A tensor on its way down is held until its copy has
passed, one that comes is held until it is asked for; of both together the device has no more than a few layers' at a
time. The computing stream waits for copies, the host does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oomb_accel.host import HostMemoryError, HostStack, Piece
from oomb_accel.pages import Mark, PageMover


@dataclass(eq=False, slots=True)
class _Tensor:
    """One tensor of a result, as it lies in host memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    pieces: list[Piece]


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
        device_bytes: for tensors on their way, in either direction.
        host_bytes: that were reserved.
    """

    def __init__(
        self, stack: HostStack, mover: PageMover, device: torch.device, device_bytes: int, host_bytes: int
    ) -> None:
        self._stack, self._mover, self._device, self._most_bytes = stack, mover, device, device_bytes
        self.leaving: deque[tuple[_Result, list[Tensor], list[int]]] = deque()
        """What is being copied down, and versions; the oldest first."""
        self.coming: dict[int, _Result] = {}
        """What was brought and not asked for, by identity."""
        self.host_bytes = host_bytes
        self.is_lost = False
        """Whether all of it has given way."""
        self.device_bytes = 0
        """Of both."""

    @property
    def taken_bytes(self) -> int:
        """Host memory of slabs that results lie in."""
        return self._stack.num_bytes

    def send(self, result: tuple[Tensor, ...]) -> _Result:
        """Copy a result down. Where host memory runs out it is lost: it can be made again."""
        sent = _Result()
        whole = [tensor if _is_whole(tensor) else tensor.contiguous() for tensor in result]
        start = self._stack.end
        if start + sum(tensor.nbytes for tensor in whole) > self.host_bytes:
            return _Result(usable=False)
        try:
            for tensor in whole:
                num_bytes = tensor.numel() * tensor.element_size()
                pieces = self._stack.take(num_bytes)
                sent.tensors.append(_Tensor(tensor.shape, tensor.stride(), tensor.dtype, num_bytes, pieces))
        except HostMemoryError:
            self._stack.cut(start)
            return _Result(usable=False)
        # Held before it is copied, whatever becomes of the step.
        self.leaving.append((sent, whole, [tensor._version for tensor in whole]))
        self.device_bytes += sent.num_bytes
        now = self._mover.now()
        for tensor, kept in zip(whole, sent.tensors, strict=True):
            for here, there in _copies(tensor, kept):
                sent.sent = self._mover.download(_number(here), _number(there.address), there.num_bytes, (now,))
        while self.device_bytes > self._most_bytes:
            self._let_go()
        return sent

    def settle(self) -> None:
        """Everything has been sent."""
        while self.leaving:
            self._let_go()

    def bring(self, result: _Result) -> None:
        """Begin to copy a result up, when everything has been sent."""
        here = [
            torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device=self._device)
            for kept in result.tensors
        ]
        result.here = tuple(here)
        self.coming[id(result)] = result
        self.device_bytes += result.num_bytes
        now = self._mover.now()  # behind what lay in this memory before, and behind all copies down, see `settle`
        for tensor, kept in zip(here, result.tensors, strict=True):
            for place, there in _copies(tensor, kept):
                result.arrival = self._mover.upload(_number(there.address), _number(place), there.num_bytes, (now,))

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

    def mark(self) -> int:
        """Where what is sent from now on will begin."""
        return self._stack.end

    def free(self, results: Iterable[_Result], mark: int) -> None:
        """Forget these results, which are all that was sent behind the mark."""
        for result in results:
            if result.here is not None:
                self.arrived(result)
            result.usable = False
        self._stack.cut(min(mark, self._stack.end))

    def give_way(self) -> None:
        """Lose everything, now and from now on: its host memory is wanted for what cannot be made again. As in `free`
        what comes next in that memory comes behind the copies."""
        self.settle()
        for result in list(self.coming.values()):
            self.arrived(result)
        self.is_lost, self.host_bytes = True, 0
        self._stack.close()

    def _let_go(self) -> None:
        """Of the oldest that is being copied: its memory may be used again behind the copy."""
        result, tensors, versions = self.leaving.popleft()
        self._mover.wait((result.sent,))
        result.usable = versions == [tensor._version for tensor in tensors]
        self.device_bytes -= result.num_bytes


class ChunkOnHost:
    """Results of one chunk.

    Args:
        keys: whose results these are.
    """

    def __init__(self, keys: Collection[Hashable], host: KeptOnHost) -> None:
        self.keys = frozenset(keys)
        self._host = host
        self._results: list[_Result] = []
        """In the order in which they came, and will be asked for."""
        self._by_key: dict[Hashable, deque[_Result]] = {}
        self._next = 0
        """Results before this one were brought."""
        self._start: int | None = None

    def send(self, key: Hashable, result: tuple[Tensor, ...]) -> None:
        """Copy a result down."""
        self._start = self._host.mark() if self._start is None else self._start
        self._results.append(self._host.send(result))
        self._by_key.setdefault(key, deque()).append(self._results[-1])

    def bring(self) -> None:
        """Begin to copy up what will be asked for next, as far as there is room."""
        while self._next < len(self._results):
            result = self._results[self._next]
            if self._is_there(result) and result.here is None:
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
        if self._is_there(result):
            if result.here is None:  # asked for in another order
                self._host.bring(result)
            here = self._host.arrived(result)
            result.usable = False
        self.bring()
        return here

    def release(self) -> None:
        """Nobody will ask for the rest."""
        if self._start is not None:
            self._host.free(self._results, self._start)

    def _is_there(self, result: _Result) -> bool:
        return result.usable and not self._host.is_lost


def _copies(tensor: Tensor, kept: _Tensor) -> Iterator[tuple[int, Piece]]:
    """Addresses in the tensor, and where on the host what begins there lies."""
    address = tensor.data_ptr()
    for piece in kept.pieces:
        yield address, piece
        address += piece.num_bytes


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
