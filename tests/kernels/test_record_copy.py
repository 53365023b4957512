"""Records between host and device memory: every record arrives, nothing else is touched, whatever the method."""

import ctypes
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oomb_kernels import CopyMethod, available_copy_methods, best_copy_method, copy_records, cuda_copies
from oomb_kernels.copy_kernel import _copy_records_kernel, launch_copy_records
from oomb_kernels.cuda_copies import CudaCopyError, Int64s
from oomb_kernels.record_copy import choose_method, merge_runs
from tests.kernels.compile_copies import copy_ptx
from tests.kernels.ptxas import need_ptxas
from tests.kernels.reference import INTERPRETED, ON_GPU

CPU = torch.device("cpu")
METHODS: list[CopyMethod] = ["batch", "kernel", "loop"]
RECORD_SIZES = [16, 48, 4096, 34_832]  # the last: two blocks of the kernel and a ragged one

Copy = Callable[[Int64s, Int64s, int, bool], object]


def addresses(store: Tensor, slots: Int64s) -> Int64s:
    return store.data_ptr() + slots * store.shape[1]


def check_round_trip(copy: Copy, host: Tensor, pool: Tensor, count: int, wait: Callable[[], None]) -> None:
    """Random host records go to random slots of the pool and back to other places; the rest stays as it was."""
    random = np.random.default_rng(count)
    first, slots, second = (random.permutation(len(store))[:count] for store in (host, pool, host))
    record_bytes, before, pool_before = host.shape[1], host.clone(), pool.clone()
    kept = [copy(addresses(host, first), addresses(pool, slots), record_bytes, True)]
    wait()
    expected_pool = pool_before.clone()
    expected_pool[torch.from_numpy(slots)] = before[torch.from_numpy(first)].to(pool.device)
    assert torch.equal(pool, expected_pool)
    kept += [copy(addresses(pool, slots), addresses(host, second), record_bytes, False)]
    wait()
    expected = before.clone()
    expected[torch.from_numpy(second)] = before[torch.from_numpy(first)]
    assert torch.equal(host, expected)
    del kept


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in ON_GPU:
        test = mark(test)
    return test


def random_store(num_records: int, record_bytes: int, *, pin: bool = False) -> Tensor:
    torch.manual_seed(num_records)
    store = torch.randint(0, 256, (num_records, record_bytes), dtype=torch.uint8)
    return store.pin_memory() if pin else store


# Few enough slots that neighbours on both sides, on one side and backwards all come up.
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30), st.sampled_from([16, 65536]))
def test_runs_do_the_same_in_the_fewest_copies(pairs: list[tuple[int, int]], record_bytes: int) -> None:
    slots = np.array(pairs, np.int64).reshape(-1, 2)
    sources, targets = 2**40 + slots[:, 0] * record_bytes, 2**41 + slots[:, 1] * record_bytes
    runs = merge_runs(sources, targets, record_bytes)
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in runs)
    again = [
        (source + offset, target + offset)
        for source, target, size in zip(*(array.tolist() for array in runs), strict=True)
        for offset in range(0, size, record_bytes)
    ]
    assert again == list(zip(sources.tolist(), targets.tolist(), strict=True))
    for source, target, size, next_source, next_target in zip(
        *(array[:-1] for array in runs), *(array[1:] for array in runs[:2]), strict=True
    ):
        assert (source + size, target + size) != (next_source, next_target)


def test_adjacent_records_are_one_copy() -> None:
    slots = np.array([3, 4, 5, 9, 10, 2])
    runs = merge_runs(slots * 64, 10_000 + slots * 64, 64)
    assert [array.tolist() for array in runs] == [[192, 576, 128], [10_192, 10_576, 10_128], [192, 128, 64]]


