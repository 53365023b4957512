"""What a step keeps between its passes: where its pages lie, and what is kept of the forward sweep, by what is free."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from oomb_accel.foresight import Foresight
from oomb_accel.integrations.agreement import is_partitioned
from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.banner import say
from oomb_accel.integrations.host_remedy import remedy_for
from oomb_accel.integrations.stream import Stream
from oomb_accel.integrations.support import compute_dtype, gathered_bytes, whole_numel
from oomb_accel.keep import KeptChunks, ResultKind, free_bytes, on_their_way, place_results
from oomb_accel.kept_on_host import ChunkOnHost
from oomb_accel.kept_results import HEAD, ChunkResults
from oomb_accel.memory import StreamMemory
from oomb_accel.offload import StreamRecords
from oomb_accel.pages import PagedKVCache, PageRooms, PageShape, divide, working_bytes
from oomb_accel.plan import PageLayout, least_host_bytes, page_demand
from oomb_accel.plan.runs import runs_of
from oomb_accel.plan.sizes import float8_input_bytes, head_gradient_bytes, kept_product_bytes, output_bytes
from oomb_accel.progress import GIB
from oomb_accel.schedule import Chunk, ChunkSchedule
from oomb_accel.setting_text import dtype_name
from oomb_kernels import backward_workspace_bytes

_LONG_IN_MAKING = 8 * GIB


def stream_memory(
    state: Attachment, schedule: ChunkSchedule, rooms: PageRooms | None, device: torch.device, kept: KeptChunks
) -> StreamMemory:
    """An empty memory for one stream. Pages are selected where gradients are enabled: an evaluation is dense, as a
    model is served.

    Args:
        rooms: of `divide_pages`, under the same grad mode; their host memory is there.
    """
    # Stochastic rounding draws by runs of pages that have a gradient: wherever pages lie, the same ones must have one.
    tell_pages = rooms is not None or state.page_grad_dtype == torch.bfloat16
    selector = state.selector(tell_pages=tell_pages) if torch.is_grad_enabled() else None
    shape = state.page_shape(sparse=selector is not None)
    records = foresight = None
    if rooms is not None:
        places = (*kept.on_device.items(), *kept.on_host.items())
        skipped = frozenset(index for index, keys in places if 0 in keys)
        foresight = Foresight(shape, schedule, selector, span_pages=state.span_pages, skipped=skipped)
        records = StreamRecords(state.offload, shape, schedule, rooms, foresight, device)
    on_host = None
    if kept.on_host:
        _say_what_is_made(state, state.offload.made_with(kept.host_bytes))
        on_host = state.offload.kept_on_host(kept.host_bytes, kept.staging_bytes, device)
    results = {
        index: ChunkResults(
            kept.on_device.get(index, ()),
            ChunkOnHost(kept.on_host[index], on_host) if on_host is not None and index in kept.on_host else None,
        )
        for index in {*kept.on_device, *kept.on_host}
    }
    return StreamMemory(
        PagedKVCache(shape, schedule, device, records),
        selector,
        results=results,
        on_host=on_host,
        foresight=foresight,
        rooms=rooms,
    )


def kept_chunks(
    state: Attachment, stream: Stream, device: torch.device, *, head: nn.Linear | None, keep_last_graph: bool
) -> KeptChunks:
    """What is kept, by setting and free memory. While pages have to leave the device, it has none to spare; on the host
    results have what pages leave, see `divide_pages`.

    Args:
        head: where its gradient can be kept.
    """
    wanted, dtype = state.config.keep_outputs, compute_dtype(state.base, device)
    if wanted is False or not torch.is_grad_enabled():
        return KeptChunks()
    rooms, chunks = stream.rooms, _run_again(stream.schedule, keep_last_graph)
    if not chunks:  # before memory is looked at, which takes the host a millisecond
        return KeptChunks()
    kinds, attention = _result_kinds(state, head, dtype), _attention_kind(state, dtype)
    wanted_bytes = 0
    if wanted is True:
        wanted_bytes = sum(attention.device_bytes(chunk) for chunk in chunks)
        kinds.remove(attention)
    found = KeptChunks()
    if rooms is None:
        spare = _spare_bytes(state, stream, device) - wanted_bytes
        found = place_results(kinds, chunks, spare, _host_spare_bytes(state, device))
    elif rooms.results_bytes:
        on_host = _host_spare_bytes(state, device) - _made_for(state, rooms, device)
        found = place_results(kinds, chunks, rooms.results_bytes, on_host)
    if wanted is True:
        everything = {chunk.index: [*attention.keys, *found.on_device.get(chunk.index, ())] for chunk in chunks}
        found = replace(found, on_device=everything)
    return found


def _result_kinds(state: Attachment, head: nn.Linear | None, dtype: torch.dtype) -> list[ResultKind]:
    """What can be kept; what saves most for its bytes first."""
    kinds = [_attention_kind(state, dtype)]
    if head is not None:
        kinds.insert(0, ResultKind((HEAD,), head_gradient_bytes(head.in_features, dtype.itemsize)))
    # A hook might change an output unseen: of writing to its data, as of a kernel's, a tensor does not tell.
    unwatched = (tuple(end for end in ends if not end._forward_hooks) for ends in state.block_ends)
    kinds += [ResultKind(ends, sum(_product_bytes(end, dtype) for end in ends)) for ends in unwatched if ends]
    return kinds


def _attention_kind(state: Attachment, dtype: torch.dtype) -> ResultKind:
    return ResultKind(tuple(range(state.facts.num_layers)), _output_bytes(state, dtype))


def divide_pages(
    state: Attachment, schedule: ChunkSchedule, device: torch.device, trained: Sequence[nn.Parameter]
) -> PageRooms | None:
    """How pages are divided between device and host; None where all of them stay on the device. Needs no other rank,
    and nothing is made yet.

    Args:
        trained: what gets gradients.

    Raises:
        ValueError: pages fit neither on the device nor in host memory, or a setting asks for more than there is.
    """
    left, outputs = _bytes_for_pages(state, schedule, device, trained)
    rooms = _divided(state, schedule, device, left, outputs)
    if rooms is None:
        return None

    def remedy(enough: Sequence[str]) -> str:
        def has_room(other: ChunkSchedule) -> bool:
            found = _divided(state, other, device, *_bytes_for_pages(state, other, device, trained))
            return found is None or _has_host_room(state, found, device)

        return remedy_for(state, schedule, device, has_room, enough)

    state.offload.check(rooms.host_bytes, _largest_record(state, device), remedy)
    if not torch.is_grad_enabled():
        return rooms
    results = _bytes_on_their_way(state, schedule, device, compute_dtype(state.base, device), rooms)
    with suppress(ValueError):  # pages come first
        tighter = _divided(state, schedule, device, left - results, outputs) if results else None
        if tighter is not None and _has_host_room(state, tighter, device):
            return replace(tighter, results_bytes=results)
    return rooms


def _divided(
    state: Attachment, schedule: ChunkSchedule, device: torch.device, device_bytes: int, outputs_bytes: int
) -> PageRooms | None:
    """The same, whatever host memory there is.

    Args:
        device_bytes, outputs_bytes: see `_bytes_for_pages`.

    Raises:
        ValueError: the device has no room for what layers need at once.
    """
    trains, shape, dtype = torch.is_grad_enabled(), _shape_now(state), compute_dtype(state.base, device)
    needs = state.pass_needs()
    rooms = divide(shape, schedule, dtype, needs, device_bytes, with_gradients=trains, outputs_bytes=outputs_bytes)
    if rooms is not None and trains and shape.sparse_layers:
        living = _living_host_bytes(state, schedule, shape, rooms, dtype)
        rooms = replace(rooms, host_bytes=min(rooms.host_bytes, living))
    return rooms


def _shape_now(state: Attachment) -> PageShape:
    """Of the pages of a step under this grad mode."""
    return state.page_shape(sparse=torch.is_grad_enabled() and bool(state.sparse_layers))


def _has_host_room(state: Attachment, rooms: PageRooms, device: torch.device) -> bool:
    return state.offload.has_room(rooms.host_bytes, _largest_record(state, device))


def reserve_host_memory(state: Attachment, rooms: PageRooms, device: torch.device) -> None:
    """Have the host memory made that pages need. Needs no other rank.

    Args:
        rooms: of `divide_pages`, under the same grad mode.

    Raises:
        ValueError: memory that was there when pages were divided is not there any more, or is refused.
    """
    record_bytes = _largest_record(state, device)
    _say_what_is_made(state, state.offload.check(rooms.host_bytes, record_bytes))
    state.offload.reserve(rooms.host_bytes, record_bytes, device)


def _say_what_is_made(state: Attachment, num_bytes: int) -> None:
    """Where it takes long: a machine just started made 2.3 GiB per second, others 11 to 30.

    Args:
        num_bytes: host memory that there will be.
    """
    missing = num_bytes - state.offload.host_bytes()["page_memory"]
    if missing >= _LONG_IN_MAKING:
        say(state, f"oomb_accel: making {missing / GIB:.3g} GiB of host memory; the step begins when it is there")


def _made_for(state: Attachment, rooms: PageRooms, device: torch.device) -> int:
    """Host memory that is made for these pages."""
    return state.offload.made_for(rooms.host_bytes, _largest_record(state, device))


def _living_host_bytes(
    state: Attachment, schedule: ChunkSchedule, shape: PageShape, rooms: PageRooms, dtype: torch.dtype
) -> int:
    """Host memory for what exists at one moment, with lists at random: gradients of selected pages come into being one
    by one."""
    values, gradients = rooms.all_bytes["values"], rooms.all_bytes["gradients"]
    if rooms.values is not None:
        values = shape.slot_bytes(shape.value_dtype(dtype)) * sum(rooms.values.quotas)
    if rooms.gradients is not None:
        gradients = shape.slot_bytes(shape.grad_dtype) * sum(rooms.gradients.quotas)
    return least_host_bytes(page_demand(_layout(state, shape, dtype), runs_of(schedule)), values, gradients)


def _layout(state: Attachment, shape: PageShape, dtype: torch.dtype) -> PageLayout:
    """The pages as the planner sees them.

    Args:
        dtype: that attention computes in.
    """
    config = state.config
    return PageLayout(
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        windows=shape.windows,
        sparse_layers=shape.sparse_layers,
        value_dtype=config.page_dtype if shape.float8 else dtype_name(dtype),
        grad_dtype=dtype_name(shape.grad_dtype),
        compute_dtype=dtype_name(dtype),
        page_tokens=shape.page_tokens,
        span_tokens=config.span_tokens,
        top_k=config.top_k,
        q_block=config.q_block,
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
        page_budget=config.page_budget,
    )


def _bytes_for_pages(
    state: Attachment, schedule: ChunkSchedule, device: torch.device, trained: Sequence[nn.Parameter]
) -> tuple[int, int]:
    """Device memory that pages may take, and that of kept outputs which have their room before them. Looking what is
    free takes the host a millisecond.

    Raises:
        ValueError: a setting that is more than what is free.
    """
    dtype = compute_dtype(state.base, device)
    outputs = _bytes_before_pages(state, schedule, dtype)
    return _bytes_with_outputs(state, schedule, device, dtype, trained) - outputs, outputs


def _bytes_with_outputs(
    state: Attachment,
    schedule: ChunkSchedule,
    device: torch.device,
    dtype: torch.dtype,
    trained: Sequence[nn.Parameter],
) -> int:
    """Device memory for both together."""
    config, shape = state.config, _shape_now(state)
    if config.device_pages_gib != "auto":
        asked, free = int(config.device_pages_gib * GIB), free_bytes(device)
        if min(asked, shape.num_bytes(schedule, dtype)) > free:
            fits = free - _other_bytes(state, schedule, dtype, trained)
            remedy = "Free memory on the device, or set chunk_tokens lower."
            if fits > 0:  # three digits, and not above it
                remedy = f"Set device_pages_gib={0.995 * fits / GIB:.3g} or less, or 'auto'."
            raise ValueError(
                "device_pages_gib is more than the device has free.\n"
                f"  Got device_pages_gib={config.device_pages_gib:g}; {max(0, free) / GIB:.3g} GiB are free.\n"
                f"  {remedy}"
            )
        return asked
    if config.offload is False:
        return sys.maxsize
    if config.offload is True:
        return working_bytes(shape, schedule, dtype, state.pass_needs())
    return free_bytes(device) - _other_bytes(state, schedule, dtype, trained)


def _bytes_before_pages(state: Attachment, schedule: ChunkSchedule, dtype: torch.dtype) -> int:
    """Of attention outputs that are kept whatever is free: the rest is for pages, unless settings say how much is."""
    config = state.config
    divides = config.offload == "auto" and config.device_pages_gib == "auto"
    if config.keep_outputs is not True or not divides or not torch.is_grad_enabled():
        return 0
    again = _run_again(schedule, config.keep_last_graph and not is_partitioned(state.model))
    return sum(chunk.num_tokens for chunk in again) * _output_bytes(state, dtype)


def _bytes_on_their_way(
    state: Attachment, schedule: ChunkSchedule, device: torch.device, dtype: torch.dtype, rooms: PageRooms
) -> int:
    """Device memory that results need which are kept on the host beside pages; 0 where none are."""
    if state.config.keep_outputs is False or _host_spare_bytes(state, device) <= _made_for(state, rooms, device):
        return 0
    kinds = _result_kinds(state, None, dtype)
    return on_their_way(kinds[1:] if state.config.keep_outputs is True else kinds, schedule.chunks)


def _run_again(schedule: ChunkSchedule, keep_last_graph: bool) -> Sequence[Chunk]:
    """Chunks that the backward sweep runs again: where the last one's graph is kept, it holds its own."""
    return schedule.chunks[:-1] if keep_last_graph else schedule.chunks


