"""Sizes of the pools in which pages lie, on the device and on the host: for the engine and for the estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oomb_accel.plan.pages import PageDemand
from oomb_accel.plan.sizes import in_slabs, slab_bytes_for

_LEAST_GRADIENT_SHARE = 0.25
"""Of the device memory for pages, where values do not fit as a whole."""


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host memory that pages may take."""

    there_bytes: int
    """What the machine has for them."""
    limit_bytes: int | None = None
    """`host_memory_gib`; None where it does not say."""
    record_bytes: int = 0
    """Of the largest record: host memory is made in slabs that hold it. 0 counts without slabs."""

    @property
    def may_take(self) -> int:
        return self.there_bytes if self.limit_bytes is None else min(self.there_bytes, self.limit_bytes)

    def made_for(self, num_bytes: int) -> int:
        """What is made for so many bytes of pages."""
        return in_slabs(num_bytes, slab_bytes_for(num_bytes, self.record_bytes)) if self.record_bytes else num_bytes

    def holds(self, num_bytes: int) -> bool:
        return self.made_for(num_bytes) <= self.may_take


def divide(demand: PageDemand, room: int) -> tuple[int, int, int]:
    """Bytes of both pools of the device, and those that the host must hold, where not all pages fit into ``room``."""
    values, gradients = pool_shares(
        room,
        value_bytes=demand.value_bytes,
        gradient_bytes=demand.gradient_bytes,
        least_value_bytes=demand.least_value_bytes,
        least_gradient_bytes=demand.least_gradient_bytes,
    )
    must = least_host_bytes(
        demand,
        demand.value_bytes if values == demand.value_bytes else values - demand.least_value_bytes,
        demand.gradient_bytes if gradients == demand.gradient_bytes else gradients - demand.least_gradient_bytes,
    )
    return values, gradients, must


def pool_shares(
    room: int, *, value_bytes: int, gradient_bytes: int, least_value_bytes: int, least_gradient_bytes: int
) -> tuple[int, int]:
    """Sizes of the device's pools for values and gradients, within what each must have and can use.

    Values come first, since the forward sweep can only hide fetches that it knows ahead of time; but where they do not
    fit as a whole, gradients get a quarter.

    Args:
        room: for both pools; at least what both must have.
    """
    values = room - least_gradient_bytes
    if value_bytes > values:
        values = max(least_value_bytes, min(values, int(room * (1 - _LEAST_GRADIENT_SHARE))))
    values = min(value_bytes, max(values, room - gradient_bytes))
    return values, min(gradient_bytes, room - values)


def least_host_bytes(demand: PageDemand, kept_value_bytes: int, kept_gradient_bytes: int) -> int:
    """Host memory without which pages have no place: for all that exists at one moment and that the device does not
    keep. What it holds for the layers at work only comes and goes. Where gradients come into being while chunks go,
    the device keeps less by as much as the last chunk had there.

    Args:
        kept_value_bytes, kept_gradient_bytes: that stay on the device between uses.
    """
    whole = demand.value_bytes + demand.gradient_bytes
    living = min(whole, demand.living_bytes + demand.chunk_bytes)
    least = max(1, demand.value_bytes - kept_value_bytes, living - kept_value_bytes - kept_gradient_bytes)
    if demand.most_gradient_bytes is None:
        return least
    # Where values are gone the device has no more room for gradients than before.
    gradients = min(demand.gradient_bytes, demand.most_gradient_bytes + demand.chunk_bytes)
    # Nor have layers that select nothing, for what others leave unused whose gradients come one by one.
    beyond = math.ceil(demand.dense_share * (demand.chunk_bytes - kept_gradient_bytes))
    of_dense = (demand.most_dense_gradient_bytes + beyond, demand.most_dense_bytes + beyond - kept_value_bytes)
    return max(least, gradients - kept_gradient_bytes, *of_dense)


def has_room(demand: PageDemand, room: int, host: HostRoom) -> bool:
    """Whether device and host together hold the pages."""
    if demand.value_bytes + demand.gradient_bytes <= room:
        return True
    least = demand.least_value_bytes + demand.least_gradient_bytes
    return least <= room and host.holds(divide(demand, room)[-1])
