"""Where pages go, before a step: what the device keeps and what the host takes, or why there is no room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oomb_accel.plan.pages import PageDemand
from oomb_accel.plan.pools import HostRoom, divide
from oomb_accel.plan.remedies import (
    Chunk,
    Remedy,
    beyond_the_device,
    less_than_needed,
    too_little_host,
    too_small,
    without_offload,
)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where pages go."""

    device_value_bytes: int
    """Size of the device's pool for K and V."""
    device_gradient_bytes: int
    """Size of the device's pool for page gradients."""
    host_bytes: int
    """What is reserved in host memory before the step; 0 where the device holds everything. A record that comes back
    keeps its place there while nobody else needs it, so all of it may be in use."""
    fits: bool
    message: str
    """What does not fit, in three lines; empty where everything does."""
    remedy: Remedy | None = None
    """The third of these lines. Whether it is enough is said of the pages alone."""

    @property
    def offloads(self) -> bool:
        return self.host_bytes > 0


def plan_memory(
    demand: PageDemand,
    *,
    free_device_bytes: int,
    activation_bytes: int,
    host_budget_bytes: int,
    chunk_tokens: int,
    offload: bool | Literal["auto"] = "auto",
    device_pages_bytes: int | None = None,
    zero_stage: int | None = None,
    outputs_bytes: int = 0,
    host_memory_bytes: int | None = None,
    record_bytes: int = 0,
) -> MemoryPlan:
    """Divide pages between device and host.

    Everything stays on the device where it fits and may. Otherwise see `pool_shares`.

    Args:
        free_device_bytes: what pages, activations and logits may take on the device.
        activation_bytes: estimated or measured, of one chunk with its logits.
        host_budget_bytes: what the host has for pages.
        chunk_tokens: of the step, for the message.
        offload: False refuses what does not fit on the device; otherwise host memory takes it. With True it also takes
            what would fit, but for what layers need at once.
        device_pages_bytes: a limit on both pools together, whatever ``offload`` says; None takes what is free.
        zero_stage: for the message.
        outputs_bytes: of attention outputs that have their room before pages.
        host_memory_bytes: a limit on what may be pinned; None takes what the host has.
        record_bytes: of the largest record; host memory is made in slabs of them. 0 counts without slabs.

    Returns:
        With ``fits`` False, the pools that the device would have to hold at least.
    """
    host = HostRoom(host_budget_bytes, host_memory_bytes, record_bytes)
    whole = demand.value_bytes + demand.gradient_bytes
    least = demand.least_value_bytes + demand.least_gradient_bytes
    free = free_device_bytes - activation_bytes - outputs_bytes - demand.resident_bytes
    limit = device_pages_bytes
    room = free if limit is None else min(free, limit)
    if offload is True and limit is None:
        room = min(room, least)
    if whole <= room:
        return MemoryPlan(demand.value_bytes, demand.gradient_bytes, 0, True, "")
    if offload is False:
        return _refused(demand.value_bytes, demand.gradient_bytes, 0, *without_offload(demand, room, host))
    if least > free:
        chunk = Chunk(chunk_tokens, activation_bytes, outputs_bytes)
        refusal = too_small(demand, free, chunk, host, limit, zero_stage)
        return _refused(demand.least_value_bytes, demand.least_gradient_bytes, 0, *refusal)
    if least > room:
        refusal = less_than_needed(demand, room, free, host)
        return _refused(demand.least_value_bytes, demand.least_gradient_bytes, 0, *refusal)
    values, gradients, must = divide(demand, room)
    if limit is not None and min(limit, whole) > free:
        return _refused(values, gradients, must, *beyond_the_device(demand, limit, free, host))
    if not host.holds(must):
        refusal = too_little_host(demand, room, free, host, limit, outputs_bytes)
        return _refused(values, gradients, must, *refusal)
    return MemoryPlan(values, gradients, must, True, "")


def _refused(values: int, gradients: int, host: int, what: str, remedy: Remedy) -> MemoryPlan:
    return MemoryPlan(values, gradients, host, False, f"{what}\n{remedy.line()}", remedy)