def _largest_record(state: Attachment, device: torch.device) -> int:
    """Bytes of one page of one KV head, of values or of gradients."""
    shape, dtype = state.page_shape(), compute_dtype(state.base, device)
    return max(shape.slot_bytes(shape.value_dtype(dtype)), shape.slot_bytes(shape.grad_dtype))


def _output_bytes(state: Attachment, dtype: torch.dtype) -> int:
    """Attention output and LSE of a token, over all layers."""
    facts = state.facts
    return facts.num_layers * output_bytes(facts.num_heads, facts.head_dim, dtype.itemsize)


def _other_bytes(
    state: Attachment, schedule: ChunkSchedule, dtype: torch.dtype, trained: Sequence[nn.Parameter]
) -> int:
    """What a step takes on the device beside pages and kept outputs: activations, gradients, recorded lists, and what
    the backward of selected pages works in.

    Args:
        dtype: what the step computes in, see `compute_dtype`.
        trained: what gets gradients.
    """
    longest = max((chunk.num_tokens for chunk in schedule.chunks), default=0)
    activations = int(longest * state.meter.bytes_per_token)
    # Logits are among the activations; they are gone when the backward of the last layer begins.
    vocabulary = state.base.config.get_text_config().vocab_size
    logits = min(longest, schedule.num_targets) * vocabulary * dtype.itemsize
    workspace = max(0, _sparse_workspace(state, schedule, dtype) - logits)
    # Sums in fp32, what is returned, and what it is added to.
    gradients = sum(whole_numel(p) * (4 + 2 * p.element_size()) for p in trained)
    lists = state.list_bytes(len(schedule.chunks))
    in_float8 = 0 if state.float8_base is None else float8_input_bytes(longest, *state.float8_base.widths)
    return activations + workspace + gradients + gathered_bytes(state.model) + lists + in_float8


