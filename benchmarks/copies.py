"""GB/s of copying records between pinned host memory and the device, alone and beside a matrix product:
``python -m benchmarks.copies --records 65536 131072``.

One line per method, size of a record, order and direction. The host's time for asking is part of the cost: it is on
the thread that launches the model's kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from oomb_accel.cli.devices import what_torch_sees
from oomb_kernels import CopyMethod, available_copy_methods, best_copy_method, copy_records

GIB = 2**30
RUN_BYTES = 16 * 2**20
"""One layer's new pages of a chunk of 8192 tokens, 4 KV heads, head_dim 128, bf16."""
MATRIX = 8192
REPEATS = 3

Order = Literal["random", "runs"]
Direction = Literal["to_device", "to_host", "both"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of copying."""

    method: CopyMethod
    record_bytes: int
    order: Order
    """``random``: each record from a random place to another; ``runs``: in runs of `RUN_BYTES`."""
    direction: Direction
    """``both``: half of the bytes each way at the same time, on two streams."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out; rates in 1e9 bytes per second, of both directions together."""

    alone: float
    host_us_per_record: float
    beside: float
    """While matrix products run."""
    product_slowdown: float
    """Time of matrix products while copies run over their time alone."""

    def __str__(self) -> str:
        return (
            f"alone {self.alone:5.1f} GB/s, host {self.host_us_per_record:6.2f} us per record, "
            f"beside products {self.beside:5.1f} GB/s, products take {self.product_slowdown:.3f} of their time"
        )


def measure(setting: Setting, host: Tensor, pool: Tensor) -> Figures:
    """Copies all of `host` (pinned) or of `pool`, uint8 [bytes] of the same length."""
    factors = torch.randn(3, MATRIX, MATRIX, device=pool.device).to(torch.bfloat16)
    product = partial(torch.mm, factors[0], factors[1], out=factors[2])
    copies = _plan(setting, host, pool)
    streams = [torch.cuda.Stream(pool.device) for _ in copies]
    asked: list[float] = []

    def copy() -> object:
        start = time.perf_counter()
        kept = [
            _enqueue(setting, addresses, to_device, stream, pool.device)
            for (addresses, to_device), stream in zip(copies, streams, strict=True)
        ]
        asked.append(time.perf_counter() - start)
        return kept

    here = [torch.cuda.current_stream(pool.device)]
    copy_alone = _seconds(copy, 1, streams)
    host_us = statistics.median(asked) * 1e6 / sum(len(addresses[0]) for addresses, _ in copies)
    product_alone = _seconds(product, 20, here) / 20
    # One of the two must outlast the other, so that all that is timed ran beside something.
    num_products = 2 + int(1.5 * copy_alone / product_alone)
    copy_beside = _seconds(copy, 1, streams, beside=partial(_repeat, product, num_products))
    num_copies = 2 + int(2 * 20 * product_alone / copy_alone)
    product_beside = _seconds(product, 20, here, beside=partial(_repeat, copy, num_copies), beside_first=False) / 20
    return Figures(
        host.nbytes / copy_alone * 1e-9, host_us, host.nbytes / copy_beside * 1e-9, product_beside / product_alone
    )


def settings(
    records: Iterable[int], methods: Iterable[CopyMethod], orders: Sequence[Order], directions: Sequence[Direction]
) -> list[Setting]:
    """All of them, crossed."""
    return [
        Setting(method, record_bytes, order, direction)
        for record_bytes in records
        for order in orders
        for direction in directions
        for method in methods
    ]


_Addresses = tuple[np.ndarray, np.ndarray]


def _plan(setting: Setting, host: Tensor, pool: Tensor) -> list[tuple[_Addresses, bool]]:
    """Sources and targets of each direction."""
    ways = {"to_device": [True], "to_host": [False], "both": [True, False]}[setting.direction]
    random = np.random.default_rng(0)
    num_records = host.nbytes // setting.record_bytes // len(ways)
    run = 1 if setting.order == "random" else max(1, RUN_BYTES // setting.record_bytes)
    plan = []
    for number, to_device in enumerate(ways):
        first = number * num_records
        offsets = [
            (first + random.permutation(num_records // run)[:, None] * run + np.arange(run)).ravel()
            * setting.record_bytes
            for _ in range(2)
        ]
        sources, targets = (host, pool) if to_device else (pool, host)
        plan.append(((sources.data_ptr() + offsets[0], targets.data_ptr() + offsets[1]), to_device))
    return plan


def _enqueue(
    setting: Setting, addresses: _Addresses, to_device: bool, stream: torch.cuda.Stream, device: torch.device
) -> object:
    with torch.cuda.stream(stream):
        return copy_records(*addresses, setting.record_bytes, to_device=to_device, device=device, method=setting.method)


def _repeat(work: Callable[[], object], times: int) -> list[object]:
    return [work() for _ in range(times)]


def _seconds(
    work: Callable[[], object],
    times: int,
    streams: Sequence[torch.cuda.Stream],
    *,
    beside: Callable[[], object] | None = None,
    beside_first: bool = True,
) -> float:
    """Median time on the device from the start until `streams` have done the work `times` times."""
    measured = []
    for number in range(1 + REPEATS):  # the first one warms up
        torch.cuda.synchronize()
        begin, kept = torch.cuda.Event(enable_timing=True), []
        begin.record()
        for stream in streams:
            stream.wait_event(begin)
        if beside is not None and beside_first:
            kept.append(beside())
        kept.append(_repeat(work, times))
        ends = [torch.cuda.Event(enable_timing=True) for _ in streams]
        for end, stream in zip(ends, streams, strict=True):
            end.record(stream)
        if beside is not None and not beside_first:
            kept.append(beside())
        torch.cuda.synchronize()
        if number:
            measured.append(max(begin.elapsed_time(end) for end in ends) * 1e-3)
    return statistics.median(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[16384, 32768, 65536, 131072], help="bytes")
    parser.add_argument("--orders", nargs="+", choices=get_args(Order), default=list(get_args(Order)))
    parser.add_argument("--directions", nargs="+", choices=get_args(Direction), default=list(get_args(Direction)))
    parser.add_argument("--methods", nargs="+", choices=get_args(CopyMethod), help="all that the device has")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of a measurement, pinned")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"benchmarks.copies needs a CUDA device.\n  {what_torch_sees()}\n  Run it on a machine with one."
        )
    device = torch.device("cuda")
    host = torch.zeros(int(options.gib * GIB), dtype=torch.uint8, pin_memory=True)
    pool = torch.zeros_like(host, device=device)
    methods = options.methods or available_copy_methods(device)
    for setting in settings(options.records, methods, options.orders, options.directions):
        print(f"{setting.method:6} {setting.record_bytes:7} {setting.order:6} {setting.direction:9}", end=" ")
        print(measure(setting, host, pool), flush=True)
    print(f"chosen: {best_copy_method(device)}")


if __name__ == "__main__":
    main()