@pytest.mark.parametrize("count", [0, 1, 37])
@pytest.mark.parametrize("record_bytes", [*RECORD_SIZES, 7])
def test_host_memory_only(record_bytes: int, count: int) -> None:
    def copy(sources: Int64s, targets: Int64s, size: int, to_device: bool) -> object:
        return copy_records(sources, targets, size, to_device=to_device, device=CPU, method="loop")

    check_round_trip(copy, random_store(40, record_bytes), random_store(50, record_bytes), count, lambda: None)


@INTERPRETED
@pytest.mark.parametrize("count", [1, 2, 37])  # up to more than there are programs
@pytest.mark.parametrize("record_bytes", RECORD_SIZES)
def test_kernel_interpreted(record_bytes: int, count: int) -> None:
    def copy(sources: Int64s, targets: Int64s, size: int, to_device: bool) -> object:
        return launch_copy_records(sources, targets, size, CPU)

    check_round_trip(copy, random_store(40, record_bytes), random_store(50, record_bytes), count, lambda: None)


def test_kernel_accesses_are_16_bytes_wide() -> None:
    need_ptxas()
    ptx = copy_ptx()
    loads, stores = (re.findall(rf"{kind}\.global\S*", ptx) for kind in ("ld", "st"))
    assert stores and set(stores) == {"st.global.v2.b64"}
    assert loads.count("ld.global.v2.b64") == len(stores)  # the others read addresses


def test_kernel_refuses_what_it_cannot_do_in_16_bytes() -> None:
    for source, record_bytes in ((8, 16), (0, 24)):
        with pytest.raises(AssertionError, match="aligned"):
            launch_copy_records(np.array([source]), np.array([0]), record_bytes, CPU)


