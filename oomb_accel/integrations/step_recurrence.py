"""The recurrence of one step of a model that is switched on: it says where the pages lie, and what was short when
memory runs out in one of its sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oomb_accel.chunk_pass import Sweep
from oomb_accel.gradients import StepGradients
from oomb_accel.host import host_limits
from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.banner import say
from oomb_accel.integrations.shortage import Shortage, explained, is_shortage
from oomb_accel.integrations.support import compute_dtype
from oomb_accel.keep import free_bytes
from oomb_accel.memory import StreamMemory
from oomb_accel.pages import Kind, PageShape, working_bytes
from oomb_accel.progress import GIB
from oomb_accel.recurrence import ChunkRecurrence
from oomb_accel.schedule import ChunkSchedule


class StepRecurrence(ChunkRecurrence):
    """Both sweeps over one stream.

    Args:
        state: of the model.
        rest: as for `ChunkRecurrence`.
    """

    def __init__(self, state: Attachment, *rest: Any) -> None:
        super().__init__(*rest)
        self._state = state
        self._chunks_done = 0
        if torch.is_grad_enabled():
            _say_where_pages_lie(state, self._shape, self._schedule, self._memory, self._device)

    def ordinary_step(self, embeds_1TD: Tensor | None) -> Tensor:
        with self._explained("forward"):
            return super().ordinary_step(embeds_1TD)

    def forward_sweep(self, embeds_1TD: Tensor | None, *, train: bool = False) -> Tensor:
        with self._explained("forward"):
            return super().forward_sweep(embeds_1TD, train=train)

    def backward_sweep(self, grad_N: Tensor, gradients: StepGradients, embeds_1TD: Tensor | None) -> Tensor | None:
        with self._explained("backward"):
            return super().backward_sweep(grad_N, gradients, embeds_1TD)

    @property
    def _shape(self) -> PageShape:
        return self._state.page_shape(sparse=self._memory.selector is not None)

    def _report(self, sweep: Sweep, done: int, tokens_done: int, with_backward: bool = True) -> None:
        self._chunks_done = done
        super()._report(sweep, done, tokens_done, with_backward)

    @contextmanager
    def _explained(self, sweep: Sweep) -> Iterator[None]:
        """Memory that runs out inside is an error with numbers."""
        self._chunks_done = 0
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            raise explained(error, self._shortage(sweep)) from error

    def _shortage(self, sweep: Sweep) -> Shortage:
        state, schedule, memory, shape = self._state, self._schedule, self._memory, self._shape
        dtype = compute_dtype(state.base, self._device)
        fixed = shape.fixed_bytes(schedule)
        whole = _all_bytes(shape, schedule, memory, dtype)
        planned = whole if memory.rooms is None else memory.rooms.device_bytes
        limits, arena = host_limits(), state.offload.arena
        spare = max(0, limits.available_bytes - limits.margin_bytes)
        limit = arena.limit_bytes if arena is not None else spare
        used = state.offload.host_bytes()["page_memory_used"]
        longest = max((chunk.num_tokens for chunk in schedule.chunks), default=1)
        return Shortage(
            sweep=sweep,
            chunk=min(self._chunks_done + 1, self.num_passes),
            num_chunks=self.num_passes,
            device=self._device,
            free=_free_bytes(self._device),
            total=_total_bytes(self._device),
            kept=memory.device_bytes(),
            planned={"values": planned["values"], "gradients": planned["gradients"], "fixed": fixed},
            least=working_bytes(shape, schedule, dtype, state.pass_needs()),
            whole=fixed + sum(whole.values()),
            activations=int(longest * state.meter.bytes_per_token),
            longest_chunk=longest,
            host={"used": used, "limit": limit, "spare": min(spare, limit - used)},
            config=state.settled,
            float8_base=0 if state.float8_base is None else state.float8_base.num_bytes,
        )


def _all_bytes(
    shape: PageShape, schedule: ChunkSchedule, memory: StreamMemory, dtype: torch.dtype
) -> Mapping[Kind, int]:
    """All values and all gradients of pages, wherever they lie."""
    if memory.rooms is not None:
        return memory.rooms.all_bytes
    num_slots = shape.num_slots(schedule)
    gradients = (num_slots - shape.num_sink_slots(schedule)) * shape.slot_bytes(shape.grad_dtype)
    values = shape.num_bytes(schedule, dtype) - shape.fixed_bytes(schedule) - gradients
    return {"values": values, "gradients": gradients}


def _say_where_pages_lie(
    state: Attachment, shape: PageShape, schedule: ChunkSchedule, memory: StreamMemory, device: torch.device
) -> None:
    """Leave a line for the banner; where that is out already, say it now, once for each place where pages may lie."""
    dtype = compute_dtype(state.base, device)
    whole = _all_bytes(shape, schedule, memory, dtype)
    if not whole["values"]:
        return
    if memory.rooms is None:
        place = "on the device"
        where = f"all on the device: K and V {_size(whole['values'])}, gradients {_size(whole['gradients'])}"
    else:
        place, here, arena = "in host memory", memory.rooms.device_bytes, state.offload.arena
        kind = "pinned" if arena is not None and arena.pinned else "pageable"
        where = (
            f"on the device K and V {_size(here['values'])} of {_size(whole['values'])}, gradients "
            f"{_size(here['gradients'])} of {_size(whole['gradients'])}; on the host up to "
            f"{_size(memory.rooms.host_bytes)}, {kind}"
        )
    if memory.on_host is not None:
        place += ", outputs in host memory"
        where += f"; kept outputs on the host up to {_size(memory.on_host.host_bytes)}"
    state.pages = f"{where} ({schedule.num_tokens:,} tokens)"
    if place not in state.pages_said:
        state.pages_said.add(place)
        if state.announced:
            say(state, f"oomb_accel: pages {state.pages}")


def _free_bytes(device: torch.device) -> int:
    """What is free on the device or in torch's cache, nothing held back."""
    if device.type != "cuda":
        return free_bytes(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _total_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return host_limits().total_bytes
    return int(torch.cuda.mem_get_info(device)[1])


def _size(num_bytes: int) -> str:
    unit, name = (GIB, "GiB") if num_bytes >= GIB // 10 else (1 << 20, "MiB")
    return f"{num_bytes // 1024 * 1024 / unit:.3g} {name}"  # no bytes in MiB
