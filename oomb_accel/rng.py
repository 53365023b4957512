"""Random generator states, so that a recompute repeats its forward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """Generator states at the start of a chunk's pass, so that its recompute draws the same dropout masks."""

    cpu: Tensor
    device: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Inside, generators may be set and drawn from; afterwards they are as they were."""
    context: AbstractContextManager[None] = torch.random.fork_rng([device] if device.type == "cuda" else [])
    return context