class FakeDriver:
    """Stands for CUDA's driver; copies host memory, and refuses the copy with number `bad`."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad
        self.counts: list[int] = []
        self.orders: list[tuple[int, ...]] = []
        self.contexts: list[int] = []
        self.batch: Callable[..., int] = self._batch
        self.library = SimpleNamespace(
            cuCtxGetCurrent=self._current,
            cuCtxPushCurrent_v2=self._push,
            cuCtxPopCurrent_v2=self._pop,
            cuGetErrorName=self._name,
            cuMemcpyHtoDAsync_v2=self._copy,
            cuMemcpyDtoHAsync_v2=self._copy,
        )

    def _current(self, context: Any) -> int:
        context._obj.value = self.contexts[-1] if self.contexts else None
        return 0

    def _push(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _pop(self, context: Any) -> int:
        self.contexts.pop()
        return 0

    def _name(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        assert stream == 5 and self.contexts[-1] == 77
        if sum(self.counts) == self.bad:
            return 1
        self.counts.append(1)
        ctypes.memmove(target, source, size)
        return 0

    def _batch(self, *arguments: Any) -> int:
        targets, sources, sizes, count, order, firsts, num_orders, failed, stream = arguments
        assert (stream, num_orders, firsts._obj.value, self.contexts[-1]) == (5, 1, 0, 77)
        if 0 <= self.bad - sum(self.counts) < count:
            failed._obj.value = self.bad - sum(self.counts)
            return 1
        self.counts.append(count)
        attributes = order._obj
        places = (attributes.source, attributes.target)
        self.orders.append((attributes.source_order, *(x for place in places for x in (place.type, place.id))))
        arrays = [(ctypes.c_int64 * count).from_address(start) for start in (targets, sources, sizes)]
        for target, source, size in zip(*arrays, strict=True):
            ctypes.memmove(target, source, size)
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_copies, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_copies, "_primary_context", lambda index: 77)
    return driver


def test_attributes_are_laid_out_as_in_cuda() -> None:
    """CUmemcpyAttributes of cuda.h: an enum, two locations of an enum and an int each, an unsigned int."""
    layout = cuda_copies._Attributes
    offsets = [getattr(layout, name).offset for name in ("source_order", "source", "target", "flags")]
    assert (offsets, ctypes.sizeof(layout)) == ([0, 4, 12, 20], 24)


@pytest.mark.parametrize("copy", [cuda_copies.copy_batch, cuda_copies.copy_each])
def test_driver_calls(fake: FakeDriver, copy: Callable[..., None]) -> None:
    """More copies than one call takes."""

    def by_driver(sources: Int64s, targets: Int64s, size: int, to_device: bool) -> object:
        runs = merge_runs(sources, targets, size)
        copy(*runs, to_device=to_device, device_index=3, stream=5)
        return None

    check_round_trip(by_driver, random_store(5100, 16), random_store(5200, 16), 5000, lambda: None)
    assert sum(fake.counts) >= 9000 and max(fake.counts) <= 64 and not fake.contexts
    if copy is cuda_copies.copy_batch:
        host, device, stream_order = (2, 0), (1, 3), 1
        half, odd = divmod(len(fake.orders), 2)
        assert (
            fake.orders == [(stream_order, *host, *device)] * half + [(stream_order, *device, *host)] * half and not odd
        )


@pytest.mark.parametrize("before", [[], [76], [77]])
@pytest.mark.parametrize("copy", [cuda_copies.copy_batch, cuda_copies.copy_each])
def test_context_is_as_it_was(fake: FakeDriver, copy: Callable[..., None], before: list[int]) -> None:
    """Of another device, or none, or the right one, which is not made current again."""
    pushed, push = [], fake.library.cuCtxPushCurrent_v2

    def watched(context: int) -> int:
        pushed.append(context)
        return int(push(context))

    fake.library.cuCtxPushCurrent_v2, fake.contexts = watched, list(before)
    store = random_store(2, 16)
    copy(addresses(store, np.array([0])), addresses(store, np.array([1])), np.array([16]),
         to_device=True, device_index=3, stream=5)  # fmt: skip
    assert fake.contexts == before and pushed == ([] if before == [77] else [77])
    assert torch.equal(store[0], store[1])


@pytest.mark.parametrize("bad", [3, 4500])
@pytest.mark.parametrize("copy", [cuda_copies.copy_batch, cuda_copies.copy_each])
def test_refused_copy_is_named(fake: FakeDriver, copy: Callable[..., None], bad: int) -> None:
    fake.bad = bad
    store = random_store(5000, 16)
    sources, sizes = addresses(store, np.arange(5000)), np.full(5000, 16)
    text = rf"CUDA_ERROR_INVALID_VALUE.\nAt copy {bad} of 5000: 16 bytes from {sources[bad]:#x} to .*\n"
    with pytest.raises(CudaCopyError, match=text) as caught:
        copy(sources, sources, sizes, to_device=True, device_index=0, stream=5)
    assert caught.value.code == 1 and not fake.contexts


def test_batch_refuses_the_default_stream(fake: FakeDriver) -> None:
    with pytest.raises(ValueError, match="default stream"):
        one = np.zeros(1, np.int64)
        cuda_copies.copy_batch(one, one, one, to_device=True, device_index=0, stream=0)


def test_kernel_must_be_well_ahead() -> None:
    assert choose_method({"batch": 1.0, "kernel": 0.5, "loop": 4.0}) == "batch"
    assert choose_method({"kernel": 1.0, "loop": 4.0}) == "kernel"
    assert choose_method({"kernel": 2.0, "loop": 1.0}) == "loop"


def test_host_memory_knows_one_method() -> None:
    assert available_copy_methods(CPU) == ("loop",) and best_copy_method(CPU) == "loop"


def check_on_gpu(method: CopyMethod, record_bytes: int, counts: list[int]) -> None:
    device = torch.device("cuda")
    host = random_store(max(counts) + 3, record_bytes, pin=True)
    pool = random_store(max(counts) + 5, record_bytes).to(device)
    torch.cuda.synchronize()  # the pool is written on another stream

    def copy(sources: Int64s, targets: Int64s, size: int, to_device: bool) -> object:
        return copy_records(sources, targets, size, to_device=to_device, device=device, method=method)

    with torch.cuda.stream(torch.cuda.Stream()):
        for count in counts:
            check_round_trip(copy, host, pool, count, torch.cuda.synchronize)


@on_gpu
@pytest.mark.parametrize("record_bytes", [*RECORD_SIZES, 65536])
@pytest.mark.parametrize("method", METHODS)
def test_on_gpu(method: CopyMethod, record_bytes: int) -> None:
    check_on_gpu(method, record_bytes, [0, 1, 2, 37, 500])


@on_gpu
@pytest.mark.parametrize("method", METHODS)
def test_more_copies_than_one_call_takes(method: CopyMethod) -> None:
    check_on_gpu(method, 4096, [9000])


@on_gpu
@pytest.mark.parametrize("method", METHODS)
def test_in_a_thread_that_never_used_cuda(method: CopyMethod) -> None:
    """As autograd's own threads may be."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            check_on_gpu(method, 4096, [37])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors, errors


