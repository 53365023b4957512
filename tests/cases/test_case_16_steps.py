"""Case 16, over steps: host memory is used again and given back, whatever becomes of a step."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.host import HostArena
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.memory import StreamMemory
from oomb_accel.offload import Offload
from oomb_accel.pages import PagedKVCache, TieredPages
from tests.harness.batches import Layout, documents_of, packed, padded
from tests.harness.kept import num_kept
from tests.harness.late import LateMover
from tests.harness.models import sgd_step, tiny_model, twin
from tests.harness.parity import config, parameter_gradients, switched_on
from tests.harness.sparse import sparse
from tests.harness.stop import stopping
from tests.harness.tolerance import assert_same_bits
from tests.harness.uses import recorded_runs

DENSE = config(span_tokens=8, offload=True)
SPARSE = sparse(span_tokens=8, offload=True)
SETTINGS = pytest.mark.parametrize("settings", [DENSE, SPARSE], ids=["dense", "sparse"])
LAYOUT = packed(documents_of(90, 21, 40))
SHORT = padded(documents_of(50, 40))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model(num_hidden_layers=3, hidden_size=32, intermediate_size=48)


def on_device(settings: OombConfig) -> OombConfig:
    return dataclasses.replace(settings, offload=False)


def step(model: nn.Module, layout: Layout, **batch: Any) -> Tensor:
    """Forward and backward; the loss. Gradients add up."""
    loss: Tensor = model(**layout.batch, **batch).loss
    loss.backward()
    return loss.detach()


def arena_of(model: nn.Module) -> HostArena:
    arena = attachment_of(model).offload.arena
    assert arena is not None
    return arena


def assert_given_back(model: nn.Module) -> None:
    gc.collect()
    arena = arena_of(model)
    assert arena.free_bytes == arena.num_bytes > 0


@pytest.fixture()
def late(monkeypatch: pytest.MonkeyPatch) -> LateMover:
    """The mover of this test's model; only one of its models may have pages in host memory."""
    mover = LateMover(seed=5)
    monkeypatch.setattr("oomb_accel.offload.HostMover", lambda: mover)
    return mover


@SETTINGS
def test_steps_in_a_row_use_the_same_host_memory(model: nn.Module, settings: OombConfig, late: LateMover) -> None:
    ours, theirs = twin(model), twin(model)
    sizes, copies = [], []
    with switched_on(ours, settings), switched_on(theirs, on_device(settings)):
        for number in range(3):
            before = dict(late.num_bytes)
            layout = LAYOUT if number < 2 else SHORT
            assert_same_bits(step(ours, layout), step(theirs, layout))
            assert_same_bits(parameter_gradients(ours), parameter_gradients(theirs))
            for side in (ours, theirs):
                sgd_step(side)
            assert_given_back(ours)
            sizes.append(arena_of(ours).num_bytes)
            copies.append({way: late.num_bytes[way] - before[way] for way in before})
    assert len(set(sizes)) == 1
    assert min(copies[0].values()) > 0


def test_host_memory_does_not_grow(model: nn.Module) -> None:
    ours, sizes = twin(model), []
    layout = padded(documents_of(70))
    with switched_on(ours, SPARSE):
        for number in range(30):
            if number % 3 == 1:
                ours(**layout.batch)  # a loss that is dropped
            else:
                step(ours, layout)
            sizes.append(arena_of(ours).num_bytes)
        assert_given_back(ours)
    assert len(set(sizes)) == 1 and sizes[0] <= 16 << 20


@SETTINGS
def test_identical_steps_copy_the_same(model: nn.Module, settings: OombConfig) -> None:
    ours, copies = twin(model), []
    with switched_on(ours, settings):
        for _ in range(2):
            before = attachment_of(ours).offload.copied_bytes()
            step(ours, LAYOUT)
            after = attachment_of(ours).offload.copied_bytes()
            copies.append({way: after[way] - before[way] for way in after})
    assert copies[0] == copies[1] and min(copies[0].values()) > 0


