"""Slabs of host memory: made in the background, never beyond the limit, pageable where pinning is refused."""

import random
import re
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oomb_accel.host import HostArena, HostLimits, HostMemoryError
from oomb_accel.host import mapping as mapping_file
from oomb_accel.progress import host_bytes
from tests.host.machines import GIB, MIB, SLAB, WAIT_S, FakeCuda, machine, make_arena, wait_for, wait_until


def offered_gib(error: pytest.ExceptionInfo[HostMemoryError]) -> float:
    """The setting that the last line of the message names."""
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    found = re.search(r"host_memory_gib=([\d.]+)", lines[2])
    assert found is not None
    return float(found[1])


def test_slabs_are_memory() -> None:
    cuda = FakeCuda()
    arena = make_arena(3, cuda)
    slabs = [arena.take() for _ in range(3)]
    assert [slab.number for slab in slabs] == [0, 1, 2]
    for slab in slabs:
        assert slab.memory.dtype == torch.uint8 and slab.memory.shape == (SLAB,)
        assert slab.address == slab.memory.data_ptr() and slab.address % 4096 == 0
        slab.memory.fill_(slab.number + 1)
    assert [int(slab.memory.sum()) for slab in slabs] == [SLAB, 2 * SLAB, 3 * SLAB]
    assert cuda.pinned == {slab.address: SLAB for slab in slabs} and arena.pinned
    arena.close()
    assert cuda.pinned == {}


def test_reserve_works_in_the_background() -> None:
    arena = make_arena(8)
    arena.reserve(5 * SLAB - 1)
    wait_until(lambda: arena.free_bytes == 5 * SLAB)
    slabs = [arena.take(), arena.take()]
    assert (arena.num_bytes, arena.free_bytes, arena.peak_bytes) == (5 * SLAB, 3 * SLAB, 2 * SLAB)
    arena.reserve(5 * SLAB)
    arena.reserve(SLAB)
    for slab in slabs:
        arena.give(slab)
    assert arena.take() is slabs[0], "the lowest free one"
    assert (arena.num_bytes, arena.peak_bytes) == (5 * SLAB, 2 * SLAB)
    assert not arena.pinned
    arena.close()


def test_reserve_does_notwait_for() -> None:
    go_on = threading.Event()
    arena = make_arena(4, FakeCuda(lambda number: wait_for(go_on)))
    arena.reserve(4 * SLAB)
    assert arena.num_bytes == 0
    go_on.set()
    wait_until(lambda: arena.num_bytes == 4 * SLAB)
    arena.close()


def test_all_that_was_reserved_can_be_waited_for() -> None:
    arena = make_arena(4)
    arena.wait(0)
    arena.reserve(4 * SLAB)
    arena.wait(4 * SLAB)
    assert arena.num_bytes == 4 * SLAB
    arena.close()


def test_nobody_waits_for_what_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: mapping_file.HostMapping, start: int, end: int) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(mapping_file.HostMapping, "touch", refuse)
    arena = make_arena(4)
    arena.reserve(3 * SLAB)
    with pytest.raises(HostMemoryError, match="no memory"):
        arena.wait(3 * SLAB)
    arena.close()


