"""Results of the forward sweep on the host, where pages leave the device too."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from oomb_accel import OombConfig
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.parameters import trained_parameters
from oomb_accel.plan import kept as kept_module
from oomb_accel.plan import sizes
from oomb_accel.plan.job import Job
from oomb_accel.progress import GIB
from oomb_accel.schedule import ChunkSchedule
from tests.harness.batches import documents_of, padded
from tests.harness.late import LateMover
from tests.harness.models import twin
from tests.harness.parity import chunked, config, parameter_gradients, switched_on
from tests.harness.sparse import sparse
from tests.harness.tolerance import assert_same_bits
from tests.test_kept_on_host import LAYOUTS, MIB, STAGING, Placed, Rooms, late, model, placed, refuse_every_third, rooms

__all__ = ["late", "model", "placed", "rooms"]  # fixtures
SMALL: dict[str, Any] = {"span_tokens": 8, "device_pages_gib": 110 * 1024 / GIB}
"""Room for a few layers' pages."""
SETTINGS: dict[str, OombConfig] = {
    "dense": config(**SMALL),
    "dense, bf16 page gradients": config(**SMALL, page_grad_dtype="bfloat16"),
    "sparse": sparse(**SMALL),
    "sparse, bf16 page gradients": sparse(**SMALL, page_grad_dtype="bfloat16"),
    "all run again": sparse(**SMALL, keep_last_graph=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", ["auto", True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_no_bit_changes(
    layout: str, keep: Any, settings: str, model: nn.Module, rooms: Rooms, placed: Placed, late: LateMover
) -> None:
    wanted = chunked(twin(model), LAYOUTS[layout], replace(SETTINGS[settings], keep_outputs=False))
    of_pages = dict(late.num_bytes)
    assert min(of_pages.values()) > 0
    rooms(0, 64 * MIB)
    placed.clear()
    found = chunked(twin(model), LAYOUTS[layout], replace(SETTINGS[settings], keep_outputs=keep))
    kept = placed[0]
    assert kept["products on the host"] and (kept["attention"] if keep is True else kept["attention on the host"])
    assert not kept["products"] and late.num_bytes["down"] - of_pages["down"] > of_pages["down"]
    assert_same_bits(found.loss, wanted.loss)
    assert_same_bits(found.gradients, wanted.gradients)


@pytest.mark.parametrize("settings", SETTINGS)
def test_results_that_are_lost_are_made_again(
    settings: str, model: nn.Module, rooms: Rooms, late: LateMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the recompute reads pages, which nobody had foreseen."""
    wanted = chunked(twin(model), LAYOUTS["odd lengths"], replace(SETTINGS[settings], keep_outputs=False))
    num_calls = refuse_every_third(monkeypatch)
    rooms(0, 64 * MIB)
    found = chunked(twin(model), LAYOUTS["odd lengths"], SETTINGS[settings])
    assert next(num_calls) > 100
    assert_same_bits(found.gradients, wanted.gradients)


@pytest.mark.parametrize("settings", ["dense", "sparse"])
@pytest.mark.parametrize("kib", [200, 400, 1000])
def test_pages_have_their_room_first(
    kib: int, settings: str, model: nn.Module, late: LateMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the host's memory and of the device's: what is asked for is made, no more, and pages never lack it."""
    for name in ("_SMALLEST_SLAB_BYTES", "LARGEST_SLAB_BYTES"):
        monkeypatch.setattr(sizes, name, mmap.PAGESIZE)
    limit = kib * 1024
    layout = padded(documents_of(150))
    config = replace(SETTINGS[settings], host_memory_gib=limit / GIB)
    with switched_on(twin(model), replace(config, keep_outputs=False)) as ours:
        ours(**layout.batch).loss.backward()
        arena, wanted = attachment_of(ours).offload.arena, parameter_gradients(ours)
        assert arena is not None
        of_pages = arena.num_bytes
    monkeypatch.setattr(step_memory, "_host_spare_bytes", lambda state, _: state.offload.spare_bytes())
    with switched_on(twin(model), config) as ours:
        ours(**layout.batch).loss.backward()
        arena = attachment_of(ours).offload.arena
        assert arena is not None and arena.num_bytes <= limit and arena.free_bytes == arena.num_bytes
        assert (arena.num_bytes > of_pages) == (limit - of_pages > STAGING)
        assert_same_bits(parameter_gradients(ours), wanted)


@pytest.mark.parametrize("grads", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep", ["auto", True])
@pytest.mark.parametrize("kib", [164, 228, 260])
def test_a_slab_holds_pages_or_results(
    kib: int, keep: Any, grads: str, model: nn.Module, late: LateMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last slabs that there may be are those that were made for pages, results leave them."""
    for name in ("_SMALLEST_SLAB_BYTES", "LARGEST_SLAB_BYTES"):
        monkeypatch.setattr(sizes, name, 32 * 1024)
    monkeypatch.setattr(step_memory, "_host_spare_bytes", lambda state, _: state.offload.spare_bytes())
    most = kib * 1024 / GIB
    found: list[Any] = []
    for kept in (False, keep):
        settings: dict[str, Any] = {**SMALL, "page_grad_dtype": grads, "host_memory_gib": most, "keep_outputs": kept}
        with switched_on(twin(model), config(**settings)) as ours:
            try:
                ours(**padded(documents_of(150)).batch).loss.backward()
            except ValueError:  # before the step
                found.append(None)
            else:
                found.append(parameter_gradients(ours))
    if found[0] is None:
        assert found[1] is None and (kib, grads) == (164, "float32")
    else:
        assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("keep", ["auto", True])
def test_memory_is_looked_at_once_for_pages(
    keep: Any, model: nn.Module, rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With results on their way pages are divided twice; what is free, and what else a step takes, is asked once: on a
    GPU each takes the host about a millisecond."""
    rooms(0, 64 * MIB)
    looked = list[torch.device]()

    def free_bytes(device: torch.device) -> int:
        looked.append(device)
        return GIB

    monkeypatch.setattr(step_memory, "free_bytes", free_bytes)
    with switched_on(twin(model), config(**SMALL, keep_outputs=keep)) as ours, torch.enable_grad():
        state = attachment_of(ours)
        schedule = ChunkSchedule.build([150], range(149), chunk_tokens=state.chunk_tokens, page_tokens=4)
        pages = step_memory.divide_pages(state, schedule, torch.device("cpu"), trained_parameters(ours))
    assert pages is not None and pages.results_bytes and len(looked) == 1


def test_the_device_leaves_as_much_to_results_as_the_estimate_says(model: nn.Module, rooms: Rooms) -> None:
    rooms(0, 64 * MIB)
    for keep in ("auto", True):
        with switched_on(twin(model), config(**SMALL, keep_outputs=keep)) as ours:
            state = attachment_of(ours)
            with torch.enable_grad():
                schedule = ChunkSchedule.build([150], range(149), chunk_tokens=state.chunk_tokens, page_tokens=4)
                pages = step_memory.divide_pages(state, schedule, torch.device("cpu"), trained_parameters(ours))
                assert pages is not None
                found = pages.results_bytes
            job = Job(
                model=state.model_shape(),
                tokens=150,
                chunk_tokens=state.chunk_tokens,
                page_tokens=4,
                lora_r=4,
                compute_dtype="float32",
                keep_outputs=keep,
            )
            assert found == kept_module.bytes_on_their_way(job, job.chunks(), GIB, 0) > 0