@SETTINGS
def test_gradient_accumulation(model: nn.Module, settings: OombConfig, late: LateMover) -> None:
    total = sum(oomb_accel.count_targets(layout.batch) for layout in (LAYOUT, SHORT))
    results = []
    for chosen in (settings, on_device(settings)):
        with switched_on(twin(model), chosen) as ours:
            losses = [step(ours, layout, num_targets=total) for layout in (LAYOUT, SHORT)]
            results.append((torch.stack(losses), parameter_gradients(ours)))
    assert_same_bits(results[0][0], results[1][0])
    assert_same_bits(results[0][1], results[1][1])
    assert late.num_copies > 100


@SETTINGS
def test_evaluation(model: nn.Module, settings: OombConfig, late: LateMover) -> None:
    losses = []
    for chosen in (settings, on_device(settings)):
        with switched_on(twin(model), chosen) as ours, torch.no_grad():
            losses += [ours.train(mode)(**LAYOUT.batch).loss for mode in (True, False)]
            if chosen is settings:
                assert_given_back(ours)
    assert_same_bits(losses[0], losses[2])
    assert_same_bits(losses[1], losses[3])
    assert late.num_copies > 50


@SETTINGS
def test_a_backward_that_never_comes(model: nn.Module, settings: OombConfig, late: LateMover) -> None:
    wanted = twin(model)
    with switched_on(wanted, on_device(settings)):
        step(wanted, LAYOUT)
    with switched_on(twin(model), settings) as ours:
        loss = ours(**SHORT.batch).loss
        gc.collect()
        assert arena_of(ours).free_bytes < arena_of(ours).num_bytes, "its pages wait for the backward"
        del loss
        assert_given_back(ours)
        step(ours, LAYOUT)
        assert_same_bits(parameter_gradients(ours), parameter_gradients(wanted))
        assert_given_back(ours)


@SETTINGS
@pytest.mark.parametrize("call", [5, 14, 18], ids=["forward sweep", "backward sweep", "later"])
def test_an_exception_inside_a_sweep(model: nn.Module, settings: OombConfig, call: int, late: LateMover) -> None:
    wanted = twin(model)
    with switched_on(wanted, on_device(settings)):
        step(wanted, LAYOUT)
    with switched_on(twin(model), settings) as ours:
        with stopping(ours.get_submodule("model.layers.1"), call):
            step(ours, LAYOUT)
        assert_given_back(ours)
        ours.zero_grad(set_to_none=True)
        step(ours, LAYOUT)
        assert_same_bits(parameter_gradients(ours), parameter_gradients(wanted))
        assert_given_back(ours)


