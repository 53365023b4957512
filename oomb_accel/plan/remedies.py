"""What to change where pages have no room: each remedy is tried, and says whether it is enough."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from oomb_accel.plan.pages import PageDemand
from oomb_accel.plan.pools import HostRoom, divide, has_room
from oomb_accel.plan.sizes import GIB, gib_text, size_text

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


def without_offload(demand: PageDemand, room: int, host: HostRoom) -> tuple[str, Remedy]:
    """Pages that the device has no room for and the host may not take."""
    whole = demand.value_bytes + demand.gradient_bytes
    what = (
        "The pages of this document do not fit on the GPU.\n"
        f"  They take {size_text(whole)} ({size_text(demand.value_bytes)} of K and V, "
        f"{size_text(demand.gradient_bytes)} of gradients); {size_text(room)} are free beside one chunk."
    )
    enough = has_room(demand, room, host)
    return what, Remedy("offload='auto'", {"offload": "auto"}, "which keeps the rest in host memory", enough)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk, and what is kept of others before pages have their room."""

    tokens: int
    activation_bytes: int
    """With its logits; in proportion to the tokens."""
    outputs_bytes: int


def too_small(
    demand: PageDemand, free: int, chunk: Chunk, host: HostRoom, limit: int | None, zero_stage: int | None
) -> tuple[str, Remedy]:
    """A device without room for what layers need at once, whatever the settings say of pages.

    Args:
        free: device memory for pages.
        limit: that a setting puts on it.
    """
    least = demand.least_value_bytes + demand.least_gradient_bytes
    if chunk.outputs_bytes:
        remedy = _fewer_outputs(demand, free + chunk.outputs_bytes, host)
    else:
        remedy = _smaller_chunk(demand, free, chunk, host, zero_stage)
    if limit is not None and limit < least and remedy.settings:
        text = f"{remedy.text} and {_ALL_THAT_IS_FREE.text}"
        remedy = replace(remedy, text=text, settings=remedy.settings | _ALL_THAT_IS_FREE.settings)
    others = {
        "activations and logits": chunk.activation_bytes,
        "attention outputs": chunk.outputs_bytes,
        "page lists and scales": demand.resident_bytes,
    }
    beside = " and ".join(f"{size_text(num_bytes)} of {what}" for what, num_bytes in others.items() if num_bytes)
    there = f"{size_text(free)} are free" if free > 0 else "nothing is free"
    return (
        "The GPU has no room for one chunk and the pages that it needs at once.\n"
        f"  These pages take {size_text(least)}; {there} beside {beside}."
    ), remedy


def less_than_needed(demand: PageDemand, limit: int, free: int, host: HostRoom) -> tuple[str, Remedy]:
    """A `device_pages_gib` below what layers need at once, on a device that has it."""
    least = demand.least_value_bytes + demand.least_gradient_bytes
    return (
        "device_pages_gib is less than the pages that a chunk needs at once.\n"
        f"  These pages take {size_text(least)}; device_pages_gib={limit / GIB:.3g}, and {size_text(free)} are free "
        "for pages."
    ), _more_device_pages(demand, free, host)


def beyond_the_device(demand: PageDemand, limit: int, free: int, host: HostRoom) -> tuple[str, Remedy]:
    """A `device_pages_gib` above what the device has free for pages."""
    most = gib_text(free)
    remedy = Remedy(f"device_pages_gib={most}, or 'auto'", {"device_pages_bytes": int(float(most) * GIB)})
    if not has_room(demand, remedy.settings["device_pages_bytes"], host):
        remedy = _of_all_that_is_free(demand, free, host)
    return (
        "device_pages_gib is more than the GPU has free for pages.\n"
        f"  Got device_pages_gib={limit / GIB:.4g}; {size_text(free)} are free beside one chunk."
    ), remedy


_ALL_THAT_IS_FREE = Remedy("device_pages_gib='auto'", {"device_pages_bytes": None})


def _of_all_that_is_free(demand: PageDemand, free: int, host: HostRoom) -> Remedy:
    """What the device has free for pages, and what the host lacks then."""
    if has_room(demand, free, host):
        return _ALL_THAT_IS_FREE
    lacks = host.made_for(divide(demand, free)[-1]) - host.may_take
    return replace(_ALL_THAT_IS_FREE, enough=False, short=f"host memory is short by {size_text(lacks)} then")