@pytest.mark.parametrize("num_threads", [0, 1])
def test_threads_that_cannot_be_started(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is enough; where there is none the next request starts anew."""
    started: list[threading.Thread] = []
    plain = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == num_threads:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        plain(thread)

    arena = make_arena(4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        if num_threads:
            arena.reserve(4 * SLAB)
        else:
            with pytest.raises(HostMemoryError, match="can't start new thread"):
                arena.reserve(4 * SLAB)
    arena.reserve(4 * SLAB)
    arena.wait(4 * SLAB)
    arena.close()


def test_who_waits_gets_what_is_given_back() -> None:
    go_on = threading.Event()
    arena = make_arena(2, FakeCuda(lambda number: wait_for(go_on) if number else None))
    slab = arena.take()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(arena.take)
        time.sleep(0.05)
        assert not waiting.done()
        arena.give(slab)
        assert waiting.result(WAIT_S / 2) is slab
        go_on.set()
    arena.close()


def test_parts_are_touched_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[tuple[int, int]] = []
    threads = set()
    meet = threading.Barrier(2)

    def touch(self: mapping_file.HostMapping, start: int, end: int) -> None:
        meet.wait(WAIT_S)  # two at a time, or nobody gets on
        touched.append((start, end))
        threads.add(threading.get_ident())

    monkeypatch.setattr(mapping_file.HostMapping, "touch", touch)
    arena = make_arena(1, slab_bytes=128 * MIB - 4096, num_threads=2)
    arena.take()
    arena.close()
    assert sorted(touched) == [(32 * i * MIB, min(32 * (i + 1) * MIB, 128 * MIB - 4096)) for i in range(4)]
    assert len(threads) == 2


def test_touching_makes_the_memory_present() -> None:
    before = host_bytes()
    arena = make_arena(1, slab_bytes=64 * MIB)
    slab = arena.take()
    assert host_bytes() - before > 60 * MIB
    arena.close()
    assert host_bytes() - before < 8 * MIB, "given back although somebody still holds the slab"
    assert int(slab.memory[:4096].sum()) == 0


def test_beyond_the_limit() -> None:
    arena = make_arena(3)
    with pytest.raises(HostMemoryError, match="limit") as reserving:
        arena.reserve(4 * SLAB)
    assert arena.num_bytes == 0
    for _ in range(3):
        arena.take()
    with pytest.raises(HostMemoryError, match="4 slabs") as taking:
        arena.take()
    for error in (reserving, taking):
        fitting = HostArena(int(offered_gib(error) * GIB), slab_bytes=SLAB, pin=False)
        fitting.reserve(4 * SLAB)
        fitting.close()
    arena.close()


def test_a_limit_of_no_whole_slabs() -> None:
    arena = HostArena(2 * SLAB - 1, slab_bytes=SLAB, pin=False)
    slab = arena.take()
    with pytest.raises(HostMemoryError):
        arena.take()
    arena.give(slab)
    assert arena.take() is slab
    arena.close()


def test_beyond_the_machine() -> None:
    spare = 2 * GIB  # half of the margin is kept free
    arena = make_arena(10**6, limits=lambda: machine(spare + 4 * SLAB))
    with pytest.raises(HostMemoryError, match="machine") as error:
        arena.reserve(5 * SLAB)
    assert arena.num_bytes == 0 and offered_gib(error) * GIB <= 4 * SLAB
    arena.reserve(4 * SLAB)
    wait_until(lambda: arena.num_bytes == 4 * SLAB)
    arena.close()


def test_memory_that_others_took_meanwhile() -> None:
    """The background does not take what is not there any more; whoever needs it hears of it, and may try again."""
    spare = [3 * SLAB]
    cuda = FakeCuda(lambda number: spare.__setitem__(0, spare[0] - SLAB))  # what was made is no longer available
    arena = make_arena(8, cuda, limits=lambda: machine(2 * GIB + spare[0]), num_threads=1)
    arena.reserve(3 * SLAB)
    wait_until(lambda: arena.num_bytes == 3 * SLAB)
    spare[0] = 4 * SLAB
    arena.reserve(5 * SLAB)
    spare[0] = 0
    for _ in range(3):
        arena.take()
    with pytest.raises(HostMemoryError, match="too little host memory left"):
        for _ in range(3):
            arena.take()
    spare[0] = SLAB
    arena.take()
    with pytest.raises(HostMemoryError, match="too little host memory left"):
        while True:
            arena.take()
    arena.close()


def test_the_kernel_refuses_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, ask = make_arena(2), mapping_file._map
    monkeypatch.setattr(mapping_file, "_map", lambda length: ask(1 << 60))
    with pytest.raises(HostMemoryError, match="Cannot allocate memory"):
        arena.take()
    monkeypatch.undo()
    arena.take()
    arena.close()


def test_a_fault_in_the_background_is_told() -> None:
    def fault(number: int) -> None:
        if number == 0:
            raise ZeroDivisionError("of the test")

    before = host_bytes()
    arena = make_arena(1, FakeCuda(fault), slab_bytes=32 * MIB)
    with pytest.raises(HostMemoryError, match="ZeroDivisionError: of the test"):
        arena.take()
    assert host_bytes() - before < 8 * MIB, "the slab that failed is gone"
    arena.take()
    assert arena.num_bytes == 32 * MIB
    arena.close()


def test_all_who_wait_hear_of_a_failure() -> None:
    ready = threading.Event()

    def limits() -> HostLimits:
        return machine(0 if ready.wait(WAIT_S) else 64 * GIB)

    arena = make_arena(8, limits=limits)
    with ThreadPoolExecutor(4) as threads:
        takes = [threads.submit(arena.take) for _ in range(4)]
        ready.set()
        for take in takes:
            with pytest.raises(HostMemoryError):
                take.result(WAIT_S)
    arena.close()


def test_hard_cap_under_threads() -> None:
    """No slab beyond the limit exists at any time, and none is in two hands."""
    cuda, num_slabs = FakeCuda(), 5
    arena = make_arena(num_slabs, cuda)

    def use(seed: int) -> int:
        dice, num_refused = random.Random(seed), 0
        for _ in range(60):
            if dice.random() < 0.3:
                try:
                    arena.reserve(dice.randint(1, 7) * SLAB)
                except HostMemoryError:
                    num_refused += 1
            try:
                slab = arena.take()
            except HostMemoryError:
                num_refused += 1
                continue
            slab.memory.fill_(seed)
            if dice.random() < 0.5:
                time.sleep(0.0005)
            assert bool((slab.memory == seed).all())
            arena.give(slab)
        return num_refused

    with ThreadPoolExecutor(8) as threads:
        refused = [job.result(60) for job in [threads.submit(use, seed) for seed in range(8)]]
    assert sum(refused) > 0
    assert cuda.most_bytes == arena.num_bytes == num_slabs * SLAB
    assert arena.free_bytes == arena.num_bytes and arena.peak_bytes <= num_slabs * SLAB
    arena.close()
    assert cuda.pinned == {}


def test_pinning_refused() -> None:
    def refuse(number: int) -> None:
        if number == 2:  # nobody asks again
            raise RuntimeError("CUDA error 2: out of memory")

    cuda = FakeCuda(refuse)
    arena = make_arena(8, cuda)
    with pytest.warns(RuntimeWarning, match="pageable") as caught:
        slabs = [arena.take() for _ in range(8)]
    assert len(caught) == 1
    _, second, third = str(caught[0].message).splitlines()
    assert "CUDA error 2: out of memory" in second and "memlock" in second
    assert "host_memory_gib" in third
    assert not arena.pinned
    for slab in slabs:
        slab.memory.fill_(1)
        arena.give(slab)
    pinned = set(cuda.pinned)
    assert len(pinned) == 2
    arena.close()
    assert set(cuda.unpinned) == pinned


def test_pinning_refused_to_several_threads_at_once() -> None:
    meet = threading.Barrier(3)

    def refuse(number: int) -> None:
        meet.wait(WAIT_S)
        raise RuntimeError("no")

    arena = make_arena(3, FakeCuda(refuse), num_threads=3)
    with pytest.warns(RuntimeWarning) as caught:
        arena.reserve(3 * SLAB)
        for _ in range(3):
            arena.take()
    assert len(caught) == 1
    arena.close()


def test_memory_stays_flat() -> None:
    arena = make_arena(4, FakeCuda(), slab_bytes=8 * MIB)
    sizes = []
    for _ in range(100):
        arena.reserve(4 * 8 * MIB)
        slabs = [arena.take() for _ in range(4)]
        for slab in slabs:
            slab.memory[:: 64 * 1024] = 1
            arena.give(slab)
        sizes.append(host_bytes())
    assert sizes[-1] - sizes[0] < 2 * MIB
    assert arena.num_bytes == 32 * MIB
    before = host_bytes()
    del slab, slabs
    arena.close()
    assert before - host_bytes() > 30 * MIB
    assert arena.num_bytes == arena.free_bytes == 0 and arena.peak_bytes == 32 * MIB


def test_a_slab_is_given_back_once() -> None:
    arena = make_arena(1)
    slab = arena.take()
    arena.give(slab)
    with pytest.raises(AssertionError):
        arena.give(slab)
    arena.close()


@pytest.mark.gpu
def test_cuda_pins() -> None:
    before = host_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena = HostArena(256 * MIB, slab_bytes=64 * MIB, pin=True)
        arena.reserve(256 * MIB)
        slabs = [arena.take() for _ in range(4)]
    assert arena.pinned and all(slab.memory.is_pinned() for slab in slabs)
    random_bytes = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8, device="cuda")
    slabs[3].memory.copy_(random_bytes, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(slabs[3].memory, random_bytes.cpu())
    arena.close()
    assert not slabs[0].memory.is_pinned()
    del slabs
    assert host_bytes() - before < 128 * MIB
