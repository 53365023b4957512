"""How pages are divided between device and host before a step, for the engine and for the estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from oomb_accel.plan.pages import PageDemand
from oomb_accel.plan.sizes import GIB

_LEAST_GRADIENT_SHARE = 0.25
"""Of the device memory for pages, where values do not fit as a whole."""
_SHORTEST_CHUNK = 256
"""Tokens; nobody is told to take less."""


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
) -> MemoryPlan:
    """Divide pages between device and host.

    Everything stays on the device where it fits. Otherwise see `pool_shares`.

    Args:
        free_device_bytes: what pages, activations and logits may take on the device.
        activation_bytes: estimated or measured, of one chunk with its logits.
        host_budget_bytes: what may be pinned.
        chunk_tokens: of the step, for the message.
        offload: False refuses what does not fit on the device; otherwise host memory takes it.
        device_pages_bytes: a limit on both pools together; None takes what is free.
        zero_stage: for the message.

    Returns:
        With ``fits`` False, the pools that the device would have to hold at least.
    """
    whole = demand.value_bytes + demand.gradient_bytes
    least = demand.least_value_bytes + demand.least_gradient_bytes
    room = free_device_bytes - activation_bytes - demand.resident_bytes
    if device_pages_bytes is not None:
        room = min(room, device_pages_bytes)
    if whole <= room:
        return MemoryPlan(demand.value_bytes, demand.gradient_bytes, 0, True, "")
    if offload is False:
        return MemoryPlan(demand.value_bytes, demand.gradient_bytes, 0, False, _without_offload(demand, room))
    if least > room:
        chunk = _Chunk(chunk_tokens, activation_bytes)
        refusal = _too_small(demand, room, chunk, host_budget_bytes, device_pages_bytes, zero_stage)
        return MemoryPlan(demand.least_value_bytes, demand.least_gradient_bytes, 0, False, refusal)
    values, gradients, must = _divide(demand, room)
    if must > host_budget_bytes:
        return MemoryPlan(values, gradients, must, False, _too_little_host(demand, must, host_budget_bytes, room))
    return MemoryPlan(values, gradients, must, True, "")


def _divide(demand: PageDemand, room: int) -> tuple[int, int, int]:
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
    keep. What it holds for the layers at work only comes and goes.

    Args:
        kept_value_bytes, kept_gradient_bytes: that stay on the device between uses.
    """
    values = demand.value_bytes - kept_value_bytes
    return max(1, values, demand.living_bytes - kept_value_bytes - kept_gradient_bytes)


def _without_offload(demand: PageDemand, room: int) -> str:
    whole = demand.value_bytes + demand.gradient_bytes
    return (
        "The pages of this document do not fit on the GPU.\n"
        f"  They take {_gib(whole)} ({_gib(demand.value_bytes)} of K and V, {_gib(demand.gradient_bytes)} of "
        f"gradients); {_gib(max(0, room))} are free beside one chunk.\n"
        "  Set offload='auto', which keeps the rest in host memory."
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    tokens: int
    activation_bytes: int
    """With its logits; in proportion to the tokens."""


def _too_small(
    demand: PageDemand,
    room: int,
    chunk: _Chunk,
    host_budget_bytes: int,
    device_pages_bytes: int | None,
    zero_stage: int | None,
) -> str:
    least = demand.least_value_bytes + demand.least_gradient_bytes
    if device_pages_bytes is not None and device_pages_bytes == room:
        remedy = f"Set device_pages_gib={math.ceil(10 * least / GIB) / 10} or more, or 'auto'."
    else:
        remedy = _smaller_chunk(demand, room, chunk, host_budget_bytes, zero_stage)
    beside = f"{_gib(chunk.activation_bytes)} of activations and logits"
    if demand.resident_bytes:
        beside += f" and {_gib(demand.resident_bytes)} of page lists and scales"
    return (
        "The GPU has no room for one chunk and the pages that it needs at once.\n"
        f"  These pages take {_gib(least)}; {_gib(max(0, room))} are free beside {beside}.\n"
        f"  {remedy}"
    )


def _smaller_chunk(demand: PageDemand, room: int, chunk: _Chunk, host_budget_bytes: int, zero_stage: int | None) -> str:
    """The largest chunk, in a power of two, that leaves the device enough for pages, and the host too; where none does
    both, one for the device, and what else is short."""
    least = demand.least_value_bytes + demand.least_gradient_bytes
    share = (chunk.activation_bytes + room - least) / max(1, chunk.activation_bytes)
    tokens = largest = 1 << max(0, int(share * chunk.tokens)).bit_length() >> 1
    if largest < _SHORTEST_CHUNK:
        among = "more GPUs" if zero_stage == 3 else "GPUs (ZeRO 3)"
        return f"Even short chunks would not fit: divide the model among {among}, or take a larger GPU."
    while tokens >= _SHORTEST_CHUNK:
        freed = chunk.activation_bytes * (chunk.tokens - tokens) // chunk.tokens
        *_, must = _divide(demand, room + freed)
        if must <= host_budget_bytes:
            return f"Set chunk_tokens={tokens}."
        tokens //= 2
    return (
        f"Set chunk_tokens={largest}; for the host, of which {_gib(host_budget_bytes)} may be used, {_halving(demand)}."
    )


def _too_little_host(demand: PageDemand, must: int, budget: int, room: int) -> str:
    remedy = _halving(demand)
    return (
        "Host memory is too small for the pages of this document.\n"
        f"  {_gib(must)} are needed beside {_gib(room)} on the GPU; {_gib(budget)} may be used.\n"
        f"  {remedy[0].upper()}{remedy[1:]}; host memory is short by {_gib(must - budget)}."
    )


def _halving(demand: PageDemand) -> str:
    """What makes pages take less of the host."""
    if demand.grad_dtype == "float32":
        return "set page_grad_dtype='bfloat16', which halves the gradients"
    if demand.value_dtype != "float8":
        return "set page_dtype='float8', which halves K and V"
    if demand.most_bytes is not None:
        return "set page_budget lower, so that fewer pages have gradients at one moment"
    return "shorten the document, or give chunks fewer tokens and pages more of the GPU"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
