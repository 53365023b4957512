"""What the engine reckons before a step: the same as the planner."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import oomb_accel
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import Attachment, attachment_of
from oomb_accel.integrations.parameters import trained_parameters
from oomb_accel.offload import Offload
from oomb_accel.pages import PageRooms
from oomb_accel.plan import Job, estimate, page_demand, plan_memory, read_shape
from oomb_accel.plan.runs import runs_of
from oomb_accel.plan.sizes import GIB, in_slabs, slab_bytes_for
from oomb_accel.schedule import ChunkSchedule
from oomb_kernels import backward_workspace_bytes
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model
from tests.harness.sparse import sparse

MIB = 2**20
BATCH = packed(documents_of(800)).batch


def schedule(state: Attachment, tokens: int) -> ChunkSchedule:
    return ChunkSchedule.build([tokens], range(tokens - 1), chunk_tokens=state.chunk_tokens, page_tokens=4)


def rooms(state: Attachment, tokens: int = 800) -> PageRooms:
    trained = trained_parameters(state.model)
    found = step_memory.divide_pages(state, schedule(state, tokens), torch.device("cpu"), trained)
    assert found is not None
    return found


def switched_on() -> Attachment:
    model = tiny_model()
    oomb_accel.enable(model, sparse(q_block=64, top_k=1, device_pages_gib=2e-4, span_tokens=8))
    return attachment_of(model)


def beyond_quotas(found: PageRooms) -> int:
    """Bytes of all records that the device does not keep, gradients that never are among them."""
    parts = ((found.values, "values"), (found.gradients, "gradients"))
    total = 0
    for room, kind in parts:
        if room is not None:
            record = found.device_bytes[kind] // room.num_slots  # type: ignore[index]
            total += found.all_bytes[kind] - record * sum(room.quotas)  # type: ignore[index]
    return total


def test_the_host_is_asked_for_what_exists_at_one_moment() -> None:
    """Lists name few pages, so most gradients do not exist when the most pages do; a step then runs."""
    state = switched_on()
    found = rooms(state)
    assert 0.4 * beyond_quotas(found) < found.host_bytes < 0.8 * beyond_quotas(found)
    state.model(**BATCH).loss.backward()
    assert min(state.offload.copied_bytes().values()) > 0


def test_offload_leaves_on_the_device_what_the_planner_says() -> None:
    """But for a page: the planner counts those that lists at random name, the engine those that they can."""
    model = tiny_model()
    oomb_accel.enable(model, sparse(q_block=64, top_k=1, span_tokens=8, offload=True))
    state = attachment_of(model)
    found, layout = rooms(state), step_memory._layout(state, state.page_shape(sparse=True), torch.float32)
    planned = plan_memory(
        page_demand(layout, runs_of(schedule(state, 800))),
        free_device_bytes=10**9,
        activation_bytes=0,
        host_budget_bytes=10**9,
        chunk_tokens=state.chunk_tokens,
        offload=True,
    )
    assert found.values is not None and not any(found.values.quotas)
    ours = found.device_bytes["values"], found.device_bytes["gradients"], found.host_bytes
    theirs = planned.device_value_bytes, planned.device_gradient_bytes, planned.host_bytes
    assert ours == pytest.approx(theirs, rel=0.15)


def test_in_evaluation_there_are_no_gradients_to_come() -> None:
    state = switched_on()
    with torch.no_grad():
        found = rooms(state)
    assert found.host_bytes == beyond_quotas(found)


def test_pages_are_divided_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    state, spy = switched_on(), mock.Mock(side_effect=step_memory.divide)
    monkeypatch.setattr(step_memory, "divide", spy)
    state.model(**BATCH).loss.backward()
    spy.assert_called_once()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_of_the_sparse_backward_is_counted(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it is more than logits, which are gone by then."""
    state = switched_on()
    plan = schedule(state, 800)
    workspace = backward_workspace_bytes(
        **{"num_heads": 4, "num_groups": 2, "num_tokens": 16, "block_tokens": 64, "room": 1},
        **{"page_tokens": 4, "head_dim": 16, "itemsize": dtype.itemsize},
    )
    assert step_memory._sparse_workspace(state, plan, dtype) == workspace
    assert step_memory._sparse_workspace(state, schedule(state, 16), dtype) == 0, "nothing is selected"
    for vocabulary in (10, 10_000):
        monkeypatch.setattr(state.base.config, "vocab_size", vocabulary)
        with torch.no_grad():
            without = step_memory._other_bytes(state, plan, dtype, ())
        logits = 16 * vocabulary * dtype.itemsize
        assert step_memory._other_bytes(state, plan, dtype, ()) - without == max(0, workspace - logits)


