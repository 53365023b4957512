"""Results of the forward sweep that a chunk's recompute takes instead of making them again.

A key names what makes a result: a layer's number its attention, a linear layer its product, `HEAD` the head. It may
make several for one chunk; they are taken in the order in which they came, each by the call that makes it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from oomb_accel.kept_on_host import ChunkOnHost

Key: TypeAlias = Hashable
HEAD: Key = "head"


class Product(NamedTuple):
    """What a linear layer with LoRA has computed."""

    out: Tensor
    """``[..., O]``"""
    xa: Tensor
    """``x A^T``, ``[T, R]``."""


class HeadGradient(NamedTuple):
    """Log-probabilities of targets, and their gradients with respect to what the head reads."""

    log_probs_N: Tensor
    """fp32, fp64 for fp64 logits."""
    gradient_ND: Tensor
    """In the dtype of logits."""


class ChunkResults:
    """What is kept of one chunk.

    Args:
        on_device: keys of results that stay on the device.
        on_host: takes the others; None where there are none.
    """

    def __init__(self, on_device: Collection[Key] = (), on_host: ChunkOnHost | None = None) -> None:
        self.on_device, self.on_host = frozenset(on_device), on_host
        self.returns = False
        """Whether the recompute has begun: before it nothing is taken."""
        self._here: dict[Key, deque[tuple[tuple[Tensor, ...], list[int]]]] = {}
        """Results, and the version of each tensor: somebody may change it in place."""
        self._made: dict[Key, int] = {}
        self._asked: dict[Key, int] = {}
        """Calls in the forward sweep and in the recompute: a result is taken by its place among them."""
        self.device_bytes = 0
        """Of results that stay on the device."""

    def keeps(self, key: Key) -> bool:
        """Whether results under this key are kept."""
        return key in self.on_device or (self.on_host is not None and key in self.on_host.keys)

    def put(self, key: Key, *result: Tensor) -> None:
        """Keep a result, if those under this key are. What makes it may be asked again within the recompute: then it
        stays on the device."""
        if not self.keeps(key):
            return
        if not self.returns:
            self._made[key] = self._made.get(key, 0) + 1
        if not self.returns and key not in self.on_device and self.on_host is not None:
            self.on_host.send(key, result)
        else:
            self._here.setdefault(key, deque()).append((result, [tensor._version for tensor in result]))
            self.device_bytes += _num_bytes(result)

    def take(self, key: Key) -> tuple[Tensor, ...] | None:
        """In the recompute the oldest result under this key, which is kept no longer; None where there is none, or
        somebody has changed it."""
        if not self.returns or not self.keeps(key):
            return None
        self._asked[key] = self._asked.get(key, 0) + 1
        if not self._here.get(key):
            return None if self.on_host is None else self.on_host.take(key)
        result, versions = self._here[key].popleft()
        self.device_bytes -= _num_bytes(result)
        return result if versions == [tensor._version for tensor in result] else None

    def uneven_calls(self) -> dict[Key, tuple[int, int]]:
        """Of keys whose results were not asked for as often as they were made, both numbers of calls. Some of their
        results may have been taken for those of other calls."""
        if self._made == self._asked:
            return {}
        calls = {key: (self._made.get(key, 0), self._asked.get(key, 0)) for key in {**self._made, **self._asked}}
        return {key: (made, asked) for key, (made, asked) in calls.items() if made != asked}

    def bring(self, *, recomputes: bool) -> None:
        """Begin to bring from the host what is taken first.

        Args:
            recomputes: whether the recompute begins; otherwise it comes next.
        """
        self.returns = recomputes
        if self.on_host is not None:
            self.on_host.bring()

    def release(self) -> None:
        """The chunk is done with."""
        if self.on_host is not None:
            self.on_host.release()


NOTHING_KEPT = ChunkResults()
"""Of every chunk that keeps nothing: nobody can change it."""


def _num_bytes(result: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in result)
