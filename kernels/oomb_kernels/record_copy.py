"""Records between host and device memory: runs of adjacent ones become one copy, and the fastest of three ways is
measured.

n records of one size; addresses are raw, int64.
"""

import ctypes
import warnings
from functools import cache
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oomb_kernels.copy_kernel import launch_copy_records
from oomb_kernels.cuda_copies import (
    NOT_SUPPORTED,
    CudaCopyError,
    copy_batch,
    copy_each,
    has_batch_copies,
    sees_host_addresses,
)

CopyMethod = Literal["batch", "kernel", "loop"]
"""``batch``: many copies by the copy engine in one call; ``kernel``: by a few multiprocessors, in place; ``loop``: by
the copy engine, one call each."""

Int64s = NDArray[np.int64]

_PROBE_RECORD_BYTES = 64 * 2**10
_PROBE_RECORDS = 512
_PROBE_REPEATS = 3
# Multiprocessors that copy are missing elsewhere, and their traffic slows what runs beside them: on an H200 a matrix
# product took up to 1.6 times as long beside the kernel and no longer beside the copy engine, and 361 GiB moved by the
# kernel made a step of 30 s one of 40 s. It is for drivers that take no batches.
_KERNEL_ADVANTAGE = 3.0


def merge_runs(sources: Int64s, targets: Int64s, record_bytes: int) -> tuple[Int64s, Int64s, Int64s]:
    """Sources, targets and bytes of the fewest copies that do the same, in the same order: neighbours in the lists
    that are neighbours in memory on both sides are one."""
    if not len(sources):
        return sources, targets, np.empty(0, np.int64)
    apart = np.empty(len(sources), bool)
    apart[0] = True
    np.not_equal(sources[:-1] + record_bytes, sources[1:], out=apart[1:])
    apart[1:] |= targets[:-1] + record_bytes != targets[1:]
    firsts = apart.nonzero()[0]
    if len(firsts) == len(sources):
        return sources, targets, np.full(len(sources), record_bytes)
    sizes = np.empty_like(firsts)
    np.subtract(firsts[1:], firsts[:-1], out=sizes[:-1])
    sizes[-1] = len(sources) - firsts[-1]
    sizes *= record_bytes
    return sources[firsts], targets[firsts], sizes


def copy_records(
    sources: Int64s,
    targets: Int64s,
    record_bytes: int,
    *,
    to_device: bool,
    device: torch.device,
    method: CopyMethod,
    stream: torch.cuda.Stream | None = None,
) -> object:
    """Copies record i from sources[i] to targets[i].

    The records are copied in no particular order. Lists in ascending order make the longest runs; memory ranges that
    were registered apart must not touch, or a run could cover two of them.

    Args:
        sources, targets: int64 [n], contiguous; targets do not overlap with each other nor with sources.
        record_bytes: for ``kernel`` a multiple of 16, as all addresses then are.
        to_device: False copies to the host.
        device: a CUDA device; with "cpu" everything is host memory and is copied at once, whatever the method.
        method: ``kernel`` needs pinned host memory, ``batch`` a stream other than the default one, ``loop`` takes all.
        stream: None is the current one of `device`.

    Returns: what must be kept alive until the stream has passed; the lists need not.

    Raises:
        CudaCopyError: a RuntimeError; the driver refused a copy.
    """
    assert sources.dtype == targets.dtype == np.int64 and sources.shape == targets.shape
    if not len(sources):
        return None
    if device.type == "cuda" and method == "kernel":
        with torch.cuda.stream(stream):
            return launch_copy_records(sources, targets, record_bytes, device)
    runs = merge_runs(sources, targets, record_bytes)
    if device.type != "cuda":
        for source, target, size in zip(*(array.tolist() for array in runs), strict=True):
            ctypes.memmove(target, source, size)
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    copy = copy_batch if method == "batch" else copy_each
    handle = (stream or torch.cuda.current_stream(device)).cuda_stream
    copy(*runs, to_device=to_device, device_index=index, stream=handle)
    return None


def available_copy_methods(device: torch.device) -> tuple[CopyMethod, ...]:
    """The methods that can work on the device, ``loop`` always."""
    if device.type != "cuda":
        return ("loop",)
    index = torch.cuda.current_device() if device.index is None else device.index
    there = {"batch": has_batch_copies(), "kernel": sees_host_addresses(index), "loop": True}
    return tuple(method for method in get_args(CopyMethod) if there[method])


def best_copy_method(device: torch.device) -> CopyMethod:
    """The fastest method for pinned host memory and scattered records of 64 KiB, both directions together.

    Measured once per device and process, in well under a second besides compiling the kernel, with 32 MiB of pinned
    memory and as much on the device. For memory that could not be pinned use ``loop``.
    """
    if device.type != "cuda":
        return "loop"
    return _measured_method(torch.cuda.current_device() if device.index is None else device.index)


def choose_method(seconds: dict[CopyMethod, float]) -> CopyMethod:
    """The fastest, but the kernel only if it is well ahead of the copy engine."""
    costs = {method: time * (_KERNEL_ADVANTAGE if method == "kernel" else 1) for method, time in seconds.items()}
    return min(costs, key=lambda method: costs[method])


@cache
def _measured_method(device_index: int) -> CopyMethod:
    device = torch.device("cuda", device_index)
    try:
        host = torch.empty(_PROBE_RECORDS * _PROBE_RECORD_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # says nothing about the device, and whoever needs pinned memory will report it better
        return "loop"
    seconds: dict[CopyMethod, float] = {}
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        # Made on this stream: memory that another one has freed may still be in use there.
        pool = torch.empty_like(host, device=device)
        for method in available_copy_methods(device):
            try:
                seconds[method] = sum(_probe_seconds(host, pool, way, method) for way in (True, False))
            except CudaCopyError as error:
                if error.code != NOT_SUPPORTED:
                    warnings.warn(f'Copies by "{method}" are not used.\n{error}', stacklevel=2)
    return choose_method(seconds)


def _probe_seconds(host: Tensor, pool: Tensor, to_device: bool, method: CopyMethod) -> float:
    """The shortest of several copies of all records, each from a random place to another, after one to warm up."""
    random = np.random.default_rng(0)
    offsets = [random.permutation(_PROBE_RECORDS) * _PROBE_RECORD_BYTES for _ in range(2)]
    sources, targets = (host, pool) if to_device else (pool, host)
    addresses = (sources.data_ptr() + offsets[0], targets.data_ptr() + offsets[1])
    times = []
    for _ in range(1 + _PROBE_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kept = copy_records(*addresses, _PROBE_RECORD_BYTES, to_device=to_device, device=pool.device, method=method)
        end.record()
        end.synchronize()
        del kept
        times.append(begin.elapsed_time(end) * 1e-3)
    return min(times[1:])
