"""What a step keeps between its passes: where its pages lie, and which attention outputs are kept, by what is free."""

from __future__ import annotations

import sys

import torch

from oomb_accel.foresight import Foresight
from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.support import compute_dtype, gathered_bytes, whole_numel
from oomb_accel.keep import chunks_to_keep, free_bytes
from oomb_accel.memory import Outputs, StreamMemory
from oomb_accel.offload import StreamRecords
from oomb_accel.pages import PagedKVCache, PageRooms, PageShape, PassNeeds, divide, working_bytes
from oomb_accel.progress import GIB
from oomb_accel.schedule import ChunkSchedule


def stream_memory(
    state: Attachment, schedule: ChunkSchedule, device: torch.device, *, keep_last_graph: bool
) -> StreamMemory:
    """An empty memory for one stream. Pages are selected where gradients are enabled: an evaluation is dense, as a
    model is served.

    Raises:
        ValueError: as `check_pages`.
    """
    selector = state.selector() if torch.is_grad_enabled() else None
    shape = state.page_shape(sparse=selector is not None)
    rooms = _rooms(state, schedule, device)
    kept = _kept_chunks(state, schedule, shape, device, keep_last_graph=keep_last_graph, offloads=rooms is not None)
    outputs: dict[int, Outputs] = {index: {} for index in kept}
    if rooms is None:
        return StreamMemory(PagedKVCache(shape, schedule, device), selector, outputs)
    state.offload.reserve(rooms.host_bytes, _largest_record(state, shape, device), device)
    foresight = Foresight(shape, schedule, selector, span_pages=state.span_pages, skipped=kept)
    records = StreamRecords(state.offload, shape, schedule, rooms, foresight, device)
    return StreamMemory(PagedKVCache(shape, schedule, device, records), selector, outputs, foresight, rooms)


def check_pages(state: Attachment, schedule: ChunkSchedule, device: torch.device) -> None:
    """Refuse a stream whose pages have no place. Needs no other rank, and nothing is made yet.

    Raises:
        ValueError: pages fit neither on the device nor in host memory, or a setting asks for more than there is.
    """
    rooms = _rooms(state, schedule, device)
    if rooms is not None:
        shape = state.page_shape(sparse=torch.is_grad_enabled() and bool(state.sparse_layers))
        state.offload.check(rooms.host_bytes, _largest_record(state, shape, device))


def _rooms(state: Attachment, schedule: ChunkSchedule, device: torch.device) -> PageRooms | None:
    """How pages are divided between device and host; None where all of them stay on the device."""
    trains = torch.is_grad_enabled()
    shape, needs = state.page_shape(sparse=trains and bool(state.sparse_layers)), state.pass_needs()
    dtype = compute_dtype(state.base, device)
    room = _page_bytes(state, schedule, device, shape, needs)
    return divide(shape, schedule, dtype, needs, room, with_gradients=trains)


def _page_bytes(
    state: Attachment, schedule: ChunkSchedule, device: torch.device, shape: PageShape, needs: PassNeeds
) -> int:
    """Device memory that pages may take.

    Raises:
        ValueError: a setting that is more than what is free.
    """
    config, dtype = state.config, compute_dtype(state.base, device)
    if config.device_pages_gib != "auto":
        asked, free = int(config.device_pages_gib * GIB), free_bytes(device)
        if min(asked, shape.num_bytes(schedule, dtype)) > free:
            raise ValueError(
                "device_pages_gib is more than the device has free.\n"
                f"  Got device_pages_gib={config.device_pages_gib:g}; {max(0, free) / GIB:.3g} GiB are free.\n"
                f"  Set device_pages_gib={max(0, free - _other_bytes(state, schedule)) / GIB:.3g} or less, or 'auto'."
            )
        return asked
    if config.offload is False:
        return sys.maxsize
    if config.offload is True:
        return working_bytes(shape, schedule, dtype, needs)
    kept = sum(chunk.num_tokens for chunk in schedule.chunks) if config.keep_outputs is True else 0
    return free_bytes(device) - _other_bytes(state, schedule) - kept * _output_bytes(state, dtype)


def _largest_record(state: Attachment, shape: PageShape, device: torch.device) -> int:
    dtype = compute_dtype(state.base, device)
    return max(shape.slot_bytes(shape.value_dtype(dtype)), shape.slot_bytes(shape.grad_dtype))


def _output_bytes(state: Attachment, dtype: torch.dtype) -> int:
    """Attention output and LSE of a token, over all layers."""
    facts = state.facts
    return facts.num_layers * facts.num_heads * (facts.head_dim * dtype.itemsize + 4)


def _other_bytes(state: Attachment, schedule: ChunkSchedule) -> int:
    """What a step takes on the device beside pages and kept outputs: activations, gradients, recorded lists."""
    longest = max((chunk.num_tokens for chunk in schedule.chunks), default=0)
    activations = int(longest * state.meter.bytes_per_token)
    # Sums in fp32, what is returned, and what it is added to.
    gradients = sum(whole_numel(p) * (4 + 2 * p.element_size()) for p in state.model.parameters() if p.requires_grad)
    return activations + gradients + gathered_bytes(state.model) + state.list_bytes(len(schedule.chunks))


def _kept_chunks(
    state: Attachment,
    schedule: ChunkSchedule,
    shape: PageShape,
    device: torch.device,
    *,
    keep_last_graph: bool,
    offloads: bool,
) -> frozenset[int]:
    """Chunks whose attention outputs are kept for the backward sweep, by setting and free memory. While pages have to
    leave the device, it has none to spare."""
    config, chunks = state.config, schedule.chunks
    if keep_last_graph:
        chunks = chunks[:-1]  # the last one's graph holds its outputs
    if config.keep_outputs is False or not torch.is_grad_enabled():
        return frozenset()
    if config.keep_outputs is True:
        return frozenset(chunk.index for chunk in chunks)
    if offloads:
        return frozenset()
    dtype = compute_dtype(state.base, device)
    pages = shape.num_bytes(schedule, dtype)
    return chunks_to_keep(
        chunks, _output_bytes(state, dtype), free_bytes(device) - pages - _other_bytes(state, schedule)
    )
