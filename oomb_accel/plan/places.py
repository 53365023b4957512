"""Which results of the forward sweep are kept, and where: one rule for the engine and for the estimate. No torch.

The latest chunks, which the backward sweep comes to first, stay on the device; those before them go to the host; what
is left is made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LAYERS_ON_THEIR_WAY = 3
"""Whose results lie on the device while they go to the host or come back: of the layer in use, and of two ahead."""
ALIGNED_BYTES = 512
"""Of which each tensor's place on the host is a multiple."""
_SHARE_OF_HOST = 2
"""One part in so many of the host memory that a process may have is for kept results, unless a setting says how much
that is: they only save time, and others may want the memory."""


class Run(NamedTuple):
    """Chunks in a row, each with as many bytes."""

    num_chunks: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Places:
    """Of one kind of result; indices of chunks."""

    on_device: range = range(0)
    on_host: range = range(0)
    """Those before them."""
    device_bytes: int = 0
    host_bytes: int = 0

    @property
    def chunks(self) -> range:
        """All that are kept."""
        return range(self.on_host.start, self.on_device.stop) if self.on_host else self.on_device


class Placed(NamedTuple):
    """All kinds."""

    kinds: list[Places]
    staging_bytes: int
    """Device memory that is set aside for results on their way; 0 where none go to the host."""


def place(kinds: Sequence[Sequence[Run]], device_bytes: int, host_bytes: int, staging_bytes: int) -> Placed:
    """What is kept where.

    Args:
        kinds: runs of all chunks that run again, in stream order; those kinds first that save most for their bytes:
            they have their room first.
        device_bytes, host_bytes: free for this; may be negative.
        staging_bytes: what results on their way take on the device.
    """
    everything = sum(run.num_chunks * run.device_bytes for runs in kinds for run in runs)
    if host_bytes <= 0 or everything <= device_bytes or device_bytes < staging_bytes:
        staging_bytes = host_bytes = 0
    device_bytes -= staging_bytes
    found = []
    for runs in kinds:
        end = sum(run.num_chunks for run in runs)
        first = end - _latest([(run.num_chunks, run.device_bytes) for run in runs], device_bytes)
        here = range(first, end)
        others = list(_before(runs, first))
        there = range(first - _latest([(run.num_chunks, run.host_bytes) for run in others], host_bytes), first)
        on_device = sum(run.num_chunks * run.device_bytes for run in _behind(runs, first))
        on_host = sum(run.num_chunks * run.host_bytes for run in _behind(others, there.start))
        device_bytes, host_bytes = device_bytes - on_device, host_bytes - on_host
        found.append(Places(here, there, on_device, on_host))
    return Placed(found, staging_bytes if any(places.on_host for places in found) else 0)


def host_bytes_for_results(host_bytes: int, *, is_asked_for: bool) -> int:
    """What kept results may take of the host memory that pages could have.

    Args:
        is_asked_for: whether a setting says how much that is.
    """
    return host_bytes if is_asked_for else host_bytes // _SHARE_OF_HOST


def _latest(sizes: Sequence[tuple[int, int]], budget_bytes: int) -> int:
    """How many of the last of so many chunks with so many bytes each fit."""
    fitting = 0
    for count, size in reversed(sizes):
        fit = max(0, min(count, budget_bytes // max(1, size)))
        fitting, budget_bytes = fitting + fit, budget_bytes - fit * size
        if fit < count:
            break
    return fitting


def _before(runs: Sequence[Run], index: int) -> list[Run]:
    """The chunks before this one."""
    found = []
    for run in runs:
        count = min(run.num_chunks, index)
        index -= count
        if count:
            found.append(run._replace(num_chunks=count))
    return found


def _behind(runs: Sequence[Run], index: int) -> list[Run]:
    """The chunks from this one on."""
    whole = sum(run.num_chunks for run in runs)
    return _before(runs[::-1], whole - index)
