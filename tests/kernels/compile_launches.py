"""Compiles what launch functions launch, for devices that are not there: the very signatures, constants and warps, in
place of a run.

A script, because kernels are interpreted objects in the test process: an architecture, sizes of heads and names of
`LAUNCHES` come in by arguments, JSON of `Build` fields goes out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from oomb_kernels import FLOAT8, checksum, copy_kernel, lse_merge, page_accumulate, page_store, row_float8, slot_update
from oomb_kernels import token_loss as loss
from tests.kernels.ptxas import resources

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUPS, PAGES = 4, 3
ROW_SIZES = (896, 3584, 8192, 18944)
"""Of inputs and outputs of linear layers, of models of 0.5 to 72 billion parameters."""


HeadDims: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """What came of one launch."""

    kernel: str
    what: str
    """Sizes and dtypes."""
    shared_bytes: int
    registers: int
    spilled_bytes: int
    """Stores to what registers have no room for, of one thread."""


def builds_of(names: Iterable[str], arch: int, head_dims: Iterable[int] = (128,)) -> list[Build]:
    """What the launches of these names compile to, each build once, from a process of its own.

    Args:
        arch: compute capability times ten.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_launches", str(arch)]
    command += [",".join(map(str, head_dims)), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Build(**fields) for fields in json.loads(done.stdout)]


def _tokens(num_pages: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """As projections leave them: token by token."""
    return torch.empty(num_pages * page_tokens, GROUPS, head_dim, dtype=dtype).transpose(0, 1)


def _pool(head_dim: int, dtype: torch.dtype, page_tokens: int = 128) -> Tensor:
    return torch.empty(8, 2, page_tokens, head_dim, dtype=dtype)


def _slots(num_pages: int = PAGES) -> Tensor:
    """As a table has them: page by page."""
    return torch.zeros(num_pages, GROUPS, dtype=torch.int32).t()


def _checksums(head_dims: HeadDims) -> Iterator[str]:
    checksum.launch_checksums([torch.empty(64, dtype=BF16)])
    yield "bf16"


def _quantized_rows(head_dims: HeadDims) -> Iterator[str]:
    for size, dtype in product(ROW_SIZES, (BF16, FP32)):
        row_float8.launch_quantize_rows(torch.empty(4, size, dtype=dtype))
        yield f"{size} {dtype}"


def _slot_updates(head_dims: HeadDims) -> Iterator[str]:
    slot_update.launch_set_slots(
        torch.zeros(2, 8, GROUPS, dtype=torch.int32), 32, torch.zeros(2, 37, dtype=torch.int32)
    )
    yield "slots"
    for head_dim, dtype in product(head_dims, (BF16, FP32)):
        slot_update.launch_clear_records(_pool(head_dim, dtype), torch.zeros(5, dtype=torch.int32))
        yield f"{head_dim} {dtype}"


def _record_copies(head_dims: HeadDims) -> Iterator[str]:
    addresses = np.arange(3, dtype=np.int64) * 65536
    copy_kernel.launch_copy_records(addresses, addresses, 65536, torch.device("cpu"))
    yield "records"


def _token_losses(head_dims: HeadDims) -> Iterator[str]:
    for dtype in (BF16, FP16, FP32):
        logits, targets, numbers = (
            torch.empty(4, 151_936, dtype=dtype),
            torch.zeros(4, dtype=torch.int64),
            torch.ones(4),
        )
        loss.launch_token_log_probs(logits, targets)
        yield f"forward {dtype}"
        loss.launch_token_log_probs_backward_(logits, targets, numbers, numbers)
        yield f"backward {dtype}"


def _moved_pages(launch: Callable[[Tensor, Tensor, Tensor, Tensor], None], head_dims: HeadDims) -> Iterator[str]:
    """Between a pool and K and V."""
    for head_dim, stored, given in product(head_dims, (BF16, FP32), (BF16, FP32)):
        tokens = _tokens(PAGES, 128, head_dim, given)
        launch(_pool(head_dim, stored), _slots(), tokens, tokens)
        yield f"{head_dim} pool {stored}, K and V {given}"


def _loaded_pages(head_dims: HeadDims) -> Iterator[str]:
    for head_dim, stored in product(head_dims, (BF16, FP16, FP32)):
        page_store.launch_load_pages(_pool(head_dim, stored), _slots())
        yield f"{head_dim} {stored}"


def _accumulated_pages(head_dims: HeadDims) -> Iterator[str]:
    for head_dim, stored, first in product(head_dims, (BF16, FP32), (True, False)):
        tokens = _tokens(PAGES, 128, head_dim, BF16)
        page_accumulate.launch_accumulate_pages(_pool(head_dim, stored), _slots(), tokens, tokens, first=first, seed=1)
        yield f"{head_dim} {stored} first={first}"


def _float8_pages(head_dims: HeadDims) -> Iterator[str]:
    for head_dim, given in product(head_dims, (BF16, FP32)):
        pool, scales, tokens = (
            _pool(head_dim, FLOAT8),
            torch.empty(GROUPS, PAGES, 2),
            _tokens(PAGES, 128, head_dim, given),
        )
        page_store.launch_store_pages(pool, _slots(), tokens, tokens, scales)
        yield f"store {head_dim} {given}"
        page_store.launch_load_pages(pool, _slots(), scales, given)
        yield f"load {head_dim} {given}"


def _merges(head_dims: HeadDims) -> Iterator[str]:
    for head_dim, dtype in product(head_dims, (BF16, FP32)):
        total, lse = torch.empty(28, 300, head_dim), torch.empty(28, 300)
        lse_merge.launch_merge_attention_(
            total, lse, torch.empty(300, 28, head_dim, dtype=dtype).transpose(0, 1), lse.clone()
        )
        yield f"{head_dim} {dtype}"


def _lengths(head_dims: HeadDims) -> Iterator[str]:
    """The same with ever other numbers of pages, tokens and rows."""
    for count in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33):
        tokens = _tokens(count, 16, 64, BF16)
        page_store.launch_store_pages(_pool(64, BF16, 16), _slots(count), tokens, tokens)
        page_store.launch_add_pages_(_pool(64, FP32, 16), _slots(count), tokens, tokens)
        page_store.launch_load_pages(_pool(64, BF16, 16), _slots(count))
        page_accumulate.launch_accumulate_pages(
            _pool(64, FP32, 16), _slots(count), tokens, tokens, first=True, seed=count
        )
        slot_update.launch_set_slots(
            torch.zeros(9, 8, dtype=torch.int32), count, torch.zeros(2, count, dtype=torch.int32)
        )
        slot_update.launch_clear_records(_pool(64, FP32, 16), torch.zeros(count, dtype=torch.int32))
        checksum.launch_checksums([torch.empty(8 * count, dtype=BF16)] * count)
        row_float8.launch_quantize_rows(torch.empty(count, 64, dtype=BF16))
        addresses = np.arange(count, dtype=np.int64) * 2048
        copy_kernel.launch_copy_records(addresses, addresses, 2048, torch.device("cpu"))
        logits, numbers = torch.empty(count, 500, dtype=BF16), torch.ones(count)
        loss.launch_token_log_probs(logits, numbers.long())
        loss.launch_token_log_probs_backward_(logits, numbers.long(), numbers, numbers)
        yield f"{count}"


