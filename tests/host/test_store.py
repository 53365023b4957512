"""Slots for records: numbers and addresses that stay, runs where there is a place for one, slabs given back."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomb_accel.host import HostArena, HostMemoryError, HostStore
from oomb_accel.host.store import Slots
from tests.host.machines import GIB, machine

PAGE = 4096
RECORD = 1000
PER_SLAB = 4


def make_arena(num_slabs: int) -> HostArena:
    return HostArena(num_slabs * PAGE, slab_bytes=PAGE, pin=False, limits=lambda: machine(64 * GIB), num_threads=1)


def numbers(slots: Slots) -> list[int]:
    assert slots.dtype == np.int64
    return [int(slot) for slot in slots]


def test_slots_and_addresses() -> None:
    arena = make_arena(3)
    store = HostStore(arena, RECORD)
    assert store.records_per_slab == PER_SLAB
    slots = store.allocate(6)
    assert numbers(slots) == [0, 1, 2, 3, 4, 5]
    assert (store.num_records, store.num_bytes) == (6, 2 * PAGE)
    addresses = store.addresses(slots)
    assert addresses.dtype == np.int64
    assert np.diff(addresses[:4]).tolist() == [RECORD] * 3 and np.diff(addresses[4:]).tolist() == [RECORD]
    assert (addresses[[0, 4]] % PAGE == 0).all(), "a record never straddles slabs"
    assert store.addresses(slots[::-1]).tolist() == addresses[::-1].tolist()
    assert numbers(store.allocate(0)) == []
    arena.close()


def test_one_run_before_the_lowest_slots() -> None:
    arena = make_arena(3)
    store = HostStore(arena, RECORD)
    store.allocate(12)
    store.free(np.array([1, 6, 7]))
    assert numbers(store.allocate(2)) == [6, 7]
    assert numbers(store.allocate(1)) == [1]
    store.free(np.array([2, 9]))
    assert numbers(store.allocate(2)) == [2, 9], "no run: the lowest ones"
    arena.close()


def test_a_run_that_was_too_short_is_found_later() -> None:
    arena = make_arena(3)
    store = HostStore(arena, RECORD)
    store.allocate(12)
    store.free(np.array([1, 4, 5, 7, 8, 9, 10]))
    assert numbers(store.allocate(3)) == [8, 9, 10]
    assert numbers(store.allocate(2)) == [4, 5]
    arena.close()


def test_runs_do_not_cross_slabs() -> None:
    arena = make_arena(3)
    store = HostStore(arena, RECORD)
    store.allocate(12)
    store.free(np.array([3, 4, 9, 10]))
    assert numbers(store.allocate(2)) == [9, 10], "3 and 4 have neighbouring numbers, but lie in two slabs"
    arena.close()


def test_freed_slots_are_joined() -> None:
    arena = make_arena(2)
    store = HostStore(arena, RECORD)
    store.allocate(8)
    store.free(np.array([4]))
    store.free(np.array([1]))
    assert numbers(store.allocate(2)) == [1, 4]
    store.free(np.array([5]))
    store.free(np.array([6]))
    assert numbers(store.allocate(2)) == [5, 6]
    arena.close()


def test_free_slots_before_a_new_slab() -> None:
    arena = make_arena(4)
    store = HostStore(arena, RECORD)
    store.allocate(8)
    store.free(np.array([0, 5]))
    assert numbers(store.allocate(2)) == [0, 5] and store.num_bytes == 2 * PAGE
    assert numbers(store.allocate(3)) == [8, 9, 10]
    arena.close()


def test_all_or_nothing() -> None:
    arena = make_arena(2)
    store = HostStore(arena, RECORD)
    first = store.allocate(3)
    with pytest.raises(HostMemoryError, match="limit"):
        store.allocate(6)
    assert (store.num_records, store.num_bytes) == (3, PAGE)
    assert arena.num_bytes - arena.free_bytes == PAGE, "slabs that were taken in vain are given back"
    assert numbers(store.allocate(5)) == [3, 4, 5, 6, 7]
    assert (np.diff(np.sort(store.addresses(first))) == RECORD).all()
    arena.close()


def test_empty_slabs_go_back_and_others_may_have_them() -> None:
    arena = make_arena(2)
    values, gradients = HostStore(arena, RECORD), HostStore(arena, 2 * RECORD)
    slots = values.allocate(8)
    with pytest.raises(HostMemoryError):
        gradients.allocate(1)
    values.free(slots[:3])
    assert arena.free_bytes == 0
    values.free(slots[3:4])
    assert arena.free_bytes == PAGE and values.num_bytes == PAGE
    assert numbers(gradients.allocate(2)) == [0, 1]
    kept = values.addresses(slots[4:])
    values.close()
    gradients.close()
    values.close()
    assert arena.free_bytes == arena.num_bytes == 2 * PAGE
    assert values.num_records == 0 and kept.size == 4
    arena.close()


def test_a_store_may_outlive_its_arena() -> None:
    arena = make_arena(1)
    store = HostStore(arena, RECORD)
    store.allocate(1)
    arena.close()
    store.close()


@pytest.mark.parametrize("slots", [[0, 0], [3], [-1], [40], [4]], ids=["twice", "free", "negative", "beyond", "empty"])
def test_only_what_is_allocated_is_freed(slots: list[int]) -> None:
    arena = make_arena(2)
    store = HostStore(arena, RECORD)
    whole = store.allocate(8)
    store.free(whole[3:])
    with pytest.raises(AssertionError):
        store.free(np.array(slots))
    if slots != [0, 0]:
        with pytest.raises(AssertionError):
            store.addresses(np.array(slots))
    assert store.num_records == 3
    arena.close()


def test_wider_records_take_aligned_neighbours() -> None:
    arena = make_arena(3)
    store = HostStore(arena, RECORD)
    small = store.allocate(5)
    assert numbers(store.allocate(1, width=2)) == [6], "5 is free, and not a multiple of two"
    assert numbers(store.allocate(2, width=2)) == [8, 10]
    with pytest.raises(HostMemoryError):
        store.allocate(1, width=2)
    store.free(small[:3])
    assert numbers(store.allocate(1, width=2)) == [0], "2 is free, and its neighbour is not"
    assert numbers(store.allocate(2)) == [2, 5]
    store.free(np.array([8]), width=2)
    assert numbers(store.allocate(2)) == [8, 9], "what was wide is not for ever"
    arena.close()


def test_scattered_places_are_found_for_wider_records() -> None:
    arena = make_arena(3)
    store = HostStore(arena, RECORD)
    store.allocate(12)
    store.free(np.array([0, 1, 3, 4, 6, 7, 9, 10, 11]))
    assert numbers(store.allocate(3, width=2)) == [0, 6, 10]
    assert store.num_records == 9
    arena.close()


@settings(max_examples=30)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.randoms(use_true_random=False)), max_size=25))
def test_records_keep_their_bytes(steps: list[tuple]) -> None:
    """Whatever is allocated and freed: every record has its own bytes, and keeps them and its address."""
    arena = make_arena(6)
    store = HostStore(arena, RECORD)
    held: dict[int, tuple[int, int]] = {}
    for mark, (grows, count, random) in enumerate(steps, 1):
        if grows:
            try:
                slots = store.allocate(count)
            except HostMemoryError:
                assert len(held) + count > 6 * PER_SLAB
                continue
            assert numbers(slots) == sorted(set(numbers(slots)) - set(held)) and slots.size == count
            for slot, address in zip(numbers(slots), store.addresses(slots).tolist(), strict=True):
                ctypes.memset(address, mark, RECORD)
                held[slot] = address, mark
        else:
            freed = random.sample(sorted(held), min(count, len(held)))
            store.free(np.array(freed, dtype=np.int64))
            for slot in freed:
                del held[slot]
        assert store.num_records == len(held)
        assert store.num_bytes == len({slot // PER_SLAB for slot in held}) * PAGE
        assert arena.num_bytes - arena.free_bytes == store.num_bytes
    for slot, (address, mark) in held.items():
        assert store.addresses(np.array([slot])).tolist() == [address]
        assert ctypes.string_at(address, RECORD) == bytes([mark]) * RECORD
    arena.close()
