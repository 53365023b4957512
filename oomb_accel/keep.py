"""Which results of the forward sweep fit in memory, on the device or on the host, so that the recompute can skip what
makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from oomb_accel.host import host_limits
from oomb_accel.kept_results import HEAD, Key
from oomb_accel.plan.places import ALIGNED_BYTES, LAYERS_ON_THEIR_WAY, Run, place
from oomb_accel.plan.rates import DEVICE_RESERVE
from oomb_accel.schedule import Chunk


@dataclass(slots=True)
class ActivationMeter:
    """Bytes of activations that one token of a chunk holds between its forward and its backward.

    Starts from an estimate and takes the largest measured value from the first backward sweep on.
    """

    bytes_per_token: float
    longest: int = 0
    """Tokens of the longest pass measured. Shorter ones are not counted: what a pass holds whatever its length, such as
    parameters that ZeRO 3 has gathered, would be laid on few tokens."""

    @contextmanager
    def measure(self, num_tokens: int, device: torch.device) -> Iterator[None]:
        """Measure what the graph made inside holds (CUDA only: the CPU allocator does not tell)."""
        if device.type != "cuda" or num_tokens < self.longest:
            yield
            return
        before = torch.cuda.memory_allocated(device)
        yield
        per_token = max(0.0, (torch.cuda.memory_allocated(device) - before) / num_tokens)
        self.bytes_per_token = max(self.bytes_per_token, per_token) if num_tokens == self.longest else per_token
        self.longest = num_tokens


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors can take on the device: free ones and those that torch's allocator has cached."""
    if device.type != "cuda":
        return host_limits().available_bytes
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached - int(DEVICE_RESERVE * total)


@dataclass(frozen=True, slots=True)
class ResultKind:
    """Results that are kept together."""

    keys: tuple[Key, ...]
    """Of what makes them, see `ChunkResults`; two tensors each."""
    bytes_per_token: int
    """Of all of them."""

    def device_bytes(self, chunk: Chunk) -> int:
        return chunk.num_tokens * self.bytes_per_token

    def host_bytes(self, chunk: Chunk) -> int:
        """At most, with gaps."""
        return self.device_bytes(chunk) + 2 * len(self.keys) * ALIGNED_BYTES


@dataclass(frozen=True, slots=True)
class KeptChunks:
    """Results that are kept from the forward sweep, so that the backward sweep need not make them again: by chunk, the
    keys of what makes them."""

    on_device: Mapping[int, Sequence[Key]] = field(default_factory=dict)
    on_host: Mapping[int, Sequence[Key]] = field(default_factory=dict)
    host_bytes: int = 0
    staging_bytes: int = 0
    """Device memory for results on their way to the host or back."""


def on_their_way(kinds: Sequence[ResultKind], chunks: Sequence[Chunk]) -> int:
    """Device memory for results on their way to the host and back."""
    of_layer = sum(kind.bytes_per_token // len(kind.keys) for kind in kinds if HEAD not in kind.keys)
    return LAYERS_ON_THEIR_WAY * of_layer * max((chunk.num_tokens for chunk in chunks), default=0)


def place_results(
    kinds: Sequence[ResultKind], chunks: Sequence[Chunk], device_bytes: int, host_bytes: int
) -> KeptChunks:
    """What is kept where, see `plan.places`.

    Args:
        kinds: those that save most for their bytes first: they have their room first.
        chunks: that run again, in stream order.
        device_bytes: free for this; may be negative.
        host_bytes: likewise.
    """
    staging = on_their_way(kinds, chunks)
    runs = [[Run(1, kind.device_bytes(chunk), kind.host_bytes(chunk)) for chunk in chunks] for kind in kinds]
    placed = place(runs, device_bytes, host_bytes, staging)
    on_device, on_host = dict[int, list[Key]](), dict[int, list[Key]]()
    for kind, places in zip(kinds, placed.kinds, strict=True):
        for by_chunk, numbers in ((on_device, places.on_device), (on_host, places.on_host)):
            for number in numbers:
                by_chunk.setdefault(chunks[number].index, []).extend(kind.keys)
    return KeptChunks(on_device, on_host, sum(places.host_bytes for places in placed.kinds), placed.staging_bytes)