def _sparse_workspace(state: Attachment, schedule: ChunkSchedule, dtype: torch.dtype) -> int:
    """Bytes that the backward of selected pages works in; 0 where no chunk selects."""
    config, facts = state.config, state.facts
    layout = _layout(state, state.page_shape(sparse=True), state.base.dtype)
    selecting = [chunk.num_tokens for chunk in schedule.chunks if layout.selects(len(chunk.past_pages))]
    if not selecting or not state.sparse_layers or not torch.is_grad_enabled():
        return 0
    return backward_workspace_bytes(
        num_heads=facts.num_heads,
        num_groups=facts.num_kv_heads,
        num_tokens=max(selecting),
        block_tokens=config.q_block,
        room=config.top_k,
        page_tokens=config.page_tokens,
        head_dim=facts.head_dim,
        itemsize=dtype.itemsize,
    )


def _product_bytes(layer: Any, dtype: torch.dtype) -> int:
    """Of what a linear layer with LoRA keeps of a token."""
    return kept_product_bytes(layer.out_features, max(layer.r.values(), default=0), dtype.itemsize)


def _spare_bytes(state: Attachment, stream: Stream, device: torch.device) -> int:
    """Device memory that a step leaves free whose pages all stay there."""
    dtype = compute_dtype(state.base, device)
    pages = state.page_shape(sparse=bool(state.sparse_layers)).num_bytes(stream.schedule, dtype)
    return free_bytes(device) - pages - _other_bytes(state, stream.schedule, dtype, stream.trained)


def _host_spare_bytes(state: Attachment, device: torch.device) -> int:
    """Host memory for results, where they may lie there. Without a GPU it is the device's own."""
    return state.offload.spare_bytes() if device.type == "cuda" and state.config.offload == "auto" else 0