def _more_device_pages(demand: PageDemand, free: int, host: HostRoom) -> Remedy:
    """The least `device_pages_gib`, in tenths of a GiB, with which device and host have room."""
    least = demand.least_value_bytes + demand.least_gradient_bytes
    low, high = math.ceil(10 * least / GIB) - 1, math.floor(10 * free / GIB)

    def is_enough(tenths: int) -> bool:
        return has_room(demand, int(tenths / 10 * GIB), host)

    if high <= low or not is_enough(high):
        return _of_all_that_is_free(demand, free, host)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return Remedy(f"device_pages_gib={high / 10} or more, or 'auto'", {"device_pages_bytes": int(high / 10 * GIB)})


def _fewer_outputs(demand: PageDemand, room: int, host: HostRoom) -> Remedy:
    """Attention outputs of as many chunks as fit beside pages.

    Args:
        room: for pages, when none are kept.
    """
    enough = has_room(demand, room, host)
    return Remedy("keep_outputs='auto'", {"keep_outputs": "auto"}, "which keeps what fits", enough)


def _smaller_chunk(demand: PageDemand, room: int, chunk: Chunk, host: HostRoom, zero_stage: int | None) -> Remedy:
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
            if has_room(pages, room_with(tokens), host):
                return _with_chunk(tokens, change)
    pages = smaller[0][1] if smaller else demand
    lacks = host.made_for(divide(pages, room_with(largest))[-1]) - host.may_take
    short = f"host memory, of which {size_text(host.may_take)} may be used, stays short by {size_text(lacks)}"
    return replace(_with_chunk(largest, smaller[0][0] if smaller else None), enough=False, short=short)


def _with_chunk(tokens: int, change: Remedy | None) -> Remedy:
    chunk = f"chunk_tokens={tokens}"
    if change is None:
        return Remedy(chunk, {"chunk_tokens": tokens})
    return Remedy(f"{chunk} and {change.text}", {"chunk_tokens": tokens, **change.settings})


def too_little_host(
    demand: PageDemand, room: int, free: int, host: HostRoom, limit: int | None, outputs_bytes: int
) -> tuple[str, Remedy]:
    """Pages that the device does not keep and the host has no room for. What only gives back what a setting has taken
    comes first.

    Args:
        room: device memory that pages may take; of ``free`` bytes, and at most ``limit`` where a setting says so.
    """
    needed, may_take = host.made_for(divide(demand, room)[-1]), host.may_take
    of_setting = " (host_memory_gib)" if host.limit_bytes == may_take else ""
    what = (
        "Host memory is too small for the pages of this document.\n"
        f"  {size_text(needed)} are needed beside {size_text(room)} on the GPU; {size_text(may_take)} may be used"
        f"{of_setting}."
    )
    if outputs_bytes:
        return what, _fewer_outputs(demand, room + outputs_bytes, host)
    more = _more_host_memory(needed, host)
    if more is not None:
        return what, more
    if has_room(demand, free, host):
        if limit is not None:
            return what, _more_device_pages(demand, free, host)
        return what, Remedy("offload='auto'", {"offload": "auto"}, "which keeps on the GPU what it has room for")
    short = f"host memory is short by {size_text(needed - may_take)}"
    smaller = list(_halvings(demand))
    for change, pages in smaller:
        if has_room(pages, room, host):
            return what, replace(change, short=short)
    if smaller:
        return what, replace(smaller[0][0], short=short, enough=False)
    kept = min(demand.value_bytes, max(0, room - demand.least_gradient_bytes))
    if demand.most_bytes is not None and demand.value_bytes - kept <= may_take:
        advice = "Set page_budget lower, so that fewer pages have gradients at one moment"
    else:
        advice = "Shorten the document, or give chunks fewer tokens and pages more of the GPU"
    return what, Remedy(f"{advice}; {short}.")


def _more_host_memory(needed: int, host: HostRoom) -> Remedy | None:
    """The least `host_memory_gib` that is enough, in tenths of a GiB; None where the host has not so much, or no
    setting has taken any."""
    least = math.ceil(10 * needed / GIB) / 10
    if host.limit_bytes is None or int(least * GIB) > host.there_bytes:
        return None
    return Remedy(f"host_memory_gib={least} or more, or 'auto'", {"host_memory_bytes": int(least * GIB)})


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
