"""TieredPages, one rule at a time: what waits for what, what leaves first, and what happens where memory ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from oomb_accel.host import HostMemoryError, HostStore
from oomb_accel.pages import DeviceRoom, HostRoom, PageShape, TieredPages, Wanted
from oomb_accel.pages.table import NO_SLOT
from oomb_accel.schedule import PageRange
from tests.harness.late import LateMover
from tests.harness.slabs import plain_store

LAYERS, PAGES = 2, 8
SHAPE = PageShape(LAYERS, num_kv_heads=1, head_dim=1, page_tokens=1, grad_dtype=torch.float32, windows=(None,) * 2)
RECORD_BYTES = SHAPE.slot_bytes(torch.float32)
ALL = np.zeros(1, np.int64)


class Bench:
    """Records of two layers with one head, whose streams do nothing before they must."""

    def __init__(
        self, quotas: tuple[int, int], reserve: int, *, store: HostStore | None = None, worth: list[float] | None = None
    ) -> None:
        self.mover = LateMover(seed=0, haste=0.0)
        self.store = store or plain_store(RECORD_BYTES)
        worths = np.array(worth or range(PAGES, 0, -1), np.float32)
        self.records = TieredPages(
            SHAPE,
            PAGES,
            DeviceRoom(quotas, reserve),
            torch.float32,
            torch.device("cpu"),
            HostRoom(self.store),
            self.mover,
            lambda layer, places: worths[places],
        )

    def write(self, layer: int, page: int, value: float) -> None:
        """Have the computing stream fill a record, which is added where there is none."""
        pages = PageRange(page, page + 1)
        if not self.records.exists(layer, pages).any():
            self.records.add(layer, pages)
        slot = int(self.records.use(layer, pages, write=True))
        self.mover.compute(lambda: self.records.pool.storage[slot].fill_(value))

    def expect(self, layer: int, pages: PageRange) -> bool:
        return self.records.expect(layer, [(pages, None)]) == 1

    def read(self, layer: int, page: int) -> list[float]:
        """What the computing stream will find; a list that it fills."""
        slot, found = int(self.records.use(layer, PageRange(page, page + 1))), list[float]()
        assert slot != NO_SLOT
        self.mover.compute(lambda: found.append(self.records.pool.storage[slot].flatten()[0].item()))
        return found

    def away(self, *pages: int) -> None:
        """Records of layer 0 that end up on the host, filled with their numbers."""
        for page in pages:
            self.write(0, page, float(page))
            self.records.settle(0)
        self.mover.synchronize()
        assert not self.on_device(0)

    def on_device(self, layer: int) -> list[int]:
        return np.flatnonzero(self.records._slots[layer, :, 0] != NO_SLOT).tolist()


def test_a_new_record_waits_until_its_slot_was_saved() -> None:
    bench = Bench((0, 0), 1)
    bench.write(0, 0, 7)
    bench.records.settle(0)
    bench.write(1, 0, 8)
    bench.records.settle(1)
    found = bench.read(0, 0)
    bench.mover.synchronize()
    assert found == [7]


def test_an_upload_waits_until_a_freed_record_was_read() -> None:
    bench = Bench((0, 0), 2)
    bench.away(1, 2, 3)
    found = bench.read(0, 1)
    bench.records.free(PageRange(1, 2))
    others = [bench.read(0, page) for page in (2, 3)]
    bench.mover.hurry()
    bench.mover.synchronize()
    assert found == [1] and others == [[2], [3]]


def test_an_upload_waits_until_a_record_that_left_was_read() -> None:
    bench = Bench((0, 0), 2)
    bench.away(1, 2, 3)
    found = bench.read(0, 1)
    bench.records.settle(0)
    others = [bench.read(0, page) for page in (2, 3)]
    bench.mover.hurry()
    bench.mover.synchronize()
    assert found == [1] and others == [[2], [3]]


def test_an_upload_waits_until_what_it_brings_was_saved() -> None:
    bench = Bench((0, 0), 2)
    bench.write(0, 1, 7)
    bench.records.settle(0)
    assert bench.expect(0, PageRange(1, 2))
    bench.mover.hurry()
    found = bench.read(0, 1)
    bench.mover.synchronize()
    assert found == [7]


@pytest.mark.parametrize("then", ["evicted", "freed"])
def test_an_upload_that_nobody_waited_for_does_not_hit_the_next_owner(then: str) -> None:
    bench = Bench((0, 0), 2)
    bench.away(1)
    assert bench.expect(0, PageRange(1, 2))
    if then == "freed":
        bench.records.free(PageRange(1, 2))
    for page in range(2):  # takes both slots
        bench.write(1, page, 5)
    assert bench.on_device(0) == [] and bench.on_device(1) == [0, 1]
    bench.mover.synchronize()  # the uploads come last
    found = [bench.read(1, page) for page in range(2)]
    bench.mover.synchronize()
    assert found == [[5], [5]]


def test_the_host_slot_of_a_freed_record_is_not_filled_under_an_upload() -> None:
    bench = Bench((0, 0), 2)
    bench.away(1)
    bench.expect(0, PageRange(1, 2))
    bench.records.free(PageRange(1, 2))
    assert bench.store.num_records == 0 and not bench.mover._up, "the upload was waited for"


def test_what_is_expected_stays_until_it_is_used_and_then_leaves() -> None:
    bench = Bench((0, 0), 3)
    bench.away(1, 2)
    assert bench.expect(0, PageRange(1, 3))
    bench.records.settle(0)
    assert bench.on_device(0) == [1, 2]
    bench.records.use(0, PageRange(1, 2))
    bench.records.settle(0)
    assert bench.on_device(0) == [2]
    bench.records.use(0, PageRange(2, 3), wanted=lambda: ALL)
    bench.records.settle(0)
    assert bench.on_device(0) == []


def test_what_is_forgotten_leaves() -> None:
    bench = Bench((0, 0), 3)
    bench.away(1, 2)
    assert bench.expect(0, PageRange(1, 3))
    bench.records.forget_expected()
    bench.records.settle(0)
    assert bench.on_device(0) == []


def test_what_others_expect_goes_back_where_slots_are_needed() -> None:
    bench = Bench((0, 0), 3)
    bench.away(1, 2)
    bench.write(1, 0, 5)
    bench.records.settle(1)
    assert bench.expect(0, PageRange(1, 3))
    for page in range(1, 4):
        bench.write(1, page, page + 10)
    assert bench.on_device(0) == [] and bench.on_device(1) == [1, 2, 3]
    bench.records.settle(1)
    found = [bench.read(0, 1), bench.read(0, 2), bench.read(1, 0), bench.read(1, 3)]
    bench.mover.synchronize()
    assert found == [[1], [2], [5], [13]]


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_a_layer_has_ahead_of_time_gives_way_to_a_larger_use(forgotten: bool) -> None:
    bench = Bench((0, 0), 4)
    bench.away(1, 2, 3)
    assert bench.expect(0, PageRange(1, 4))
    if forgotten:
        bench.records.forget_expected()
    bench.records.add(0, PageRange(4, 6))
    assert bench.on_device(0) == [1, 2, 4, 5], "the least worth, and no more than must"
    bench.records.add(0, PageRange(6, 8))
    assert bench.on_device(0) == [4, 5, 6, 7]
    bench.records.settle(0)
    found = [bench.read(0, page) for page in (1, 2)]
    bench.mover.synchronize()
    assert found == [[1], [2]]


def test_what_is_used_does_not_give_way_to_what_is_used_with_it() -> None:
    bench = Bench((0, 0), 5)
    bench.away(1, 2, 3, 4, 5, 6)
    assert bench.expect(0, PageRange(1, 5))
    slots = bench.records.use(0, PageRange(3, 7))
    assert NO_SLOT not in slots.flatten().tolist() and bench.on_device(0) == [1, 3, 4, 5, 6]
    found = [bench.read(0, page) for page in range(3, 7)]
    bench.mover.synchronize()
    assert found == [[3], [4], [5], [6]]


def test_room_for_the_largest_use_so_far_is_left() -> None:
    bench = Bench((0, 0), 3)
    bench.away(1, 2, 3)
    bench.records.use(0, PageRange(1, 3))
    bench.records.settle(0)
    assert bench.expect(0, PageRange(1, 2))
    assert not bench.expect(0, PageRange(2, 3)), "two slots are needed at once"
    assert bench.on_device(0) == [1]
    assert bench.expect(0, PageRange(1, 2)), "what is there costs nothing"


def test_the_least_worth_leave() -> None:
    bench = Bench((3, 0), 3, worth=[0, 5, 1, 4, 2, 3, 6, 7])
    for page in range(6):
        bench.write(0, page, page)
    bench.records.settle(0)
    assert bench.on_device(0) == [1, 3, 5]
    assert [bench.read(0, page) for page in (3, 5)] and not bench.mover._up, "they are read where they are"


def test_unchanged_records_are_copied_to_the_host_once() -> None:
    bench = Bench((0, 0), 2)
    bench.away(1, 2)
    for _ in range(3):
        for page in (1, 2):
            bench.read(0, page)
            bench.records.settle(0)
    assert bench.mover.num_bytes == {"up": 6 * RECORD_BYTES, "down": 2 * RECORD_BYTES}
    bench.write(0, 1, 9)
    bench.records.settle(0)
    assert bench.mover.num_bytes["down"] == 3 * RECORD_BYTES
    assert bench.store.num_records == 2, "into the same place"


def test_nobody_asks_what_is_wanted_where_nothing_is_away() -> None:
    bench = Bench((2, 0), 2)
    bench.write(0, 0, 3)
    bench.records.settle(0)

    def wanted() -> Wanted:
        raise AssertionError("the host would wait for the device")

    assert int(bench.records.use(0, PageRange(0, 1), wanted=wanted)) >= 0
    with pytest.raises(AssertionError, match="would wait"):
        bench.records.use(0, PageRange(0, 1), wanted=wanted, write=True)
    for page in (1, 2):
        bench.write(0, page, page)
    bench.records.settle(0)
    with pytest.raises(AssertionError, match="would wait"):
        bench.records.use(0, PageRange(0, 1), wanted=wanted)


def test_what_was_never_added_lies_nowhere() -> None:
    bench = Bench((2, 0), 2)
    bench.write(0, 1, 3)
    slots: Tensor = bench.records.use(0, PageRange(0, 3))
    assert slots.tolist() == [[NO_SLOT, bench.records._slots[0, 1, 0], NO_SLOT]]
    assert slots.dtype == torch.int32


def test_more_than_there_is_room_for_says_what_to_change() -> None:
    bench = Bench((0, 0), 2)
    with pytest.raises(RuntimeError) as caught:
        bench.records.add(0, PageRange(0, 3))
    assert "3 records" in str(caught.value) and "2 slots" in str(caught.value)
    assert "device_pages_gib" in str(caught.value) and len(str(caught.value).splitlines()) == 3


def nearly_full(most_slabs: int) -> Bench:
    """Of layer 0 the device has 0 and 1, and the host 2 and 3; each slab has room for one record."""
    bench = Bench((2, 0), 2, store=plain_store(RECORD_BYTES, records_per_slab=1, most_slabs=most_slabs))
    for page in range(4):
        bench.write(0, page, page)
        bench.records.settle(0)
    bench.mover.synchronize()
    assert bench.on_device(0) == [0, 1] and bench.store.num_records == 2
    bench.records._worth = lambda layer, places: places.astype(np.float32)  # from now on the last ones stay
    return bench


def test_where_host_memory_ends_what_the_device_has_as_well_is_dropped() -> None:
    bench = nearly_full(most_slabs=3)
    for page in (2, 3):
        bench.read(0, page)
        bench.records.settle(0)
    assert bench.on_device(0) == [2, 3] and bench.store.num_records == 3, "of 2 and 3 one has its copy still"
    bench.write(1, 0, 10)
    bench.records.settle(1)
    bench.mover.synchronize()
    bench.write(1, 1, 11)
    with pytest.raises(HostMemoryError):
        bench.records.settle(1)
    found = [bench.read(0, 2), bench.read(0, 3), bench.read(1, 0)]
    bench.mover.synchronize()
    assert found == [[2], [3], [10]]


def test_what_was_dropped_is_written_again_when_it_leaves() -> None:
    bench = nearly_full(most_slabs=3)
    for page in (2, 3):
        bench.read(0, page)
        bench.records.settle(0)
    bench.records.free(PageRange(0, 1))
    bench.records._worth = lambda layer, places: -places.astype(np.float32)
    bench.read(0, 1)
    bench.records.settle(0)
    bench.mover.synchronize()
    assert bench.on_device(0) == [1, 2]
    found = [bench.read(0, page) for page in (1, 2, 3)]
    bench.mover.synchronize()
    assert found == [[1], [2], [3]]


def test_what_leaves_at_the_same_time_keeps_its_place_on_the_host() -> None:
    """0 has to be saved where there is no room, and 2, which the host has, leaves with it: 3 gives up its place."""
    bench = nearly_full(most_slabs=2)
    bench.records._worth = lambda layer, places: np.array([0, 3, 1, 4, 0, 0, 0, 0], np.float32)[places]
    for page in (2, 3):
        bench.read(0, page)
    bench.records.settle(0)
    assert bench.on_device(0) == [1, 3]
    bench.mover.synchronize()
    for page in (0, 2):
        assert bench.records.exists(0, PageRange(page, page + 1)).all()
        found = bench.read(0, page)
        bench.mover.synchronize()
        assert found == [page]


def test_what_is_still_on_its_way_gives_up_its_place_on_the_host_once_it_is_there() -> None:
    bench = nearly_full(most_slabs=2)
    assert bench.expect(0, PageRange(2, 3))
    bench.write(1, 0, 10)
    bench.records.settle(1)
    found = [bench.read(0, 2), bench.read(1, 0)]
    bench.mover.synchronize()
    assert found == [[2], [10]]


def test_a_place_that_was_given_up_is_filled_behind_the_upload_that_reads_it() -> None:
    bench = nearly_full(most_slabs=2)
    assert bench.expect(0, PageRange(2, 3))
    bench.write(1, 0, 10)
    bench.records.settle(1)
    bench.mover.save()
    found = [bench.read(0, 2), bench.read(1, 0)]
    bench.mover.synchronize()
    assert found == [[2], [10]]


def test_what_is_about_to_be_brought_keeps_its_place_on_the_host() -> None:
    """Of two ranges the second needs a slot of layer 1, whose record the host has no room for."""
    bench = Bench((0, 0), 2, store=plain_store(RECORD_BYTES, records_per_slab=1, most_slabs=2))
    bench.away(2, 3)
    bench.write(1, 0, 10)
    assert bench.expect(1, PageRange(0, 1))
    bench.records.settle(1)
    with pytest.raises(HostMemoryError):
        bench.records.use(0, PageRange(2, 3), PageRange(3, 4))
    assert bench.store.num_records == 2 and bench.on_device(1) == [0]


def test_what_is_needed_at_once_comes_in_one_batch() -> None:
    bench = Bench((0, 0), 6)
    bench.away(0, 1, 3, 4, 5)
    before = bench.mover.num_copies
    uses = [(PageRange(0, 2), None), (PageRange(3, 6), np.array([1])), (PageRange(7, 8), None)]
    assert bench.records.expect(0, uses) == 3 and bench.mover.num_copies == before + 1
    assert bench.on_device(0) == [0, 1, 4]
    bench.records.use(0, PageRange(3, 4), PageRange(5, 6))
    assert bench.mover.num_copies == before + 2
    found = [bench.read(0, page) for page in (0, 1, 3, 4, 5)]
    bench.mover.synchronize()
    assert found == [[0], [1], [3], [4], [5]]


def test_nothing_is_lost_where_host_memory_ends_in_an_eviction_of_clean_and_changed_records() -> None:
    """A clean record that leaves beside changed ones is not on the device as well: its copy must stay."""
    bench = Bench((1, 1), 5, store=plain_store(RECORD_BYTES, records_per_slab=2, most_slabs=1))
    bench.write(0, 0, 10)
    bench.write(0, 1, 11)
    bench.records.settle(0)  # record 1 is on the host
    bench.read(0, 1)  # and on the device again, unchanged
    bench.write(0, 2, 12)
    bench.write(0, 3, 13)
    with pytest.raises(HostMemoryError):
        bench.records.settle(0)  # three must leave, and the host has room for one more
    assert bench.records.exists(0, PageRange(0, 4)).all()


def test_records_brought_ahead_do_not_push_out_what_should_stay() -> None:
    bench = Bench((2, 0), 4)
    for page in range(5):
        bench.write(0, page, page)
        bench.records.settle(0)
    bench.mover.synchronize()
    assert bench.on_device(0) == [0, 1]
    assert bench.expect(0, PageRange(2, 4))
    bench.records.settle(0)
    assert bench.on_device(0) == [0, 1, 2, 3], "the worthiest stay, and what is expected has the reserve"


def test_what_was_expected_in_vain_leaves() -> None:
    bench = Bench((0, 0), 4)
    bench.away(0, 1, 2)
    assert bench.expect(0, PageRange(0, 3))
    bench.records.settle(0)
    assert bench.on_device(0) == [0, 1, 2]
    bench.records.forget_expected()
    bench.records.settle(0)
    assert not bench.on_device(0)


def test_what_was_expected_twice_stays_behind_its_first_use() -> None:
    """The last layers of a recompute are the first of the backward behind it."""
    bench = Bench((0, 0), 4)
    bench.away(0, 1)
    for _ in range(2):
        assert bench.expect(0, PageRange(0, 2))
    for left in ([0, 1], []):
        bench.records.use(0, PageRange(0, 2))
        bench.records.settle(0)
        assert bench.on_device(0) == left
