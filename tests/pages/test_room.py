"""How device memory is divided: it is not exceeded, values come first, and an error names what would do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from oomb_accel.pages import PageShape, PassNeeds, divide, working_bytes
from oomb_accel.schedule import ChunkSchedule

GIB = 2**30
HEADS, PAGE, CHUNK = 2, 4, 16
NEEDS = PassNeeds(chunk_pages=4, span_pages=2, listed_pages=5)


def shape(*windows: int | None, sparse: tuple[int, ...] = (), grad_dtype: torch.dtype = torch.float32) -> PageShape:
    return PageShape(
        num_layers=len(windows),
        num_kv_heads=HEADS,
        head_dim=8,
        page_tokens=PAGE,
        grad_dtype=grad_dtype,
        windows=windows,
        sparse_layers=frozenset(sparse),
        sink_pages=1,
    )


def schedule(*lengths: int) -> ChunkSchedule:
    return ChunkSchedule.build(lengths, [], chunk_tokens=CHUNK, page_tokens=PAGE)


SHAPES = st.builds(
    lambda windows, dense, half: shape(
        *windows,
        sparse=tuple(i for i, window in enumerate(windows) if window is None and i != dense),
        grad_dtype=torch.bfloat16 if half else torch.float32,
    ),
    st.lists(st.sampled_from([None, None, None, 5, 40]), min_size=1, max_size=6),
    st.integers(0, 6),
    st.booleans(),
)
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=3)
SHARES = st.floats(0, 1.1)


@example(shape(None, sparse=(0,), grad_dtype=torch.bfloat16), [49], torch.float32, 1.0)  # sinks have theirs apart
@given(SHAPES, LENGTHS, st.sampled_from([torch.float32, torch.bfloat16]), SHARES)
def test_rooms_fit(like: PageShape, lengths: list[int], dtype: torch.dtype, share: float) -> None:
    plan = schedule(*lengths)
    whole_bytes = like.num_bytes(plan, dtype)
    given = int(whole_bytes * share)
    try:
        rooms = divide(like, plan, dtype, NEEDS, given)
    except ValueError as error:
        (remedy,) = re.findall(r"device_pages_gib=([\d.e-]+) ", str(error))
        assert len(str(error).splitlines()) == 3
        assert float(remedy) * GIB > given
        divide(like, plan, dtype, NEEDS, int(float(remedy) * GIB))
        return
    assert (rooms is None) == (whole_bytes <= given)
    if rooms is None:
        return
    counts = [like.num_records(layer, plan) for layer in range(like.num_layers)]
    most_needed = max(min(NEEDS.of_layer(like, layer), count) for layer, count in enumerate(counts))
    sizes = {"values": like.slot_bytes(dtype), "gradients": like.slot_bytes(like.grad_dtype)}
    used, away = like.fixed_bytes(plan), 0
    in_forward = used + like.mean_key_bytes(plan, dtype)
    for kind, room in (("values", rooms.values), ("gradients", rooms.gradients)):
        num_slots = room.num_slots if room else sum(counts)
        used += sizes[kind] * num_slots
        in_forward += sizes[kind] * num_slots if kind == "values" else 0
        assert rooms.device_bytes[kind] == sizes[kind] * num_slots  # type: ignore[index]
        assert rooms.all_bytes[kind] == sizes[kind] * sum(counts)  # type: ignore[index]
        if room is None:
            continue
        assert room.reserve >= most_needed, "a layer finds room for what it needs at once"
        assert num_slots < sum(counts)
        assert all(0 <= quota <= count for quota, count in zip(room.quotas, counts, strict=True))
        for quota, count in zip(room.quotas, counts, strict=True):  # in proportion, down to a whole record
            assert 0 <= (sum(room.quotas) + like.num_layers) * count / sum(counts) - quota < like.num_layers + 1
        away += sizes[kind] * (sum(counts) - sum(room.quotas))
    assert max(used, in_forward) <= given, "mean keys go before gradients come"
    assert rooms.host_bytes == away
    if rooms.values is not None and rooms.gradients is not None:
        assert given - used < (like.num_layers + 1) * sum(sizes.values()), "nothing to speak of is left over"


def test_values_stay_as_a_whole_where_they_can() -> None:
    like, plan = shape(None, None), schedule(400)
    records, size = like.num_slots(plan), like.slot_bytes(torch.float32)
    ahead = 3 * HEADS * (NEEDS.chunk_pages + NEEDS.span_pages)
    rooms = divide(like, plan, torch.float32, NEEDS, (records + ahead) * size)
    assert rooms is not None and rooms.values is None
    assert rooms.gradients is not None and rooms.gradients.num_slots == ahead
    less = divide(like, plan, torch.float32, NEEDS, (records + ahead) * size - 1)
    assert less is not None and less.values is not None and less.gradients is not None
    quarter = (records + ahead) // 4
    assert abs(less.gradients.num_slots - quarter) <= 2, "a quarter is for gradients"
    assert sum(less.values.quotas) > sum(less.gradients.quotas)


def test_gradients_stay_as_a_whole_where_they_can() -> None:
    like, plan = shape(None, None), schedule(400)
    almost = like.num_bytes(plan, torch.float32) - 1
    rooms = divide(like, plan, torch.float32, NEEDS, almost)
    assert rooms is not None and rooms.values is None and rooms.gradients is not None
    assert like.num_slots(plan) - 1 - rooms.gradients.num_slots <= like.num_layers


def test_a_window_needs_the_pages_in_it_and_its_chunk() -> None:
    like = shape(None, 40, 5, None, sparse=(3,))
    assert [NEEDS.of_layer(like, layer) for layer in range(4)] == [HEADS * (4 + past) for past in (2, 10, 2, 5)]


def test_window_layers_get_room_by_what_they_keep() -> None:
    like, plan = shape(None, 5), schedule(400)
    counts = [like.num_records(layer, plan) for layer in range(2)]
    assert counts[0] == 4 * counts[1], "of four pages of a chunk one is in reach"
    rooms = divide(like, plan, torch.float32, NEEDS, like.num_bytes(plan, torch.float32) // 2)
    assert rooms is not None and rooms.values is not None
    assert abs(rooms.values.quotas[0] - 4 * rooms.values.quotas[1]) <= 4


@given(SHAPES, LENGTHS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_with_working_bytes_pages_come_ahead(like: PageShape, lengths: list[int], dtype: torch.dtype) -> None:
    plan = schedule(*lengths)
    rooms = divide(like, plan, dtype, NEEDS, working_bytes(like, plan, dtype, NEEDS))
    counts = [like.num_records(layer, plan) for layer in range(like.num_layers)]
    most_needed = max(min(NEEDS.of_layer(like, layer), count) for layer, count in enumerate(counts))
    for room in (rooms.values, rooms.gradients) if rooms is not None else ():
        assert room is None or room.num_slots >= 3 * most_needed - like.num_layers, "one in use, two on their way"


def test_a_small_pool_brings_ahead_before_it_keeps() -> None:
    like, plan = shape(None, None), schedule(400)
    least, size = HEADS * (NEEDS.chunk_pages + NEEDS.span_pages), like.slot_bytes(torch.float32)
    rooms = divide(like, plan, torch.float32, NEEDS, 8 * least * size)
    assert rooms is not None and rooms.values is not None and rooms.gradients is not None
    for room in (rooms.values, rooms.gradients):
        assert room.reserve == min(3 * least, room.num_slots)


@pytest.mark.parametrize("share", [0.3, 0.55, 0.7, 0.8, 0.99])
@pytest.mark.parametrize("like", [shape(None, None), shape(None, sparse=(0,)), shape(None, grad_dtype=torch.bfloat16)])
@pytest.mark.parametrize("float8", [False, True])
def test_too_little_names_no_setting_that_is_set_or_not_enough(like: PageShape, share: float, float8: bool) -> None:
    like, plan = replace(like, float8=float8), schedule(400)
    least = max(NEEDS.of_layer(like, layer) for layer in range(like.num_layers))
    sizes = [like.slot_bytes(like.value_dtype(torch.float32)), like.slot_bytes(like.grad_dtype)]
    given = like.fixed_bytes(plan) + int(share * sum(least * size for size in sizes))
    with pytest.raises(ValueError, match="too little memory for the pages of one chunk") as caught:
        divide(like, plan, torch.float32, NEEDS, given)
    remedy = str(caught.value).splitlines()[2]
    narrow, small = replace(like, grad_dtype=torch.bfloat16), replace(like, float8=True)
    for name, other in (("page_grad_dtype='bfloat16'", narrow), ("page_dtype='float8'", small)):
        assert (name in remedy) == (other != like and _has_room(other, plan, given)), remedy
    assert ("top_k" in remedy) == bool(like.sparse_layers)


def _has_room(like: PageShape, plan: ChunkSchedule, given: int) -> bool:
    try:
        divide(like, plan, torch.float32, NEEDS, given)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("least", [{"chunk_pages": 8}, {"listed_pages": 40}, {"span_pages": 30}])
def test_too_little_for_one_chunk(least: dict[str, Any]) -> None:
    """The error names what helps: each of these alone needs less."""
    like, plan, needs = shape(None, None, sparse=(1,)), schedule(400), replace(NEEDS, **least)
    enough = like.fixed_bytes(plan) + sum(
        max(needs.of_layer(like, layer) for layer in range(2)) * like.slot_bytes(dtype)
        for dtype in (torch.float32, like.grad_dtype)
    )
    assert divide(like, plan, torch.float32, needs, enough) is not None
    with pytest.raises(ValueError, match="too little memory for the pages of one chunk") as caught:
        divide(like, plan, torch.float32, needs, enough - 1)
    for name in ("chunk_tokens", "span_tokens", "top_k", "page_dtype", "device_pages_gib"):
        assert name in str(caught.value)
    assert divide(like, plan, torch.float32, NEEDS, enough - 1) is not None
