"""Kept results that the estimate lays on the host: which, how many bytes, and what moving them takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.own_head import own_head
from oomb_accel.plan import Job, estimate, read_shape
from oomb_accel.plan import kept as kept_module
from oomb_accel.plan.sizes import GIB
from oomb_accel.schedule import ChunkSchedule
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config, switched_on

M = 1 << 20


def job(tokens: int = M // 4, **changes: Any) -> Job:
    """A 7B in sparse steps whose pages are all on the GPU, with host memory for everything."""
    settings = {"attention": "sparse", "top_k": 16, "page_grad_dtype": "bfloat16", "host_bytes": 2048 * GIB}
    return Job(model=read_shape("qwen2.5-7b"), tokens=tokens, **{**settings, **changes})


def test_what_the_gpu_has_no_room_for() -> None:
    """Everything is kept, the latest chunks on the GPU; three layers' worth of 8,192 tokens is set aside there."""
    found, on_device = estimate(job()), estimate(job(offload=False))
    memory = found.memory
    assert not memory.plan.offloads
    for places in memory.kept:
        assert places.chunks == range(31) and places.on_host.stop == places.on_device.start
    assert memory.kept.head.on_device == range(31) and memory.kept.o_proj.on_host == range(31)
    of_layer = 8192 * (28 * (128 * 2 + 4) + 2 * 2 * (3584 + 16))
    assert memory.device["outputs on their way"] == 3 * of_layer
    assert memory.device_bytes <= 0.94 * found.job.gpu.memory_bytes
    moved = memory.pinned["kept outputs"]
    assert found.time.up_bytes == found.time.down_bytes == pytest.approx(moved)
    on_gpu = sum(size for part, size in memory.device.items() if part.startswith("kept "))
    every = 31 * 8192 * (28 * 28 * (128 * 2 + 4) + 2 * 28 * 2 * (3584 + 16) + 3584 * 2 + 4)
    assert moved + on_gpu == pytest.approx(every, rel=1e-4)
    assert on_device.memory.pinned["kept outputs"] == on_device.memory.device["outputs on their way"] == 0
    assert not any(places.on_host for places in on_device.memory.kept)
    assert found.time.seconds < 0.95 * on_device.time.seconds
    assert found.time.parts["waiting for host memory"] == 0


def test_as_far_as_host_memory_goes() -> None:
    whole = estimate(job()).memory.pinned["kept outputs"]
    before = estimate(job(offload=False)).time.seconds
    for gib in (8, 16, 32, 64):
        found = estimate(job(host_memory_bytes=gib * GIB))
        kept = found.memory.pinned["kept outputs"]
        assert (gib - 3.5) * GIB < kept <= min(gib * GIB, whole) and found.fits
        assert found.time.seconds < before
        before = found.time.seconds
    assert estimate(job(host_bytes=2 * GIB)).memory.pinned["kept outputs"] == 0


def test_half_of_what_a_process_may_have_unless_the_setting_says_how_much() -> None:
    """Of 128 GiB the margin and the process take 6; a chunk's outputs of a kind are 1.5."""
    half = estimate(job(host_bytes=128 * GIB)).memory.pinned["kept outputs"]
    assert 58 * GIB < half <= 61 * GIB
    asked = estimate(job(host_bytes=128 * GIB, host_memory_bytes=90 * GIB)).memory.pinned["kept outputs"]
    assert 87 * GIB < asked <= 90 * GIB


@pytest.mark.parametrize("keep_outputs", ["auto", True])
def test_offload_of_everything_keeps_none_there(keep_outputs: Any) -> None:
    """As docs/memory.md says; what the device keeps is its own affair."""
    memory = estimate(job(offload=True, keep_outputs=keep_outputs)).memory
    assert memory.plan.offloads and memory.pinned["kept outputs"] == 0


def test_beside_pages() -> None:
    """Everything that is kept lies on the host then. With lists at random, too, the bus has time for it; and what
    attention need not do again needs no pages."""
    found = estimate(job(device_pages_bytes=4 * GIB))
    without = estimate(job(device_pages_bytes=4 * GIB, keep_outputs=False))
    assert found.memory.plan.offloads and all(places.on_host == range(31) for places in found.memory.kept)
    assert found.time.seconds < 0.95 * without.time.seconds
    kept, more_down = found.memory.pinned["kept outputs"], found.time.down_bytes - without.time.down_bytes
    assert more_down == pytest.approx(kept, rel=0.02)
    assert 0.5 * kept < found.time.up_bytes - without.time.up_bytes < kept


def test_a_slow_bus_is_waited_for() -> None:
    """What a quarter of a chunk's time has no room for, down and up."""
    of = job()
    slow = replace(of, gpu=replace(of.gpu, host_bytes_per_second=of.gpu.host_bytes_per_second / 10))
    found, moved = estimate(slow), estimate(of).memory.pinned["kept outputs"]
    waiting = found.time.parts["waiting for host memory"]
    copying = 2 * moved / slow.gpu.host_bytes_per_second
    assert copying - found.time.seconds / 2 < waiting < copying


def test_the_engine_counts_as_many_bytes() -> None:
    with switched_on(with_lora(tiny_model()), config()) as model:
        state = attachment_of(model)
        kinds = step_memory._result_kinds(state, own_head(state), torch.float32)
        shape = state.model_shape()
    ours = Job(model=shape, tokens=160, chunk_tokens=16, page_tokens=4, lora_r=4, compute_dtype="float32")
    sizes = kept_module._sizes(ours, ours.chunks(), without=())
    assert list(sizes) == ["head", "attention", "mlp", "o_proj"]
    assert [kind.bytes_per_token for kind in kinds] == [per_token for per_token, _ in sizes.values()]
    (chunk,) = ChunkSchedule.build([16], range(15), chunk_tokens=16, page_tokens=4).chunks
    for kind, (per_token, (run, *_)) in zip(kinds, sizes.values(), strict=True):
        assert run.host_bytes - run.device_bytes == kind.host_bytes(chunk) - 16 * per_token
