"""The rows of the table of kernels: what is counted, and what is run for it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from oomb_accel.bench import attention
from oomb_accel.bench.attention import AttentionInputs, AttentionSizes, bench_attention
from oomb_accel.bench.check import CheckSize, check_kernels
from oomb_accel.bench.figures import AttentionRow, Timed, attention_table
from oomb_accel.bench.lists import KINDS, draw_lists
from oomb_accel.bench.timing import Task
from oomb_kernels import page_attention_forward, page_mass
from tests.bench.sizes import CPU, TINY, made_up


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_k": (5,)}, ("--top-k 5", "64 has 4 pages", "--top-k 4")),
        ({"top_k": (0,)}, ("--top-k 0", "--top-k 16")),
        ({"past": (100,)}, ("--past 100", "--past 96")),
        ({"past": (8,), "top_k": (1,)}, ("--past 8", "--past 16")),
        ({"group": 0}, ("group must be positive", "Got 0")),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as raised:
        replace(TINY, **settings)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_row_counts_what_is_visited() -> None:
    rows = list(bench_attention(TINY, made_up, CPU, flex=False))
    assert [(row.lists, row.top_k, row.past) for row in rows] == [
        *(("random", 1, 64), ("random", 3, 64), ("zipf", 3, 64), ("hot page", 3, 64)),
        *(("random", 1, 96), ("random", 3, 96)),
    ]
    visited = 4 * 4 * 128 * (3 * 16) * 16  # two products of 2 operations each: heads, queries, keys, head_dim
    assert rows[1].forward == Timed(2.0, visited) and rows[1].backward == Timed(10.0, 2.5 * visited)
    assert rows[1].forward.tflops == pytest.approx(visited / 2e-3 / 1e12)
    assert rows[1].forward.floor_ms == pytest.approx(visited / 700e12 * 1e3)
    assert (rows[1].index_ms, rows[1].selection_ms, rows[1].alone_ms) == (0.5, 0.25, 2.125)
    # The dense call visits 32 keys in half the time and a fifth of it; so it does 4/3 and 10/3 times as much per ms.
    assert rows[1].forward_ratio == pytest.approx((48 / 2.0) / (32 / 1.0))
    assert rows[1].backward_ratio == pytest.approx((48 / 10.0) / (32 / 2.0))
    assert rows[1].notes == ("dense is torch over 32 keys",)


def test_the_forward_is_measured_alone_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's figure is that of training; the dense call has nothing to merge with, so the other stands beside it."""
    inputs = AttentionInputs(TINY, 64, CPU)
    lists = inputs.lists("random", 3)
    pages = (inputs.q_HTD, inputs.pool, inputs.slots_GN, lists)
    alone = page_attention_forward(*pages, scale=TINY.scale)
    merged = page_attention_forward(*pages, scale=TINY.scale, others=inputs.dense)
    tasks = attention.own_tasks(inputs, lists, *merged)
    for name, wanted in (("forward alone", alone), ("forward", merged)):
        found: Any = tasks[name].run(tasks[name].prepare())
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert not torch.equal(alone[0], merged[0])


def test_pages_in_8_bits_are_checked_and_measured() -> None:
    sizes = replace(TINY, float8=True)
    check_kernels(CheckSize(16, 2, 3, 16, 64), torch.float32, CPU, float8=True)
    rows = list(bench_attention(sizes, made_up, CPU, flex=False))
    assert all(row.forward.ms == 2.0 for row in rows)
    inputs, plain = AttentionInputs(sizes, 64, CPU), AttentionInputs(TINY, 64, CPU)
    assert inputs.scales_GN2 is not None and inputs.pool.element_size() == 1
    lists = inputs.lists("random", 3)
    out, exact = (
        page_attention_forward(x.q_HTD, x.pool, x.slots_GN, lists, scale=TINY.scale, scales_GN2=x.scales_GN2)[0]
        for x in (inputs, plain)
    )
    assert 1e-4 < float((out - exact).norm() / exact.norm()) < 0.1


