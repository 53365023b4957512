"""Pages are counted as the engine allocates them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomb_accel.pages.shape import PageShape
from oomb_accel.plan import PageLayout, page_demand, sizes
from oomb_accel.plan.runs import runs_of
from oomb_accel.schedule import ChunkSchedule
from oomb_kernels import backward_workspace_bytes
from oomb_kernels.page_backward import _ds_bytes, _turn

BASE: dict[str, Any] = {
    **{"num_kv_heads": 2, "head_dim": 8, "windows": (None, None, 10), "sparse_layers": frozenset({1})},
    **{
        "value_dtype": "bfloat16",
        "grad_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "page_tokens": 4,
        "span_tokens": 16,
        "top_k": 2,
    },
    **{"q_block": 64, "sink_pages": 1, "recent_pages": 1, "page_budget": None},
}


def layout(**changes: Any) -> PageLayout:
    return PageLayout(**{**BASE, **changes})


def schedule(*documents: int, chunk_tokens: int = 16) -> ChunkSchedule:
    return ChunkSchedule.build(documents, range(sum(documents) - 1), chunk_tokens=chunk_tokens, page_tokens=4)


@given(
    documents=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    windows=st.lists(st.sampled_from([None, 2, 5, 9, 40]), min_size=1, max_size=4),
    sparse=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    sink_pages=st.integers(0, 3),
    float8=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_bytes_are_those_of_the_engine(
    documents: list[int],
    windows: list[int | None],
    sparse: bool,
    dtype: Literal["float32", "bfloat16"],
    sink_pages: int,
    float8: bool,
) -> None:
    sparse_layers = frozenset(n for n, window in enumerate(windows) if window is None) if sparse else frozenset()
    chunks = schedule(*documents)
    shape = PageShape(len(windows), 2, 8, 4, getattr(torch, dtype), tuple(windows), sparse_layers, sink_pages, float8)
    changes = {"windows": tuple(windows), "sparse_layers": sparse_layers, "sink_pages": sink_pages}
    demand = page_demand(
        layout(**changes, grad_dtype=dtype, value_dtype="float8" if float8 else "bfloat16"), runs_of(chunks)
    )
    fixed = demand.sink_gradient_bytes + demand.scale_bytes
    assert fixed == shape.fixed_bytes(chunks) == demand.resident_bytes - demand.list_bytes
    assert demand.mean_key_bytes == shape.mean_key_bytes(chunks, torch.bfloat16) <= demand.least_gradient_bytes
    assert demand.value_bytes + demand.gradient_bytes + fixed == shape.num_bytes(chunks, torch.bfloat16)
    assert demand.value_bytes == shape.num_slots(chunks) * shape.slot_bytes(shape.value_dtype(torch.bfloat16))


@given(st.integers(1, 600))
def test_parts_of_a_page_are_a_power_of_two_and_no_shorter_than_16_tokens(page_tokens: int) -> None:
    parts = sizes.parts_of(page_tokens)
    assert page_tokens % parts == 0 and parts & (parts - 1) == 0 and page_tokens // parts >= min(16, page_tokens)


@given(
    num_kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    num_tokens=st.integers(1, 9000),
    q_block=st.sampled_from([64, 128]),
    top_k=st.integers(1, 200),
    page_tokens=st.sampled_from([16, 128, 256]),
    head_dim=st.sampled_from([64, 128]),
)
def test_the_backward_works_in_what_the_kernels_take(
    num_kv_heads: int, group: int, num_tokens: int, q_block: int, top_k: int, page_tokens: int, head_dim: int
) -> None:
    common = {"num_heads": group * num_kv_heads, "page_tokens": page_tokens, "head_dim": head_dim}
    ours = sizes.page_backward_bytes(
        **common, num_kv_heads=num_kv_heads, num_blocks=-(-num_tokens // q_block), q_block=q_block, top_k=top_k
    )
    assert ours == backward_workspace_bytes(
        **common, num_groups=num_kv_heads, num_tokens=num_tokens, block_tokens=q_block, room=top_k, itemsize=2
    )
    del common["head_dim"]
    blocks = -(-num_tokens // q_block)
    twice = sizes.scores_are_formed_twice(
        **common, num_kv_heads=num_kv_heads, num_blocks=blocks, q_block=q_block, top_k=top_k
    )
    of_a_head = _ds_bytes((num_kv_heads, blocks, top_k), group * num_kv_heads, page_tokens, q_block, 2)
    assert twice == (_turn(num_kv_heads, of_a_head) == 0)


def test_distinct_pages_lie_between_one_list_and_all_candidates() -> None:
    one_list, many_lists = layout(), layout(q_block=1)
    assert one_list.distinct_pages(4, 64) == 4  # everything is attended to
    assert one_list.distinct_pages(50, 64) == 2 + 2
    assert 2 + 40 < many_lists.distinct_pages(50, 64) < 50
    assert layout(q_block=1, distinct=0.25).distinct_pages(50, 64) == 2 + 12
    assert layout(q_block=1, page_budget=7).distinct_pages(50, 64) == 2 + 7


def test_gradients_of_selected_pages_come_one_by_one() -> None:
    long = schedule(400)
    all_at_once = page_demand(layout(sparse_layers=frozenset()), runs_of(long))
    one_by_one = page_demand(
        layout(windows=(None,) * 3, sparse_layers=frozenset({0, 1, 2}), distinct=0.0), runs_of(long)
    )
    assert all_at_once.living_bytes == all_at_once.value_bytes + all_at_once.gradient_bytes
    assert one_by_one.value_bytes < one_by_one.living_bytes < one_by_one.value_bytes + one_by_one.gradient_bytes


def test_a_device_must_hold_three_layers_of_one_chunk() -> None:
    demand = page_demand(layout(windows=(None,) * 9, sparse_layers=frozenset()), runs_of(schedule(400)))
    record = sizes.record_bytes(4, 8, "bfloat16")
    assert demand.least_value_bytes == 3 * 2 * (16 // 4 + 16 // 4) * record
    short = page_demand(layout(), runs_of(schedule(20)))
    assert short.least_value_bytes <= short.value_bytes


def test_a_document_of_one_chunk_has_no_pages() -> None:
    demand = page_demand(layout(), runs_of(schedule(16)))
    assert demand.living_bytes == demand.resident_bytes == demand.least_value_bytes == 0
