"""How pages are divided between device and host before a step, for the engine and for the estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from oomb_accel.plan.pages import PageDemand
from oomb_accel.plan.sizes import GIB, size_text

_LEAST_GRADIENT_SHARE = 0.25
"""Of the device memory for pages, where values do not fit as a whole."""
SHORTEST_CHUNK = 256
"""Tokens; nobody is told to take less."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to change, as a message ends with it."""

    text: str
    """The change as a user would write it; a whole sentence where there are no settings."""
    settings: dict[str, Any] = field(default_factory=dict)
    """By the names of a `Job`'s fields."""
    why: str = ""
    enough: bool = True
    """Whether nothing else needs to change."""
    short: str = ""
    """What is short, and by how much."""

    def line(self) -> str:
        if not self.settings:
            return f"  {self.text}"
        short = f"; {self.short}" if self.short else ""
        if self.enough:
            return f"  Set {self.text}{', ' if self.why else ''}{self.why}{short}."
        why = f", {self.why}," if self.why else ""
        return f"  {self.text}{why} {'is' if len(self.settings) == 1 else 'are'} part of it{short}."


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
) -> MemoryPlan:
    """Divide pages between device and host.

    Everything stays on the device where it fits and may. Otherwise see `pool_shares`.

    Args:
        free_device_bytes: what pages, activations and logits may take on the device.
        activation_bytes: estimated or measured, of one chunk with its logits.
        host_budget_bytes: what may be pinned.
        chunk_tokens: of the step, for the message.
        offload: False refuses what does not fit on the device; otherwise host memory takes it. With True it also takes
            what would fit, but for what layers need at once.
        device_pages_bytes: a limit on both pools together, whatever ``offload`` says; None takes what is free.
        zero_stage: for the message.
        outputs_bytes: of attention outputs that have their room before pages.

    Returns:
        With ``fits`` False, the pools that the device would have to hold at least.
    """
    whole = demand.value_bytes + demand.gradient_bytes
    least = demand.least_value_bytes + demand.least_gradient_bytes
    room = free_device_bytes - activation_bytes - outputs_bytes - demand.resident_bytes
    if device_pages_bytes is not None:
        room = min(room, device_pages_bytes)
    most_room = room
    if offload is True and device_pages_bytes is None:
        room = min(room, least)
    if whole <= room:
        return MemoryPlan(demand.value_bytes, demand.gradient_bytes, 0, True, "")
    if offload is False:
        return _refused(
            demand.value_bytes, demand.gradient_bytes, 0, *_without_offload(demand, room, host_budget_bytes)
        )
    if least > room:
        chunk = _Chunk(chunk_tokens, activation_bytes)
        refusal = _too_small(demand, room, chunk, host_budget_bytes, device_pages_bytes, zero_stage, outputs_bytes)
        return _refused(demand.least_value_bytes, demand.least_gradient_bytes, 0, *refusal)
    values, gradients, must = _divide(demand, room)
    if must > host_budget_bytes:
        what, remedy = _too_little_host(demand, must, host_budget_bytes, room)
        if _has_room(demand, most_room, host_budget_bytes):
            remedy = Remedy("offload='auto'", {"offload": "auto"}, "which keeps on the GPU what it has room for")
        if outputs_bytes:
            remedy = _fewer_outputs(demand, room + outputs_bytes, host_budget_bytes)
        return _refused(values, gradients, must, what, remedy)
    return MemoryPlan(values, gradients, must, True, "")


def _refused(values: int, gradients: int, host: int, what: str, remedy: Remedy) -> MemoryPlan:
    return MemoryPlan(values, gradients, host, False, f"{what}\n{remedy.line()}", remedy)


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


def _without_offload(demand: PageDemand, room: int, host_budget_bytes: int) -> tuple[str, Remedy]:
    whole = demand.value_bytes + demand.gradient_bytes
    what = (
        "The pages of this document do not fit on the GPU.\n"
        f"  They take {size_text(whole)} ({size_text(demand.value_bytes)} of K and V, "
        f"{size_text(demand.gradient_bytes)} of gradients); {size_text(room)} are free beside one chunk."
    )
    enough = _has_room(demand, room, host_budget_bytes)
    return what, Remedy("offload='auto'", {"offload": "auto"}, "which keeps the rest in host memory", enough)


def _has_room(demand: PageDemand, room: int, host_budget_bytes: int) -> bool:
    """Whether device and host together hold the pages."""
    if demand.value_bytes + demand.gradient_bytes <= room:
        return True
    least = demand.least_value_bytes + demand.least_gradient_bytes
    return least <= room and _divide(demand, room)[-1] <= host_budget_bytes


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
    outputs_bytes: int,
) -> tuple[str, Remedy]:
    least = demand.least_value_bytes + demand.least_gradient_bytes
    if device_pages_bytes is not None and device_pages_bytes == room:
        gib = math.ceil(10 * least / GIB) / 10
        remedy = Remedy(
            f"device_pages_gib={gib} or more, or 'auto'",
            {"device_pages_bytes": int(gib * GIB)},
            enough=_has_room(demand, int(gib * GIB), host_budget_bytes),
        )
    elif outputs_bytes:
        remedy = _fewer_outputs(demand, room + outputs_bytes, host_budget_bytes)
    else:
        remedy = _smaller_chunk(demand, room, chunk, host_budget_bytes, zero_stage)
    others = {
        "activations and logits": chunk.activation_bytes,
        "attention outputs": outputs_bytes,
        "page lists and scales": demand.resident_bytes,
    }
    beside = " and ".join(f"{size_text(num_bytes)} of {what}" for what, num_bytes in others.items() if num_bytes)
    free = f"{size_text(room)} are free" if room > 0 else "nothing is free"
    return (
        "The GPU has no room for one chunk and the pages that it needs at once.\n"
        f"  These pages take {size_text(least)}; {free} beside {beside}."
    ), remedy


