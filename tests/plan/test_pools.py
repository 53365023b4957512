"""Pages between device and host: shares, limits, and what is said when they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomb_accel.plan import MemoryPlan, PageDemand, plan_memory
from oomb_accel.plan.sizes import GIB, size_text


def demand(values: int, gradients: int, **changes: Any) -> PageDemand:
    sizes: dict[str, Any] = {
        **{"value_dtype": "bfloat16", "grad_dtype": "bfloat16", "value_bytes": values, "gradient_bytes": gradients},
        **{"least_value_bytes": min(values, 2 * GIB), "least_gradient_bytes": min(gradients, 2 * GIB)},
    }
    return PageDemand(**{**sizes, **changes})


def plan(of: PageDemand, free: int, *, host: int = 1000 * GIB, **changes: Any) -> MemoryPlan:
    settings: dict[str, Any] = {"activation_bytes": 0, "chunk_tokens": 8192, **changes}
    return plan_memory(of, free_device_bytes=free, host_budget_bytes=host, **settings)


def test_what_fits_stays_on_the_device() -> None:
    found = plan(demand(30 * GIB, 60 * GIB), 90 * GIB, host=0)
    assert (found.device_value_bytes, found.device_gradient_bytes, found.host_bytes) == (30 * GIB, 60 * GIB, 0)
    assert found.fits and found.message == ""


@pytest.mark.parametrize(
    ("values", "gradients", "free", "shares"),
    [
        (60, 60, 80, (60, 20)),  # values are whole, and gradients have the rest
        (60, 120, 80, (60, 20)),
        (120, 60, 80, (60, 20)),  # neither fits: a quarter is for gradients
        (120, 10, 80, (70, 10)),  # gradients are whole
    ],
)
def test_values_come_first(values: int, gradients: int, free: int, shares: tuple[float, float]) -> None:
    found = plan(demand(values * GIB, gradients * GIB), free * GIB)
    assert (found.device_value_bytes / GIB, found.device_gradient_bytes / GIB) == shares
    assert found.fits and found.host_bytes > 0


def test_activations_and_what_always_stays_are_taken_off_first() -> None:
    pages = demand(60 * GIB, 60 * GIB, mean_key_bytes=3 * GIB, list_bytes=GIB)
    found = plan(pages, 94 * GIB, activation_bytes=10 * GIB)
    # Mean keys lie where gradients will be.
    assert (found.device_value_bytes, found.device_gradient_bytes) == (60 * GIB, 23 * GIB)


def test_the_host_takes_what_the_device_does_not_keep() -> None:
    pages = demand(100 * GIB, 60 * GIB)
    assert plan(pages, 80 * GIB, host=1000 * GIB).host_bytes == 84 * GIB  # 2 GiB of each pool only come and go
    assert plan(pages, 80 * GIB, host=84 * GIB).fits
    assert not plan(pages, 80 * GIB, host=83 * GIB).fits
    # Values never leave, and have 30 GiB.
    assert plan(demand(30 * GIB, 120 * GIB), 80 * GIB).host_bytes == (120 - 50 + 2) * GIB


def test_gradients_that_do_not_exist_yet_need_no_room() -> None:
    lazy = demand(60 * GIB, 60 * GIB, most_bytes=100 * GIB)
    assert plan(lazy, 80 * GIB, host=22 * GIB).fits
    assert not plan(lazy, 80 * GIB, host=21 * GIB).fits
    assert not plan(demand(60 * GIB, 60 * GIB), 80 * GIB, host=22 * GIB).fits
    few = demand(100 * GIB, 60 * GIB, most_bytes=101 * GIB)  # a pool of gradients is no place for values
    assert plan(few, 40 * GIB, host=72 * GIB).fits and not plan(few, 40 * GIB, host=71 * GIB).fits


def test_the_room_of_values_that_are_gone_is_none_for_gradients() -> None:
    few = demand(60 * GIB, 100 * GIB, most_bytes=70 * GIB, most_gradient_bytes=40 * GIB)
    assert plan(few, 80 * GIB).host_bytes == (40 - 18) * GIB


def test_too_little_host_memory() -> None:
    found = plan(demand(60 * GIB, 60 * GIB), 80 * GIB, host=30 * GIB)
    assert not found.fits
    what, numbers, remedy = found.message.splitlines()
    assert what == "Host memory is too small for the pages of this document."
    assert "42.0 GiB are needed beside 80.0 GiB on the GPU; 30.0 GiB may be used" in numbers
    assert "page_dtype='float8'" in remedy and "12.0 GiB" in remedy
    wide = plan(demand(60 * GIB, 120 * GIB, grad_dtype="float32"), 80 * GIB, host=30 * GIB)
    assert "page_grad_dtype='bfloat16'" in wide.message
    small = plan(demand(30 * GIB, 60 * GIB, value_dtype="float8"), 30 * GIB, host=30 * GIB)
    assert "float8" not in small.message and "bfloat16" not in small.message


def test_without_offload() -> None:
    found = plan(demand(60 * GIB, 60 * GIB), 80 * GIB, offload=False)
    assert not found.fits and found.host_bytes == 0
    assert "They take 120.0 GiB (60.0 GiB of K and V, 60.0 GiB of gradients); 80.0 GiB are free" in found.message
    assert found.message.splitlines()[2] == "  Set offload='auto', which keeps the rest in host memory."


def test_offload_leaves_what_layers_need_at_once() -> None:
    """Of pages that would fit, too; but a limit is a limit, and what is no more than they need stays."""
    pages = demand(30 * GIB, 60 * GIB, most_bytes=80 * GIB)
    found = plan(pages, 200 * GIB, offload=True)
    assert (found.device_value_bytes, found.device_gradient_bytes, found.host_bytes) == (2 * GIB, 2 * GIB, 80 * GIB)
    limited = plan(pages, 200 * GIB, offload=True, device_pages_bytes=40 * GIB)
    assert limited == plan(pages, 200 * GIB, device_pages_bytes=40 * GIB) and limited.device_value_bytes == 30 * GIB
    assert not plan(demand(2 * GIB, GIB), 200 * GIB, offload=True).offloads


def test_offload_that_the_host_has_no_room_for() -> None:
    pages = demand(30 * GIB, 60 * GIB)
    found = plan(pages, 200 * GIB, host=80 * GIB, offload=True)
    assert not found.fits and "90.0 GiB are needed beside 4.0 GiB on the GPU" in found.message
    assert found.message.splitlines()[2] == "  Set offload='auto', which keeps on the GPU what it has room for."
    assert plan(pages, 200 * GIB, host=80 * GIB).fits
    neither = plan(pages, 14 * GIB, host=70 * GIB, offload=True)
    assert not neither.fits and "offload" not in neither.message


def test_too_small_a_device_names_a_chunk_that_fits() -> None:
    pages = demand(60 * GIB, 60 * GIB)
    found = plan(pages, 33 * GIB, activation_bytes=40 * GIB)
    assert not found.fits and found.message.splitlines()[2] == "  Set chunk_tokens=4096."
    assert plan(pages, 33 * GIB, activation_bytes=20 * GIB, chunk_tokens=4096).fits
    hopeless = plan(pages, -GIB, activation_bytes=40 * GIB)
    assert "nothing is free beside 40.0 GiB" in hopeless.message and "ZeRO 3" in hopeless.message
    divided = plan(pages, -GIB, activation_bytes=40 * GIB, zero_stage=3)
    assert "more GPUs" in divided.message and "ZeRO 3" not in divided.message


def test_a_chunk_that_fits_the_device_must_leave_the_host_enough() -> None:
    """What the device keeps of 120 GiB of pages grows with what shorter chunks leave it."""
    pages = demand(60 * GIB, 60 * GIB, grad_dtype="float32")
    found = plan(pages, 33 * GIB, host=101 * GIB, activation_bytes=40 * GIB)
    assert found.message.splitlines()[2] == "  Set chunk_tokens=2048."
    assert not plan(pages, 33 * GIB, host=101 * GIB, activation_bytes=20 * GIB, chunk_tokens=4096).fits
    assert plan(pages, 33 * GIB, host=101 * GIB, activation_bytes=10 * GIB, chunk_tokens=2048).fits
    both = plan(pages, 33 * GIB, host=85 * GIB, activation_bytes=40 * GIB)
    assert both.message.splitlines()[2] == "  Set chunk_tokens=4096 and page_grad_dtype='bfloat16'."
    nothing = plan(pages, 33 * GIB, host=50 * GIB, activation_bytes=40 * GIB).message.splitlines()[2]
    assert nothing.startswith(
        "  chunk_tokens=4096 and page_grad_dtype='bfloat16' are part of it; host memory, of which"
    )


def test_a_limit_on_the_pools() -> None:
    pages = demand(60 * GIB, 60 * GIB)
    assert plan(pages, 200 * GIB, device_pages_bytes=20 * GIB).device_value_bytes == 15 * GIB
    refused = plan(pages, 200 * GIB, device_pages_bytes=3 * GIB)
    assert not refused.fits and "Set device_pages_gib=4.0 or more" in refused.message
    assert plan(pages, 200 * GIB, device_pages_bytes=4 * GIB).fits


@given(
    values=st.integers(1, 300),
    gradients=st.integers(1, 600),
    free=st.integers(0, 400),
    host=st.integers(0, 400),
    cap=st.none() | st.integers(0, 400),
)
def test_a_plan_never_takes_more_than_there_is(
    values: int, gradients: int, free: int, host: int, cap: int | None
) -> None:
    pages = demand(values * GIB, gradients * GIB)
    limit = None if cap is None else cap * GIB
    found = plan(pages, free * GIB, host=host * GIB, device_pages_bytes=limit)
    assert found.fits == (found.message == "")
    if not found.fits:
        assert len(found.message.splitlines()) == 3
        return
    pools = found.device_value_bytes + found.device_gradient_bytes
    assert pools <= min(free, free if cap is None else cap) * GIB
    assert found.host_bytes <= host * GIB
    assert pools + found.host_bytes >= pages.living_bytes
    assert pages.least_value_bytes <= found.device_value_bytes <= pages.value_bytes
    assert pages.least_gradient_bytes <= found.device_gradient_bytes <= pages.gradient_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (-GIB, "0 GiB"),
        (0, "0 GiB"),
        (1000, "less than 1 MiB"),
        (6 << 20, "6 MiB"),
        (GIB // 10 - 1, "102 MiB"),
        (GIB // 10, "0.1 GiB"),
        (1234 * GIB, "1,234.0 GiB"),
    ],
)
def test_small_sizes_are_no_zeros(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_a_refusal_has_no_zeros_for_small_sizes() -> None:
    small = plan(demand(6 << 20, 12 << 20), 3 << 20, host=GIB // 64, offload=False)
    assert "They take 18 MiB (6 MiB of K and V, 12 MiB of gradients); 3 MiB are free" in small.message
