"""Records of several kinds in one host memory: what one does not need, another takes."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from oomb_accel.host import HostMemoryError, HostStore
from oomb_accel.pages import DeviceRoom, HostRoom, PageShape, TieredPages
from oomb_accel.schedule import PageRange
from tests.harness.late import LateMover
from tests.harness.slabs import plain_store

PAGES = 8
SHAPE = PageShape(1, 1, head_dim=2, page_tokens=1, grad_dtype=torch.float32, windows=(None,))
SMALL, LARGE = SHAPE.slot_bytes(torch.float32), SHAPE.slot_bytes(torch.float64)


def records(room: HostRoom, mover: LateMover, dtype: torch.dtype = torch.float32) -> TieredPages:
    """Of which one stays on the device, the last; three have room there."""
    return TieredPages(
        SHAPE,
        PAGES,
        DeviceRoom((1,), 2),
        dtype,
        torch.device("cpu"),
        room,
        mover,
        lambda layer, places: places.astype(np.float32),
    )


def write(kept: TieredPages, mover: LateMover, page: int, value: float) -> None:
    pages = PageRange(page, page + 1)
    kept.add(0, pages)
    slot = int(kept.use(0, pages, write=True))
    mover.compute(lambda: kept.pool.storage[slot].fill_(value))
    kept.settle(0)


def read(kept: TieredPages, mover: LateMover, page: int) -> float:
    slot, found = int(kept.use(0, PageRange(page, page + 1))), list[float]()
    mover.compute(lambda: found.append(kept.pool.storage[slot].flatten()[0].item()))
    kept.settle(0)
    mover.synchronize()
    return found[0]


def filled(store: HostStore, dtype: torch.dtype) -> tuple[TieredPages, TieredPages, LateMover]:
    """Values 0 to 3, all of which the host has and the device one, and gradients, of this dtype."""
    room, mover = HostRoom(store), LateMover(seed=0, haste=0.0)
    values, gradients = records(room, mover), records(room, mover, dtype)
    for page in range(4):
        write(values, mover, page, page)
    values.use(0, PageRange(2, 4))
    values._worth = lambda layer, places: -places.astype(np.float32)
    assert read(values, mover, 0) == 0  # the host has 1, 2 and 3 alone, and 0 as the device
    values._worth = lambda layer, places: places.astype(np.float32)
    assert store.num_records == 4
    return values, gradients, mover


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as large", "larger"])
def test_copies_of_one_kind_make_room_for_another(dtype: torch.dtype) -> None:
    """As in the backward sweep: values come up, and keep a copy that gradients need the room of."""
    width = 1 if dtype == torch.float32 else 2
    store = plain_store(SMALL, records_per_slab=2, most_slabs=2 + width)
    values, gradients, mover = filled(store, dtype)
    for page in range(3):
        write(gradients, mover, page, 10 + page)
    assert [read(gradients, mover, page) for page in range(3)] == [10, 11, 12]
    assert [read(values, mover, page) for page in range(4)] == [0, 1, 2, 3]


def test_where_nothing_is_there_twice_memory_ends() -> None:
    store = plain_store(SMALL, records_per_slab=1, most_slabs=4)
    values, gradients, mover = filled(store, torch.float32)
    write(gradients, mover, 0, 10)
    write(gradients, mover, 1, 11)  # 0 takes the place of the value that the device has too
    with pytest.raises(HostMemoryError):
        write(gradients, mover, 2, 12)
    assert [read(values, mover, page) for page in (1, 2, 3)] == [1, 2, 3]


def test_records_that_nobody_has_any_more_are_not_asked() -> None:
    store = plain_store(SMALL, records_per_slab=1, most_slabs=4)
    values, gradients, mover = filled(store, torch.float32)
    del values
    gc.collect()
    write(gradients, mover, 0, 10)
    with pytest.raises(HostMemoryError):
        write(gradients, mover, 1, 11)
