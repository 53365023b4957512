"""How much device memory values and gradients of pages get, and what each layer keeps there. Numbers only.

Legend: G KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from oomb_accel.pages.shape import PageShape
from oomb_accel.plan.pools import pool_shares
from oomb_accel.schedule import ChunkSchedule

Kind: TypeAlias = Literal["values", "gradients"]

_AHEAD = 3
"""Room for so many layers' needs at once, where there is some to spare: one in use, two on their way."""


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """Device memory of one kind of records, in slots."""

    quotas: tuple[int, ...]
    """Records that each layer keeps between its uses."""
    reserve: int
    """Slots beyond all quotas, for what a layer needs at once."""

    @property
    def num_slots(self) -> int:
        return sum(self.quotas) + self.reserve


@dataclass(frozen=True, slots=True)
class PassNeeds:
    """What one pass over a chunk asks of a layer at once, in pages."""

    chunk_pages: int
    """Of the chunk itself."""
    span_pages: int
    """Per call of a dense layer."""
    listed_pages: int
    """Most distinct pages that one KV head's lists of a chunk can name, sinks and recents."""

    def of_layer(self, shape: PageShape, layer: int) -> int:
        """Records that the layer needs at once."""
        past = self.listed_pages if layer in shape.sparse_layers else self.span_pages
        window = shape.windows[layer]
        if window is not None:
            past = -(-window // shape.page_tokens)
        return shape.num_kv_heads * (self.chunk_pages + past)


@dataclass(frozen=True, slots=True)
class PageRooms:
    """How pages are divided between device and host; None where a kind stays on the device as a whole."""

    values: DeviceRoom | None
    gradients: DeviceRoom | None
    host_bytes: int
    """That host memory must have room for."""
    device_bytes: Mapping[Kind, int]
    """Of the pools of both kinds."""
    all_bytes: Mapping[Kind, int]
    """Of all records of both kinds, wherever they lie."""
    results_bytes: int = 0
    """Device memory that is left to kept results on their way to the host and back."""


def divide(
    shape: PageShape,
    schedule: ChunkSchedule,
    dtype: torch.dtype,
    needs: PassNeeds,
    device_bytes: int,
    *,
    with_gradients: bool = True,
    outputs_bytes: int = 0,
) -> PageRooms | None:
    """Divide pages that are more than the device holds.

    Args:
        dtype: of the model's K and V.
        device_bytes: for everything that a stream keeps in a cache.
        with_gradients: False for an evaluation.
        outputs_bytes: of attention outputs that have been taken off ``device_bytes``, for the message.

    Returns:
        None where all of it fits.

    Raises:
        ValueError: the device has no room for what one pass needs at once.
    """
    counts = [shape.num_records(layer, schedule) for layer in range(shape.num_layers)]
    whole, least = sum(counts), _most_needed(shape, counts, needs)
    dtypes: dict[Kind, torch.dtype] = {"values": shape.value_dtype(dtype), "gradients": shape.grad_dtype}
    sizes = {kind: shape.slot_bytes(stored) for kind, stored in dtypes.items()}
    if not with_gradients:
        sizes["gradients"] = 0
    fixed, means = shape.fixed_bytes(schedule), shape.mean_key_bytes(schedule, dtype)
    room = device_bytes - fixed
    in_pools = whole * sizes["values"] + (whole - shape.num_sink_slots(schedule)) * sizes["gradients"]
    if not whole or in_pools <= room:
        return None

    def at_least(layers: int) -> tuple[int, int]:
        """Bytes of both pools. Mean keys lie where gradients will be."""
        return layers * least * sizes["values"], max(layers * least * sizes["gradients"], means)

    if room < sum(at_least(1)):
        smaller = [
            text
            for text, other in _smaller_pages(shape)
            if with_gradients and _needed_bytes(other, schedule, dtype, needs) <= device_bytes
        ]
        needed = fixed + sum(at_least(1))
        raise ValueError(_too_small(needed, device_bytes, outputs_bytes, smaller, selects=bool(shape.sparse_layers)))
    wanted = at_least(_AHEAD if room >= sum(at_least(_AHEAD)) else 1)
    shares = pool_shares(
        room,
        value_bytes=whole * sizes["values"],
        gradient_bytes=whole * sizes["gradients"],
        least_value_bytes=wanted[0],
        least_gradient_bytes=wanted[1],
    )
    values = _room(counts, least, shares[0] // sizes["values"])
    gradients = _room(counts, least, shares[1] // sizes["gradients"]) if with_gradients else None
    parts: dict[Kind, DeviceRoom | None] = {"values": values, "gradients": gradients}
    host = sum(sizes[kind] * (whole - sum(part.quotas)) for kind, part in parts.items() if part)
    on_device = {kind: sizes[kind] * (part.num_slots if part else whole) for kind, part in parts.items()}
    return PageRooms(values, gradients, host, on_device, {kind: whole * size for kind, size in sizes.items()})


def working_bytes(shape: PageShape, schedule: ChunkSchedule, dtype: torch.dtype, needs: PassNeeds) -> int:
    """Device memory with which pages can be brought ahead of their use, though no layer keeps any."""
    return _needed_bytes(shape, schedule, dtype, needs, _AHEAD)


def _needed_bytes(
    shape: PageShape, schedule: ChunkSchedule, dtype: torch.dtype, needs: PassNeeds, layers: int = 1
) -> int:
    """Device memory for what so many layers need at once, and for what always stays there."""
    counts = [shape.num_records(layer, schedule) for layer in range(shape.num_layers)]
    least = layers * _most_needed(shape, counts, needs)
    gradients = max(least * shape.slot_bytes(shape.grad_dtype), shape.mean_key_bytes(schedule, dtype))
    return shape.fixed_bytes(schedule) + least * shape.slot_bytes(shape.value_dtype(dtype)) + gradients


def _most_needed(shape: PageShape, counts: list[int], needs: PassNeeds) -> int:
    return max(min(needs.of_layer(shape, layer), count) for layer, count in enumerate(counts))


def _room(counts: list[int], least: int, num_slots: int) -> DeviceRoom | None:
    """Slots divided among the layers by the records that they have."""
    whole = sum(counts)
    if whole <= num_slots:
        return None
    reserve = min(_AHEAD * least, num_slots)
    return DeviceRoom(tuple(count * (num_slots - reserve) // whole for count in counts), reserve)


def _smaller_pages(shape: PageShape) -> Iterator[tuple[str, PageShape]]:
    """Settings that are not set already, and pages with them."""
    if shape.grad_dtype == torch.float32:
        yield "page_grad_dtype='bfloat16'", replace(shape, grad_dtype=torch.bfloat16)
    if not shape.float8:
        yield "page_dtype='float8'", replace(shape, float8=True)


def _too_small(needed: int, given: int, outputs: int, smaller: Sequence[str], *, selects: bool) -> str:
    """The refusal.

    Args:
        smaller: settings of which each is enough.
        selects: whether top_k has a part in it.
    """
    gib = 2**30
    wanted, room = needed / gib, max(0, given) / gib
    beside = f" beside {outputs / gib:.3g} GiB of attention outputs" if outputs else ""
    lower = "chunk_tokens, span_tokens and top_k lower" if selects else "chunk_tokens and span_tokens lower"
    remedy = ", ".join([f"device_pages_gib={1.01 * wanted:.3g} where the device has it", *smaller, f"or {lower}"])
    if outputs and needed <= given + outputs:
        remedy = "keep_outputs='auto', which keeps what fits"
    return (
        "The device has too little memory for the pages of one chunk.\n"
        f"  A layer's pages and their gradients need {wanted:.3g} GiB at once; pages may take {room:.3g} GiB{beside}.\n"
        f"  Set {remedy}."
    )
