"""`oomb bench attention`: on the CPU with times that are made up, on a GPU at small size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from oomb_accel.bench import attention, check, figures, tune
from oomb_accel.bench.attention import AttentionInputs, AttentionSizes, bench_attention
from oomb_accel.bench.check import CheckSize, check_kernels
from oomb_accel.bench.figures import AttentionRow, Timed, attention_table
from oomb_accel.bench.flex import block_mask, flex_tasks
from oomb_accel.bench.lists import KINDS, draw_lists
from oomb_accel.bench.timing import Task
from oomb_accel.cli import bench, main
from oomb_kernels import page_attention_backward, page_attention_forward, page_mass
from oomb_kernels.page_backward import unit_blocks
from oomb_kernels.page_index import build_page_index
from oomb_kernels.page_tiles import Kernel, Tiles

CPU = torch.device("cpu")
TINY = AttentionSizes(
    head_dim=16,
    num_groups=2,
    group=2,
    chunk_tokens=128,
    page_tokens=16,
    block_tokens=64,
    top_k=(1, 3),
    past=(64, 96),
    dtype=torch.float32,
    span_tokens=32,
)
TIMES = {
    **{"forward": 2.0, "forward alone": 2.125, "backward float32": 10.0, "backward bfloat16": 8.0},
    **{"index": 0.5, "selection": 0.25, "dense forward": 1.0, "dense backward": 2.0},
}


def made_up(tasks: Mapping[str, Task]) -> dict[str, float]:
    """Runs every task once, as a real measure would, and answers with fixed times."""
    for task in tasks.values():
        task.run(task.prepare())
    return {name: TIMES[name] for name in tasks}


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu(monkeypatch)
    assert main(["bench", "attention", "--quick"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert "needs an NVIDIA GPU" in error[0] and torch.__version__ in error[1] and "oomb env" in error[2]


def test_a_misspelt_benchmark_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "atention"]) == 2
    assert "'attention'" in capsys.readouterr().err


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


def test_right_kernels_pass_the_check() -> None:
    found = check_kernels(CheckSize(16, 2, 3, 16, 64), torch.float32, CPU, (torch.float32, torch.bfloat16))
    rounded = found.pop("dK and dV in bfloat16")
    assert 1e-4 < rounded[0] <= rounded[1] < 0.01, "what a record holds is rounded to 8 bits"
    assert set(found) == {"output", "output of the pages alone", "dQ", "dK and dV"}
    assert all(error <= limit < 1e-5 for error, limit in found.values())


def test_the_check_cuts_a_page_and_has_an_empty_list() -> None:
    size = CheckSize(16, 2, 3, 16, 64)
    lists = check._lists(size, CPU, torch.Generator().manual_seed(1))
    index = build_page_index(lists, unit_blocks(lists, 2 * size.page_tokens * size.head_dim))
    _, num_partials, num_cut = index.totals_3.tolist()
    assert num_cut == 2 and num_partials == 4, "one page of each KV head, in two units"
    assert set(lists.counts_GB.flatten().tolist()) == {0, 1, 2, 3} and int(index.counts_K.max()) >= 10


def without_last_page(*args: Any, **kwargs: Any) -> Any:
    q, pool, slots, lists = args
    shorter = replace(lists, counts_GB=(lists.counts_GB - 1).clamp(min=0))
    return page_attention_forward(q, pool, slots, shorter, **kwargs)


def without_other_keys(*args: Any, others: Any, **kwargs: Any) -> Any:
    return page_attention_forward(*args, **kwargs)


def over_other_keys_only(*args: Any, others: Any, **kwargs: Any) -> Any:
    """Right where it merges, wrong where there is nothing to merge with."""
    out, lse = page_attention_forward(*args, others=others, **kwargs)
    return (out, lse) if others is not None else (torch.zeros_like(out), lse)


def without_page_gradients(*args: Any, **kwargs: Any) -> Any:
    dout, q, out, lse, pool, slots, _, _, lists = args
    return page_attention_backward(dout, q, out, lse, pool, slots, None, None, lists, **kwargs)


def without_cut_pages(*args: Any, **kwargs: Any) -> Any:
    """Without the kernel that adds up the units of a cut page."""
    grad_pool, grad_slots, lists = args[6:9]
    before = grad_pool.clone()
    dq = page_attention_backward(*args, **kwargs)
    cut = build_page_index(lists, unit_blocks(lists, grad_pool[0].numel())).cut_pages_U.long()
    slots = grad_slots.flatten()[cut].long()
    grad_pool[slots] = before[slots]
    return dq


def over_earlier_gradients(*args: Any, **kwargs: Any) -> Any:
    args[6].zero_()
    return page_attention_backward(*args, **kwargs)


def without_other_dq(*args: Any, dq_HTD: Any, **kwargs: Any) -> Any:
    return page_attention_backward(*args, **kwargs)


def with_half_dq(*args: Any, **kwargs: Any) -> Any:
    return page_attention_backward(*args, **kwargs) / 2


@pytest.mark.parametrize(
    ("name", "broken", "what"),
    [
        ("page_attention_forward", without_last_page, "output is off"),
        ("page_attention_forward", without_other_keys, "output is off"),
        ("page_attention_forward", over_other_keys_only, "output of the pages alone is off by 1"),
        ("page_attention_backward", without_page_gradients, "dK and dV is off by 1"),
        ("page_attention_backward", without_cut_pages, "dK and dV is off"),
        ("page_attention_backward", over_earlier_gradients, "dK and dV is off"),
        ("page_attention_backward", without_other_dq, "dQ is off"),
        ("page_attention_backward", with_half_dq, "dQ is off by 0.5"),
    ],
)
def test_the_speed_of_wrong_kernels_is_not_told(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, what: str
) -> None:
    monkeypatch.setattr(check, name, broken)

    def never(tasks: Mapping[str, Task]) -> dict[str, float]:
        raise AssertionError("measured")

    with pytest.raises(RuntimeError, match=what):
        list(bench_attention(TINY, never, CPU, flex=False))
    if what.startswith("dK and dV"):
        with pytest.raises(RuntimeError, match="dK and dV in bfloat16 is off"):
            list(bench_attention(replace(TINY, page_grad_dtypes=(torch.bfloat16,)), never, CPU, flex=False))


@pytest.mark.parametrize("kind", list(KINDS))
def test_flex_attention_gets_the_same_lists(kind: Any) -> None:
    """Only a compiled one computes with the blocks; that it does is checked before it is timed."""
    lists = draw_lists(kind, num_groups=2, num_blocks=3, num_pages=6, top_k=2, block_tokens=64, device=CPU, seed=1)
    mask = block_mask(lists, num_heads=4, num_queries=150, page_tokens=128)
    assert mask.BLOCK_SIZE == (64, 128) and mask.shape[-2:] == (150, 6 * 128)
    blocks_HBN = mask.to_dense()[0].bool()
    for head in range(4):
        listed = [block.nonzero().flatten().tolist() for block in blocks_HBN[head]]
        assert listed == lists.pages_GBK[head // 2].tolist()
    assert mask.kv_num_blocks.sum() == 0, "a partial block would run the mask function"


def test_other_results_of_flex_attention_are_not_timed() -> None:
    inputs = AttentionInputs(TINY, 64, CPU)
    lists = inputs.lists("random", 3)

    def run(expected: torch.Tensor) -> None:
        flex_tasks(
            inputs.q_HTD,
            inputs.dout_HTD,
            inputs.pool,
            inputs.slots_GN,
            lists,
            scale=TINY.scale,
            expected_HTD=expected,
            compiled=lambda q, k, v, **_: q + 0 * (k.sum() + v.sum()),
        )

    run(inputs.q_HTD)
    with pytest.raises(RuntimeError, match=r"(?s)something else.*0.1.*--no-flex"):
        run(inputs.q_HTD * 0.9)


def test_flex_attention_that_fails_leaves_a_note() -> None:
    def broken() -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise NotImplementedError("no compiler\nand many more lines")

        return call

    rows = list(bench_attention(TINY, made_up, CPU, flex=True, compile_flex=broken))
    assert all(row.notes[1] == f"no FlexAttention at past {row.past}: NotImplementedError: no compiler" for row in rows)
    assert all(row.forward.ms == 2.0 and math.isnan(row.flex_forward.ms) for row in rows)


def test_tuning_prefers_the_fastest_and_says_what_does_not_run() -> None:
    sizes = replace(TINY, page_tokens=64, past=(256,), top_k=(2,))
    fastest = Tiles(64, 32, 4, 3)

    def launch(tiles: Tiles) -> None:
        if tiles.num_stages == 4:
            raise RuntimeError("out of resource: shared memory")

    def measure(tasks: Mapping[str, Task]) -> dict[str, float]:
        return {name: 1.0 if name == repr(fastest) else 2.0 for name in tasks}

    tried: list[str] = []
    results = tune.tune(
        sizes, measure, CPU, launches=lambda _: {"forward": launch, "backward_sum": launch}, on_kernel=tried.append
    )
    assert tried == ["forward", "backward_sum"]
    forward = [result for result in results if result.kernel == "forward"]
    assert forward[0].tiles == fastest and forward[0].tflops == pytest.approx(4 * 4 * 128 * 128 * 16 / 1e-3 / 1e12)
    assert sum(result.is_chosen for result in forward) == 1
    assert forward[-1].tiles.num_stages == 4 and "shared memory" in forward[-1].problem
    assert all(64 % result.tiles.block_m == 0 == 64 % result.tiles.block_n for result in results)
    table = tune.tuning_table(results)
    assert {result.tiles.num_heads for result in results if result.kernel == "backward_sum"} == {1, 2}
    assert "| forward | 64 | 32 | 4 | 3 | 1 | 1.000 |" in table and "in use" in table and "do not run" in table
    json.dumps([result.as_dict() for result in results], allow_nan=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--flex"],
        ["--q-block", "64", "--head-dim", "64", "--dtype", "float16"],
        ["--page-grad-dtype", "float32", "bfloat16"],
    ],
)
def test_quick_run_on_a_gpu(tmp_path: Path, extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert main(["bench", "attention", "--quick", "--json", str(path), *extra]) == 0
    assert "| random | 4 | 8,192 |" in capsys.readouterr().out
    report = json.loads(path.read_text())
    grads = extra[1:] if "--page-grad-dtype" in extra else ["float32"]
    found = [(row["lists"], row["page_grads"]) for row in report["rows"]]
    assert found == [(kind, dtype) for kind in ("random", "zipf", "hot page") for dtype in grads]
    for row in report["rows"]:
        assert all(row[name] > 0 for name in ("forward_ms", "backward_ms", "index_ms", "selection_ms"))
        assert row["alone_ms"] > 0
        assert row["forward_ratio"] > 0 and row["backward_ratio"] > 0
        assert (row["flex_forward_ms"] is not None) == ("--flex" in extra)


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    assert main(["bench", "attention", "--quick", "--tune", "--page-tokens", "32", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["tuning"]
    assert {result["kernel"] for result in results} == set(get_args(Kernel))
    assert all(result["ms"] or not result["is_chosen"] for result in results)


def test_page_gradients_are_fp32_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    read = bench._parser().parse_args
    assert read(["attention"]).page_grad_dtype == ["float32"]
    assert read(["attention", "--page-grad-dtype", "float32", "bfloat16"]).page_grad_dtype == ["float32", "bfloat16"]
    with pytest.raises(ValueError, match="bfloat16"):
        read(["attention", "--page-grad-dtype", "float16"])
    plain = bench._plain(replace(TINY, page_grad_dtypes=(torch.bfloat16,)))
    assert json.loads(json.dumps(plain))["page_grad_dtypes"] == ["torch.bfloat16"]


def test_full_sizes_are_those_of_the_documented_table() -> None:
    """What is printed in docs/benchmarks.md is what the command does without options."""
    assert bench._FULL["top_k"] == [16, 32, 64] and bench._FULL["past"] == [2**17, 2**18, 2**19, 2**20]
    assert figures.FLOOR_FLOPS_PER_SECOND == 700e12
