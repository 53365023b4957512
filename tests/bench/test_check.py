"""Kernels are checked before they are timed; wrong ones are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from oomb_accel.bench import check
from oomb_accel.bench.attention import bench_attention
from oomb_accel.bench.check import CheckSize, check_kernels
from oomb_accel.bench.timing import Task
from oomb_kernels import page_attention_backward, page_attention_forward
from oomb_kernels.page_backward import unit_blocks
from oomb_kernels.page_index import build_page_index
from tests.bench.sizes import CPU, TINY


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