@on_gpu
@pytest.mark.parametrize("method", METHODS)
def test_copies_wait_for_earlier_work_of_their_stream(method: CopyMethod) -> None:
    device = torch.device("cuda")
    host = torch.zeros(64, 65536, dtype=torch.uint8).pin_memory()
    pool = torch.zeros(64, 65536, dtype=torch.uint8, device=device)
    slots = np.random.default_rng(0).permutation(64)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(1, 4):
            torch.cuda._sleep(100_000_000)  # about 50 ms
            pool.fill_(number)
            kept = copy_records(
                addresses(pool, slots), addresses(host, slots), 65536, to_device=False, device=device, method=method
            )
            torch.cuda.current_stream().synchronize()
            assert (host == number).all(), f"{int((host != number).any(1).sum())} records were read too early"
            del kept


@on_gpu
def test_bad_address_on_gpu() -> None:
    host = random_store(2, 4096, pin=True)
    pool = host.cuda()
    beyond = addresses(pool, np.array([0, 2**30]))  # 4 TiB away
    with pytest.raises(CudaCopyError, match="CUDA_ERROR_"):
        copy_records(addresses(host, np.arange(2)), beyond, 4096, to_device=True, device=pool.device, method="loop")


@on_gpu
def test_kernel_is_built_once() -> None:
    """Sizes and counts that were never seen must not compile in mid-step."""
    check_on_gpu("kernel", 4096, [37])
    builds = sum(len(entry[0]) for entry in _copy_records_kernel.device_caches.values())
    for record_bytes, counts in ((16, [1]), (48, [16]), (65536, [1, 2, 32])):
        check_on_gpu("kernel", record_bytes, counts)
    assert sum(len(entry[0]) for entry in _copy_records_kernel.device_caches.values()) == builds


@on_gpu
def test_best_method_on_gpu() -> None:
    device = torch.device("cuda")
    assert best_copy_method(device) in available_copy_methods(device)


@on_gpu
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_beyond_two_gi_bytes(method: CopyMethod) -> None:
    """32-bit offsets would wrap: the last records lie 2.3 GB behind the first ones on both sides."""
    device = torch.device("cuda")
    host = torch.zeros(35_000, 65536, dtype=torch.uint8, pin_memory=True)
    pool = torch.zeros(35_000, 65536, dtype=torch.uint8, device=device)
    host[-3:], host[:3] = 7, 9
    slots = np.array([34_999, 0, 34_997, 2])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        kept = copy_records(
            addresses(host, slots), addresses(pool, slots[::-1].copy()), 65536, to_device=True, device=device,
            method=method,
        )  # fmt: skip
        torch.cuda.synchronize()
    assert [int(record.max()) for record in pool[slots]] == [9, 7, 9, 7]
    assert int(pool.sum(dtype=torch.int64)) == 65536 * 32
    del kept