@pytest.mark.parametrize("what", [{"device_pages_gib": "auto"}, {"device_pages_gib": 1e3}, {"offload": False}], ids=str)
def test_under_autocast_a_step_works_in_its_type(what: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a step asks what it takes beside pages: weights are fp32, logits and dS are not."""
    asked: list[torch.dtype] = []

    def other_bytes(state: Attachment, plan: ChunkSchedule, dtype: torch.dtype, trained: Any) -> int:
        asked.append(dtype)
        return 0

    monkeypatch.setattr(step_memory, "_other_bytes", other_bytes)
    monkeypatch.setattr(step_memory, "free_bytes", lambda device: 10**5 if "offload" not in what else 10**9)
    model = tiny_model()
    oomb_accel.enable(model, sparse(q_block=64, top_k=1, span_tokens=8, **what))
    with torch.autocast("cpu", torch.bfloat16), contextlib.suppress(ValueError):
        model(**BATCH).loss.backward()
    assert asked and set(asked) == {torch.bfloat16}


@pytest.mark.parametrize("tokens", [16_384, 30_000, 300_000])
def test_host_memory_is_made_as_it_was_estimated(tokens: int) -> None:
    """Whole slabs, whatever the need."""
    job = Job(
        model=read_shape("qwen2.5-7b"),
        tokens=tokens,
        chunk_tokens=256,
        device_pages_bytes=20_000 * tokens,
        host_bytes=1 << 42,
    )
    memory = estimate(job).memory
    assert memory.plan.fits and memory.plan.offloads
    engine = Offload()
    engine._budget = 1 << 60
    made = engine.check(memory.plan.host_bytes, job.pages.gradient_record)
    assert memory.pinned["K, V and page gradients"] == made


@pytest.mark.parametrize(
    ("need", "record", "size"),
    [
        (0, 1, 2 * MIB),
        (20 * MIB, 1, 2 * MIB),
        (300 * MIB, 1, 32 * MIB),
        (8 * GIB - 1, 1, 512 * MIB),
        (8 * GIB, 1, GIB),
        (900 * GIB, 1, GIB),
        (20 * MIB, 2 * MIB + 1, 4 * MIB),
        (900 * GIB, GIB + 1, 2 * GIB),
    ],
)
def test_slab_size_follows_the_need(need: int, record: int, size: int) -> None:
    assert slab_bytes_for(need, record) == size
    assert in_slabs(need, size) == (math.ceil(need / size) + 1) * size


@pytest.mark.parametrize(
    ("share", "dense_layers", "lengths"),
    [(0.6, (1,), (800,)), (0.8, (1,), (800,)), (0.8, (0, 2), (800,)), (0.7, (-1,), (100, 500, 200)), (0.6, (), (800,))],
    ids=str,
)
def test_a_step_runs_in_the_host_memory_that_it_asks_for(
    share: float, dense_layers: tuple[int, ...], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense layers have all their gradients at once, sparse ones few; what these leave unused on the device is none
    for those."""
    monkeypatch.setattr("oomb_accel.plan.sizes._SMALLEST_SLAB_BYTES", 1 << 14)
    model, settings = tiny_model(), sparse(q_block=64, top_k=1, span_tokens=8, dense_layers=dense_layers)
    oomb_accel.enable(model, settings)
    state = attachment_of(model)
    plan = ChunkSchedule.build(lengths, [], chunk_tokens=state.chunk_tokens, page_tokens=4)
    whole = state.page_shape(sparse=True).num_bytes(plan, torch.float32)
    state.config = replace(settings, device_pages_gib=share * whole / GIB)
    found = step_memory.divide_pages(state, plan, torch.device("cpu"), trained_parameters(state.model))
    assert found is not None
    state.offload._budget = state.offload.check(found.host_bytes, 512)
    state.model(**packed(documents_of(*lengths)).batch).loss.backward()
    assert (state.offload.copied_bytes()["down"] > 0) == bool(dense_layers)