def test_page_gradients_have_a_row_for_each_dtype() -> None:
    sizes = replace(TINY, page_grad_dtypes=(torch.float32, torch.bfloat16))
    seen: list[set[str]] = []

    def measure(tasks: Mapping[str, Task]) -> dict[str, float]:
        seen.append(set(tasks))
        return made_up(tasks)

    rows = list(bench_attention(sizes, measure, CPU, flex=False))
    assert len(rows) == sizes.num_rows == 12 and len(seen) == 6, "both in the same turns"
    assert all({"backward float32", "backward bfloat16"} <= names for names in seen)
    assert [(row.page_grads, row.backward.ms) for row in rows[:4]] == [("float32", 10.0), ("bfloat16", 8.0)] * 2
    assert rows[0].forward == rows[1].forward and rows[1].as_dict()["page_grads"] == "bfloat16"
    inputs = AttentionInputs(sizes, 64, CPU)
    lists = inputs.lists("random", 3)
    tasks = attention.own_tasks(inputs, lists, *inputs.dense)
    tasks["backward bfloat16"].run(tasks["backward bfloat16"].prepare())
    held = {dtype: bool(pool.any()) for dtype, pool in inputs.grad_pools.items()}
    assert held == {torch.float32: False, torch.bfloat16: True}


def test_selection_is_measured_as_training_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library's mean keys per page, and the library's means of queries."""
    inputs = AttentionInputs(replace(TINY, page_tokens=128, past=(1024,)), 1024, CPU)
    assert inputs.parts == 8 and inputs.centroids_GCD.shape == (2, 8 * 8, 16)
    asked: dict[str, Any] = {}

    def mass(pooled: torch.Tensor, centroids: torch.Tensor, **settings: Any) -> torch.Tensor:
        asked.update(settings, rows=pooled.shape[1], keys=centroids.shape[1])
        return page_mass(pooled, centroids, **settings)

    monkeypatch.setattr(attention, "page_mass", mass)
    pages = attention.own_tasks(inputs, inputs.lists("random", 3), *inputs.dense)["selection"].run(None)
    assert isinstance(pages, torch.Tensor) and pages.shape == (2, 2, 3)
    assert asked == {"parts": 8, "scale": 0.25, "block_rows": 4, "rows": 8, "keys": 64}


def test_the_table_shows_figures_and_gaps() -> None:
    rows = list(bench_attention(TINY, made_up, CPU, flex=False))
    lines = attention_table([*rows, AttentionRow("random", 64, 2**20, notes=("too long",))]).splitlines()
    assert len({line.count("|") for line in lines[:9]}) == 1
    assert lines[3].startswith("| random | 3 | 64 | 2.00 | 0.00 | 0 | 0.75x | - | 2.12 | float32 | 10.00 |")
    assert lines[3].endswith("| 0.500 | 0.250 | 0 / 0 |") and "| pool + score + top ms |" in lines[0]
    assert lines[8] == "| random | 64 | 1,048,576" + " | -" * 6 + " | float32" + " | -" * 7 + " | - / - |"
    assert lines[9:] == ["- dense is torch over 32 keys", "- too long"]


def test_rows_are_json_without_nan() -> None:
    for row in (AttentionRow("random", 1, 64), next(bench_attention(TINY, made_up, CPU, flex=False))):
        json.dumps(row.as_dict(), allow_nan=False)


def test_a_past_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(sizes: AttentionSizes, past: int, device: torch.device) -> AttentionInputs:
        if past > 64:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return AttentionInputs(sizes, past, device)

    monkeypatch.setattr(attention, "AttentionInputs", scarce)
    rows = list(bench_attention(TINY, made_up, CPU, flex=False))
    assert [math.isnan(row.forward.ms) for row in rows] == [False] * 4 + [True] * 2
    assert rows[-1].notes == ("past 96 is left out: tried to allocate 2 GiB",)


@pytest.mark.parametrize("kind", list(KINDS))
def test_lists_are_distinct_ascending_and_repeatable(kind: Any) -> None:
    settings: dict[str, Any] = {"num_groups": 2, "num_blocks": 40, "num_pages": 50, "top_k": 8, "block_tokens": 64}
    lists = draw_lists(kind, **settings, device=CPU, seed=3)
    pages = lists.pages_GBK
    assert pages.dtype == torch.int32 and pages.shape == (2, 40, 8) and (pages.diff(dim=-1) > 0).all()
    assert pages.min() >= 0 and pages.max() < 50 and (lists.counts_GB == 8).all()
    assert torch.equal(pages, draw_lists(kind, **settings, device=CPU, seed=3).pages_GBK)
    most = torch.stack([row.flatten().bincount(minlength=50) for row in pages]).amax(1)
    # 40 lists of 8 among 50 pages: 6.4 lists per page on average.
    assert {"random": most < 16, "zipf": most > 25, "hot page": most == 40}[kind].all()