def _fewer_outputs(demand: PageDemand, room: int, host_budget_bytes: int) -> Remedy:
    """Attention outputs of as many chunks as fit beside pages.

    Args:
        room: for pages, when none are kept.
    """
    enough = _has_room(demand, room, host_budget_bytes)
    return Remedy("keep_outputs='auto'", {"keep_outputs": "auto"}, "which keeps what fits", enough)


def _smaller_chunk(
    demand: PageDemand, room: int, chunk: _Chunk, host_budget_bytes: int, zero_stage: int | None
) -> Remedy:
    """The largest chunk, in a power of two, that leaves the device enough for pages, and the host too; or one with
    smaller pages; where none does both, one for the device, and what the host lacks."""
    least = demand.least_value_bytes + demand.least_gradient_bytes
    share = (chunk.activation_bytes + room - least) / max(1, chunk.activation_bytes)
    largest = 1 << max(0, int(share * chunk.tokens)).bit_length() >> 1
    if largest < SHORTEST_CHUNK:
        among = "more GPUs" if zero_stage == 3 else "GPUs (ZeRO 3)"
        return Remedy(f"Even short chunks would not fit: divide the model among {among}, or take a larger GPU.")

    def room_with(tokens: int) -> int:
        return room + chunk.activation_bytes * (chunk.tokens - tokens) // chunk.tokens

    sizes = [largest >> halvings for halvings in range(largest.bit_length()) if largest >> halvings >= SHORTEST_CHUNK]
    smaller = list(_halvings(demand))
    for change, pages in ((None, demand), *smaller):
        for tokens in sizes:
            if _has_room(pages, room_with(tokens), host_budget_bytes):
                return _with_chunk(tokens, change)
    pages = smaller[0][1] if smaller else demand
    lacks = _divide(pages, room_with(largest))[-1] - host_budget_bytes
    short = f"host memory, of which {size_text(host_budget_bytes)} may be used, stays short by {size_text(lacks)}"
    return replace(_with_chunk(largest, smaller[0][0] if smaller else None), enough=False, short=short)


def _with_chunk(tokens: int, change: Remedy | None) -> Remedy:
    chunk = f"chunk_tokens={tokens}"
    if change is None:
        return Remedy(chunk, {"chunk_tokens": tokens})
    return Remedy(f"{chunk} and {change.text}", {"chunk_tokens": tokens, **change.settings})


def _too_little_host(demand: PageDemand, must: int, budget: int, room: int) -> tuple[str, Remedy]:
    what = (
        "Host memory is too small for the pages of this document.\n"
        f"  {size_text(must)} are needed beside {size_text(room)} on the GPU; {size_text(budget)} may be used."
    )
    short = f"host memory is short by {size_text(must - budget)}"
    smaller = list(_halvings(demand))
    for change, pages in smaller:
        if _has_room(pages, room, budget):
            return what, replace(change, short=short)
    if smaller:
        return what, replace(smaller[0][0], short=short, enough=False)
    kept = min(demand.value_bytes, max(0, room - demand.least_gradient_bytes))
    if demand.most_bytes is not None and demand.value_bytes - kept <= budget:
        advice = "Set page_budget lower, so that fewer pages have gradients at one moment"
    else:
        advice = "Shorten the document, or give chunks fewer tokens and pages more of the GPU"
    return what, Remedy(f"{advice}; {short}.")


def _halvings(demand: PageDemand) -> Iterator[tuple[Remedy, PageDemand]]:
    """What makes pages smaller, and these pages. Of the bytes that exist at one moment no more than those of the other
    kind stay as they are."""
    values, gradients, most = demand.value_bytes, demand.gradient_bytes, demand.most_bytes
    most_gradients, most_dense = demand.most_gradient_bytes, demand.most_dense_bytes
    if demand.grad_dtype == "float32":
        yield (
            Remedy("page_grad_dtype='bfloat16'", {"page_grad_dtype": "bfloat16"}, "which halves the gradients"),
            replace(
                demand,
                gradient_bytes=gradients // 2,
                least_gradient_bytes=max(demand.least_gradient_bytes // 2, demand.mean_key_bytes),
                most_bytes=None if most is None else min(most, (most + values) // 2),
                most_gradient_bytes=None if most_gradients is None else most_gradients // 2,
                most_dense_gradient_bytes=demand.most_dense_gradient_bytes // 2,
                most_dense_bytes=min(most_dense, (most_dense + values) // 2),
            ),
        )
    if demand.value_dtype != "float8" and demand.may_be_float8:
        yield (
            Remedy("page_dtype='float8'", {"page_dtype": "float8"}, "which halves K and V"),
            replace(
                demand,
                value_bytes=values // 2,
                least_value_bytes=demand.least_value_bytes // 2,
                most_bytes=None if most is None else min(most, (most + gradients) // 2),
                most_dense_bytes=min(most_dense, (most_dense + demand.most_dense_gradient_bytes) // 2),
            ),
        )
