"""Ranks agree on how many passes a step has, where passes contain collectives.

Under ZeRO 3 every pass gathers parameters, so ranks whose documents have fewer chunks run dummy passes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from oomb_accel.integrations.parameters import parameters_in_parts


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO 3 (or ``zero.Init``) holds the model's parameters in parts."""
    return bool(parameters_in_parts(model))


def num_ranks() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ranks_on_host() -> int:
    """Processes of this run on this machine, as far as its launcher tells: torchrun and Accelerate, DeepSpeed, MPI."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    told = [int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()]
    return max(told, default=1)


def agree_on_passes(num_passes: int, device: torch.device) -> int:
    """The largest number of passes that any rank needs; at least one. Collective.

    Raises:
        RuntimeError: another rank has refused its batch.
    """
    passes, refused = _largest((num_passes, 0), device)
    _check_refused(refused)
    return max(1, passes)


def agree_on_least(first: int, second: int, device: torch.device) -> tuple[int, int]:
    """The smaller one of each of two positive numbers, over all ranks. Collective.

    Raises:
        RuntimeError: another rank has refused its batch.
    """
    least = _largest((-first, -second), device)
    _check_refused(max(0, *least))
    return -least[0], -least[1]


def refuse_passes(device: torch.device) -> None:
    """Take part in the agreement of a step that this rank cannot run, so that the others do not wait for it."""
    _largest((0, 1), device)


@contextmanager
def refusing_together(device: torch.device) -> Iterator[None]:
    """Where something fails inside, this rank takes part in the agreement that comes next, so that the others hear of
    it. Nothing inside may be collective."""
    try:
        yield
    except Exception:
        refuse_passes(device)
        raise


def _check_refused(refused: int) -> None:
    if refused:
        raise RuntimeError(
            "Another rank has refused its batch, so this step cannot be run.\n"
            "  Its own message says why.\n  Look for it in the output of the other processes."
        )


def _largest(values: tuple[int, int], device: torch.device) -> tuple[int, int]:
    if num_ranks() == 1:
        return values
    agreed = torch.tensor(values, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    first, second = agreed.tolist()
    return first, second