@SETTINGS
@pytest.mark.parametrize("first", [LAYOUT, SHORT], ids=["longer first", "shorter first"])
def test_two_forwards_before_one_backward(
    model: nn.Module, settings: OombConfig, first: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stream may want larger slabs than the first one has."""
    monkeypatch.setattr(
        "oomb_accel.offload.slab_bytes_for", lambda num_bytes, _: 4096 if num_bytes < 150_000 else 16384
    )
    results = []
    for chosen in (settings, on_device(settings)):
        chosen = dataclasses.replace(chosen, keep_last_graph=False)
        with switched_on(twin(model), chosen) as ours:
            losses = [ours(**layout.batch).loss for layout in (first, SHORT if first is LAYOUT else LAYOUT)]
            torch.stack(losses).sum().backward()
            results.append(parameter_gradients(ours))
            if chosen.offload:
                assert_given_back(ours)
    assert_same_bits(results[0], results[1])


def test_switching_off_gives_host_memory_back(model: nn.Module) -> None:
    ours = twin(model)
    with switched_on(ours, DENSE):
        step(ours, SHORT)
        arena = arena_of(ours)
        assert arena._resources.mappings
    assert not arena._resources.mappings and arena.num_bytes == 0


def test_a_model_that_is_dropped_gives_host_memory_back(model: nn.Module) -> None:
    ours = oomb_accel.enable(twin(model), DENSE)
    step(ours, SHORT)
    finalizer = arena_of(ours)._finalizer
    assert finalizer.alive
    del ours
    gc.collect()
    assert not finalizer.alive


@pytest.mark.parametrize("keep", ["auto", True])
def test_attention_outputs_are_kept_on_request_only(model: nn.Module, keep: Any) -> None:
    """They take the memory that pages are short of."""
    memories: list[StreamMemory] = []
    original = StreamMemory.begin

    def begin(self: StreamMemory, *arguments: Any) -> None:
        memories.append(self)
        original(self, *arguments)

    results = []
    for offload in (True, False):
        memories.clear()
        settings = dataclasses.replace(SPARSE, offload=offload, keep_outputs=keep)
        with switched_on(twin(model), settings) as ours, pytest.MonkeyPatch.context() as patch:
            patch.setattr(StreamMemory, "begin", begin)
            loss = ours(**LAYOUT.batch).loss
            assert bool(num_kept(memories[-1], "attention")) == (keep is True or not offload)
            loss.backward()
            results.append(parameter_gradients(ours))
    assert_same_bits(results[0], results[1])


@SETTINGS
def test_the_device_has_no_more_than_it_was_given(model: nn.Module, settings: OombConfig) -> None:
    caches: list[PagedKVCache] = []
    original = PagedKVCache.release

    def release(self: PagedKVCache, chunk: Any) -> None:
        caches.append(self)
        original(self, chunk)

    with switched_on(twin(model), settings) as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedKVCache, "release", release)
        step(ours, LAYOUT)
    cache = caches[-1]
    with switched_on(twin(model), on_device(settings)) as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedKVCache, "release", release)
        step(ours, LAYOUT)
    assert cache.num_bytes < 0.7 * caches[-1].num_bytes
    for records in (cache._values, cache._gradients):
        assert isinstance(records, TieredPages)
        assert len(records._free) == records.pool.num_slots and records._host.store.num_records == 0
        assert sum(records._resident) == sum(records._away) == 0


def test_only_selected_pages_get_a_gradient(model: nn.Module) -> None:
    """At the end of each backward there are as many as pages that some later chunk used, and are not released."""
    found: list[tuple[int, int]] = []
    original = PagedKVCache.release

    def release(self: PagedKVCache, chunk: Any) -> None:
        gradients = self._gradients
        assert isinstance(gradients, TieredPages)
        there = (gradients._slots >= 0) | (gradients._host_slots >= 0)
        used = torch.zeros(there.shape, dtype=torch.bool).numpy()
        for run in runs:
            for layer in range(3) if run.phase == "backward" else ():
                for kind, at_layer, pages, wanted in run.touched:
                    if (kind, at_layer) == ("gradients", layer) and pages != run.chunk.own_pages:
                        here = used[layer, pages.first : pages.end].reshape(-1)
                        here[... if wanted is None else wanted] = True
        used[:, chunk.own_pages.end :] = False
        assert (there == used).all()
        found.append((int(used.sum()), 2 * 3 * chunk.own_pages.end))
        original(self, chunk)

    with pytest.MonkeyPatch.context() as patch, recorded_runs() as runs:
        patch.setattr(PagedKVCache, "release", release)
        with switched_on(twin(model), sparse(top_k=1, offload=True)) as ours:
            step(ours, padded(documents_of(200)))
    assert max(used for used, _ in found) < 0.6 * max(whole for _, whole in found)


def test_nothing_of_this_is_made_where_everything_fits(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("no host memory is needed")

    monkeypatch.setattr(Offload, "reserve", never)
    with switched_on(twin(model), dataclasses.replace(SPARSE, offload="auto")) as ours:
        step(ours, LAYOUT)
