"""How many attention outputs of the forward sweep fit in memory, so that the recompute can skip attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oomb_accel.host import host_limits
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


def chunks_to_keep(chunks: Sequence[Chunk], bytes_per_token: int, budget_bytes: float) -> frozenset[int]:
    """The latest of these chunks whose outputs fit the budget. They have the longest past, so they save the most.

    Args:
        chunks: in stream order.
        bytes_per_token: of attention outputs and LSE, over all layers.
        budget_bytes: may be negative: then nothing is kept.

    Returns:
        Indices of the chunks.
    """
    kept: set[int] = set()
    for chunk in reversed(chunks):
        budget_bytes -= chunk.num_tokens * bytes_per_token
        if budget_bytes < 0:
            break
        kept.add(chunk.index)
    return frozenset(kept)