LAUNCHES: dict[str, Callable[[HeadDims], Iterator[str]]] = {
    "checksums": _checksums,
    "quantized rows": _quantized_rows,
    "slot updates": _slot_updates,
    "record copies": _record_copies,
    "token losses": _token_losses,
    "stored pages": partial(_moved_pages, page_store.launch_store_pages),
    "loaded pages": _loaded_pages,
    "added pages": partial(_moved_pages, page_store.launch_add_pages_),
    "accumulated pages": _accumulated_pages,
    "float8 pages": _float8_pages,
    "merges": _merges,
    "lengths": _lengths,
}
"""Each launches kernels, and says after each launch what it was."""


class _AbsentDevice:
    """What Triton asks of a driver before it launches."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(arch: int, head_dims: HeadDims, names: list[str]) -> list[Build]:
    driver.set_active(_AbsentDevice(arch))
    launched: list[tuple[str, Any]] = []

    def compiled(function: JITFunction[Any], grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if "NATIVE" in kwargs:  # not on the device for which it is compiled
                kwargs["NATIVE"] = True
            launched.append((function.fn.__name__, function.run(*args, grid=grid, warmup=True, **kwargs)))

        return launch

    JITFunction.__getitem__ = compiled
    found: dict[str, Build] = {}
    for name in names:
        for what in LAUNCHES[name](head_dims):
            for kernel, build in launched:
                if build.hash not in found:
                    found[build.hash] = _build(kernel, what, build, arch)
            launched.clear()
    return list(found.values())


def _build(kernel: str, what: str, build: Any, arch: int) -> Build:
    return Build(kernel, what, build.metadata.shared, *resources(build.asm["ptx"], arch))


if __name__ == "__main__":
    _, arch, head_dims, *names = sys.argv
    json.dump(
        [asdict(build) for build in _compile(int(arch), tuple(map(int, head_dims.split(","))), names)], sys.stdout
    )
