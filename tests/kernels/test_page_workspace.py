"""The memory that the backward of page attention works in: what it takes, and what it does where there is little."""

from functools import partial
from typing import Any

import pytest
import torch

from oomb_kernels import backward_workspace_bytes, page_backward
from oomb_kernels.page_backward import unit_blocks
from oomb_kernels.page_index import launch_build_page_index
from tests.kernels.page_checks import KERNELS, PUBLIC, check, launch_backward, run
from tests.kernels.page_reference import PageProblem, make_problem, plain_page_attention
from tests.kernels.reference import INTERPRETED

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

AS_PUBLIC = KERNELS._replace(backward=partial(launch_backward, turn=None))
QWEN_7B: dict[str, int] = {"num_heads": 28, "num_groups": 4, "page_tokens": 128, "head_dim": 128, "itemsize": 2}


def sizes_of(problem: PageProblem) -> dict[str, int]:
    num_heads, num_tokens, head_dim = problem.q_HTD.shape
    return {
        "num_heads": num_heads,
        "num_groups": len(problem.slots_GN),
        "num_tokens": num_tokens,
        "block_tokens": problem.lists.block_tokens,
        "room": problem.lists.pages_GBK.shape[2],
        "page_tokens": problem.pool.shape[2],
        "head_dim": head_dim,
        "itemsize": problem.q_HTD.element_size(),
    }


def small_problem(dtype: torch.dtype = torch.float32, **settings: Any) -> PageProblem:
    return make_problem(
        dtype=dtype, tokens=37, block_tokens=16, groups=3, group=2, page_tokens=16, pattern="hot and another",
        others="some", **settings,
    )  # fmt: skip


def ds_of_a_head(problem: PageProblem) -> int:
    """Bytes: every query block, query head and list entry has a page's columns of a block's rows."""
    sizes = sizes_of(problem)
    visits = 3 * sizes["room"] * sizes["num_heads"] // sizes["num_groups"]  # 37 tokens are 3 blocks of 16
    return visits * sizes["page_tokens"] * sizes["block_tokens"] * sizes["itemsize"]


@pytest.mark.parametrize("heads", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@INTERPRETED
def test_what_is_taken_is_what_is_told(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int) -> None:
    """With room for some KV heads, or for none, in which case the result is right as well."""
    problem = small_problem(dtype)
    monkeypatch.setattr(page_backward, "_DS_BYTES", heads * ds_of_a_head(problem) + 15)
    turns: list[range] = []
    taken: set[int] = set()
    launch = page_backward.launch_page_dkv

    def spied(*args: Any, **settings: Any) -> None:
        stats, index, groups, ds = args[2], *args[8:11]
        turns.append(groups)
        partials = 4 * index.max_partials * problem.pool[0].numel()
        taken.add(stats.nbytes + partials + (0 if ds is None else ds.nbytes))
        launch(*args, **settings)

    most = unit_blocks(problem.lists, problem.pool[0].numel())
    monkeypatch.setattr(page_backward, "launch_page_dkv", spied)
    check(AS_PUBLIC._replace(backward=partial(launch_backward, turn=None, max_blocks=most)), problem)
    assert taken == {backward_workspace_bytes(**sizes_of(problem))}
    size = min(heads, 3) or 3
    assert turns == [range(first, min(first + size, 3)) for first in range(0, 3, size)]


@pytest.mark.parametrize(("room", "heads"), [(16, 4), (32, 2), (64, 1), (128, 0)])
def test_ds_takes_a_gib_at_most(room: int, heads: int) -> None:
    head_bytes = 64 * room * 7 * 128 * 128 * 2
    assert heads == min(4, 2**30 // head_bytes)
    total = backward_workspace_bytes(**QWEN_7B, num_tokens=8192, block_tokens=128, room=room)
    rest = total - heads * head_bytes - 2 * 28 * 8192 * 4
    assert 0 < rest <= 256 * 2**20, "partial sums"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_more_is_allocated_than_is_told() -> None:
    problem = make_problem(
        dtype=torch.bfloat16, device="cuda", tokens=2100, block_tokens=128, groups=4, group=7, head_dim=128,
        page_tokens=128, pages=24, pattern="many", others="some",
    )  # fmt: skip
    truth = plain_page_attention(problem, torch.float64)
    run(PUBLIC, problem, truth)  # compiles
    index = launch_build_page_index(problem.lists, 8)
    fields = ("visits_KB", "counts_K", "units_U2", "ends_3K", "cut_pages_U")
    index_bytes = 2 * sum(getattr(index, name).nbytes for name in fields)  # and what it is made from
    out, lse = PUBLIC.forward(problem.q_HTD, problem.pool, problem.slots_GN, problem.lists, scale=problem.scale)
    grads = torch.zeros_like(problem.pool, dtype=torch.float32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    PUBLIC.backward(
        problem.dout_HTD, problem.q_HTD, out, lse, problem.pool, problem.slots_GN, grads, problem.slots_GN,
        problem.lists, scale=problem.scale, seed=0,
    )  # fmt: skip
    taken = torch.cuda.max_memory_allocated() - before
    told = backward_workspace_bytes(**sizes_of(problem))
    assert told * 0.8 < taken < told + problem.q_HTD.nbytes + index_bytes + 2**20
