"""Foresight: what it tells is what a step then uses, and what is worth most is what is used next."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from oomb_accel import OombConfig
from oomb_accel.foresight import _HORIZON, Foresight
from oomb_accel.pages import Kind, PageShape
from oomb_accel.progress import GIB
from oomb_accel.schedule import Chunk, ChunkSchedule, PageRange
from oomb_accel.selection import PageSelector, SelectionSettings
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model
from tests.harness.parity import chunked, config
from tests.harness.sparse import sparse
from tests.harness.uses import Run, recorded_runs

LAYERS, HEADS = 4, 2
STEPS: dict[str, tuple[str, OombConfig]] = {
    "dense": ("qwen2", config(span_tokens=8, offload=True)),
    "dense, all run again": ("qwen2", config(keep_last_graph=False, offload=True)),
    "sparse": ("qwen2", sparse(offload=True)),
    "sparse, all run again": ("qwen2", sparse(keep_last_graph=False, span_tokens=8, offload=True)),
    "bf16 page gradients": ("qwen2", sparse(page_grad_dtype="bfloat16", offload=True)),
    "no sinks": ("qwen2", sparse(sink_pages=0, dense_layers=(1,), span_tokens=8, offload=True)),
    "no recent pages": ("qwen2", sparse(recent_pages=0, select_per="layer", offload=True)),
    "kept outputs": ("qwen2", sparse(keep_outputs=True, offload=True)),
    "windows": ("mistral", config(offload=True)),
    "windows beside dense layers": ("gemma2", config(span_tokens=8, offload=True)),
    "windows beside sparse layers": ("gemma2", sparse(offload=True)),
}
_TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


def runs_of(name: str, **changes: Any) -> list[Run]:
    kind, settings = STEPS[name]
    settings = dataclasses.replace(settings, **changes)
    extra: dict[str, Any] = {"layer_types": _TYPES} if kind == "gemma2" else {}
    model = tiny_model(kind, num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=32, **extra)
    with recorded_runs() as runs:
        chunked(model, packed(documents_of(130, 21, 75)), settings)
    assert {run.phase for run in runs} == {"forward", "recompute", "backward"}
    return runs


@pytest.mark.parametrize("name", STEPS)
def test_needs_are_what_is_used_in_this_order(name: str) -> None:
    runs = runs_of(name)
    num_selected = 0
    for run in runs:
        uses = run.uses
        if run.phase == "forward":  # what is being selected cannot be known
            selected = [use[:3] for use in run.touched if use[3] is not None]
            uses = [use for use in uses if use not in selected]
            num_selected += len(selected)
        assert run.own == uses, f"chunk {run.chunk.index}, {run.phase}"
        orders = [need.step for need in run.foretold]
        assert orders == sorted(orders)
    assert any(run.uses for run in runs)
    assert (num_selected > 0) == (STEPS[name][1].attention == "sparse")


@pytest.mark.parametrize("name", ["dense", "sparse", "windows beside sparse layers"])
def test_what_the_next_run_uses_first_is_told_as_well(name: str) -> None:
    runs = runs_of(name)
    num_told = 0
    for run, following in pairwise(runs):
        if run.phase == "forward" and following.phase != "forward":
            continue  # the turn: the caller's backward may never come
        told = run.foretold[run.num_own :]
        first = [need for need in following.foretold[: following.num_own] if need.step < 2][:64]
        assert [(n.kind, n.layer, n.pages) for n in told] == [(n.kind, n.layer, n.pages) for n in first]
        assert [n.step - first[0].step for n in first] == [n.step - told[0].step for n in told]
        num_told += len(told)
    assert num_told > 20


@pytest.mark.parametrize("name", ["sparse", "bf16 page gradients", "no sinks", "windows beside sparse layers"])
def test_what_is_worth_most_is_used_next(name: str) -> None:
    """The backward sweep: written out from what the step then really used."""
    compared, seen = list[str](), set[float]()
    for pool_bytes in (75_000, 160_000):  # some records of each kind stay between uses, so that there is a choice
        runs = runs_of(name, offload="auto", device_pages_gib=pool_bytes / GIB)
        backward = [run for run in runs if run.phase != "forward"]
        num_pages = max(run.chunk.own_pages.end for run in runs)
        size = (num_pages, HEADS)
        for number, run in enumerate(backward):
            following = backward[number + (run.phase == "backward") :]  # a backward uses its own while it runs
            for (kind, layer), told in run.worths.items():
                if np.array_equal(told[:, 0], -np.arange(num_pages)):
                    continue  # a dense layer
                wanted = np.full(size, -1, np.float32)
                first = run.chunk.index - (run.phase == "backward")
                for later in reversed(following):
                    if later.chunk.index > first - _HORIZON:
                        wanted[later.names(kind, layer, size)] = later.chunk.index
                alive = slice(0, run.chunk.past_pages.end if run.phase == "backward" else num_pages)
                np.testing.assert_array_equal(told[alive], wanted[alive], f"{kind} of layer {layer}, {run.phase}")
                compared.append(kind)
                seen |= set(np.unique(told).tolist())
    assert len(compared) > 10 and set(compared) == {"values", "gradients"} and len(seen) > 4


# Counts of selections, in the forward sweep.

PAGE, CHUNK = 4, 16
SETTINGS = SelectionSettings(
    top_k=2, q_block=64, sink_pages=1, recent_pages=2, page_budget=None, select_per="kv_head", causal_selection=False
)


def stream(tokens: int = 160) -> tuple[ChunkSchedule, PageSelector, Foresight]:
    plan = ChunkSchedule.build([tokens], [], chunk_tokens=CHUNK, page_tokens=PAGE)
    selector = PageSelector(SETTINGS, frozenset({1}))
    shape = PageShape(2, HEADS, 8, PAGE, torch.float32, (None, None), frozenset({1}), 1)
    return plan, selector, Foresight(shape, plan, selector, span_pages=4)


def worths(foresight: Foresight, plan: ChunkSchedule, kind: Kind, layer: int) -> npt.NDArray[np.float32]:
    """Of all records, ``[N, G]``."""
    return foresight.worth(kind, layer, np.arange(plan.num_pages * HEADS)).reshape(-1, HEADS)


def select(selector: PageSelector, chunk: Chunk) -> set[tuple[int, int]]:
    """Have a chunk select at random; which (page, head) it selected."""
    reach = selector.reach(1, chunk.past_pages)
    assert reach is not None
    generator = torch.Generator().manual_seed(chunk.index)
    centroids = torch.randn(HEADS, len(reach.candidates), 8, generator=generator)
    lists = selector.select(1, chunk, torch.randn(2 * HEADS, CHUNK, 8, generator=generator), centroids, reach, 1.0)
    return {
        (reach.candidates.first + page, head)
        for head in range(HEADS)
        for page in lists.pages_GBK[head].flatten().tolist()
    }


def test_in_the_forward_sweep_what_was_selected_lately_is_worth_most() -> None:
    plan, selector, foresight = stream()
    counts = np.zeros((plan.num_pages, HEADS), np.float32)
    for chunk in plan.chunks[2:7]:
        foresight.begin(chunk, "forward")
        counts *= np.float32(0.8)
        for record in select(selector, chunk):
            counts[record] += 1
        wanted = counts.copy()
        end = plan.chunks[chunk.index + 1].past_pages.end  # the chunk itself has used its own recents
        wanted[0] = wanted[end - 2 : end] = np.inf
        for _ in range(2):  # asked again, nothing is counted twice
            told = np.exp(worths(foresight, plan, "values", 1) + chunk.index * np.log(0.8))
            np.testing.assert_allclose(told, wanted, rtol=1e-5)
    assert len(np.unique(counts)) > 4


def test_a_past_that_is_short_is_used_as_a_whole() -> None:
    plan, _, foresight = stream()
    foresight.begin(plan.chunks[0], "forward")
    told = worths(foresight, plan, "values", 1)
    assert told[:4].min() == np.inf, "the next chunk attends to all of it"
    assert told[4:].max() == -np.inf


def test_of_dense_layers_the_oldest_stay() -> None:
    plan, _, foresight = stream()
    kinds: tuple[Kind, ...] = ("values", "gradients")
    for phase in ("forward", "recompute", "backward"):
        foresight.begin(plan.chunks[3], phase)
        for kind in kinds:
            worth = worths(foresight, plan, kind, 0)
            assert (np.diff(worth[:, 0]) < 0).all() and (worth[:, 0] == worth[:, 1]).all()


def test_behind_the_first_chunk_nothing_is_worth_anything() -> None:
    """Asked there for the first time."""
    plan, _, foresight = stream()
    foresight.begin(plan.chunks[0], "backward")
    assert (worths(foresight, plan, "gradients", 1) == -1).all()


def test_a_recompute_with_kept_outputs_uses_nothing() -> None:
    plan = ChunkSchedule.build([100], [], chunk_tokens=CHUNK, page_tokens=PAGE)
    shape = PageShape(2, HEADS, 8, PAGE, torch.float32, (None, None))
    foresight = Foresight(shape, plan, None, span_pages=4, skipped=frozenset({3}))
    told = foresight.begin(plan.chunks[3], "recompute")
    assert [(n.kind, n.layer, n.pages) for n in told][:2] == [
        ("values", 1, PageRange(0, 4)),
        ("gradients", 1, PageRange(0, 4)),
    ], "its backward comes first"
    assert {n.step for n in told} == {0, 1}
    assert foresight.begin(plan.chunks[2], "recompute")[0].layer == 0
