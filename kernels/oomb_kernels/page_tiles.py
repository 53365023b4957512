"""Launch configurations of the page kernels: tile sizes, warps and pipeline stages, as measured on an H200 and cut
down for devices with less shared memory."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch

from oomb_kernels.launch import next_power_of_2

Kernel = Literal["forward", "backward_q", "backward_kv", "backward_sum"]

_SMALLEST_TILE = 16  # of a matrix product in Triton
_MEASURED_SHARED_BYTES = 227 * 2**10  # of an H200
_SMALL_BYTES = 2 * 2**10  # LSE and delta of the rows in flight, barriers, sums across warps


@dataclass(frozen=True, slots=True)
class Tiles:
    """One launch configuration."""

    block_m: int
    """Query rows of a tile; divides the query block."""
    block_n: int
    """Tokens of a tile of a page; divides the page."""
    num_warps: int
    num_stages: int
    num_heads: int = 1
    """Query heads of a program, 1 or 2. Only the sum of dQ takes two, which share what they load of K."""


# For pages and query blocks of at least 128 tokens; others are cut down from these.
_TILES: dict[tuple[Kernel, int], Tiles] = {
    ("forward", 64): Tiles(128, 64, 4, 3),
    ("forward", 128): Tiles(128, 64, 4, 2),
    ("forward", 256): Tiles(128, 64, 8, 2),
    ("backward_q", 64): Tiles(64, 64, 4, 4),
    ("backward_q", 128): Tiles(128, 128, 8, 2),
    ("backward_q", 256): Tiles(64, 64, 8, 2),
    ("backward_kv", 64): Tiles(64, 128, 8, 3),
    ("backward_kv", 128): Tiles(32, 64, 4, 4),
    ("backward_kv", 256): Tiles(32, 64, 8, 2),
    ("backward_sum", 64): Tiles(128, 64, 4, 4),
    ("backward_sum", 128): Tiles(128, 64, 8, 4, 2),
    ("backward_sum", 256): Tiles(128, 64, 8, 3),
}


_MANY_ROWS = {("forward", 128), ("backward_kv", 64)}
"""Sizes of the side that a program keeps, with which 4 warps have too few registers."""


@cache
def choose_tiles(
    kernel: Kernel,
    head_dim: int,
    page_tokens: int,
    block_tokens: int,
    itemsize: int,
    shared_bytes: int,
    *,
    float8: bool = False,
) -> Tiles:
    """The configuration for a call: the measured one, or the next smaller one that the device has the memory for.

    Args:
        itemsize: bytes of an element of q; tiles of 4 bytes are half as wide.
        shared_bytes: shared memory that one program may take, see `shared_memory_of`.
        float8: pages are in e4m3.

    Returns: of those that fit the one with the largest block_m, then block_n, then num_stages; if none fits, the
        smallest, which Triton refuses to launch with a message of its own. Devices with less memory than an H200 have
        operands of products in registers: there more warps share them, tiles are smaller, and copies ahead come first.
    """
    width = max(64, next_power_of_2(head_dim))
    measured = _TILES[kernel, min(width, 256)]
    in_registers = shared_bytes < _MEASURED_SHARED_BYTES
    most_m, most_n, num_heads = measured.block_m, measured.block_n, measured.num_heads
    if in_registers:
        most_n, num_heads = min(most_n, 64 if kernel == "backward_q" else most_n), 1
    limit = 128 if itemsize <= 2 else 32

    def warps(block_m: int, block_n: int) -> int:
        if in_registers and (kernel, block_m if kernel == "forward" else block_n) in _MANY_ROWS:
            return 8
        if (block_m, block_n) == (measured.block_m, measured.block_n):
            return measured.num_warps
        return min(measured.num_warps, 4 if block_m * block_n <= 64 * 64 else 8)

    options = [
        Tiles(block_m, block_n, warps(block_m, block_n), num_stages, num_heads)
        for block_m in _halvings(_divisor(min(block_tokens, most_m, limit), block_tokens))
        for block_n in _halvings(_divisor(min(page_tokens, most_n, limit), page_tokens))
        for num_stages in range(measured.num_stages, 0, -1)
    ]
    if in_registers:
        options.sort(key=lambda tiles: tiles.num_stages == 1)
    fitting = (t for t in options if shared_estimate(kernel, t, head_dim, itemsize, float8=float8) <= shared_bytes)
    return next(fitting, options[-1])


def shared_estimate(kernel: Kernel, tiles: Tiles, head_dim: int, itemsize: int, *, float8: bool = False) -> int:
    """Bytes of shared memory that a launch takes at most, on sm_80, sm_89, sm_90 and sm_120.

    A program holds the tiles of its own rows and streams two tiles of the other side, each as often as the pipeline
    has stages. dQ never holds more than two of those: it first has to load where the next page is, which takes up the
    other stages. The forward has its first tile of K beside the pipeline's. The owners of pages hold a tile of dS on
    its way out; the sum of dQ holds nothing but what it streams, dS and K. In 16 bits Hopper takes this to within
    2 KiB in most calls, the other architectures less. Tiles in e4m3 are held as they come and as they are multiplied.
    Calibrated on Triton 3.6.
    """
    width = next_power_of_2(head_dim)
    if kernel == "backward_sum":
        row_bytes = itemsize * tiles.num_heads * tiles.block_m + (1 if float8 else itemsize) * width
        converted = itemsize * tiles.block_n * width if float8 else 0
        return tiles.num_stages * tiles.block_n * row_bytes + converted + _SMALL_BYTES
    streams_records = kernel != "backward_kv"
    own, other = (tiles.block_m, tiles.block_n) if streams_records else (tiles.block_n, tiles.block_m)
    held = own if kernel == "forward" else 2 * own
    depth = min(tiles.num_stages, 2) if kernel == "backward_q" else tiles.num_stages
    elements = width * (held + (1 if float8 and streams_records else depth) * 2 * other)
    if kernel == "forward" and tiles.num_stages > 1 and itemsize <= 2 and not float8:
        elements += width * tiles.block_n
    if itemsize > 2:
        # FMA reads weights from there as well, and dK and dV a copy of their query rows in another layout.
        elements += tiles.block_m * (tiles.block_n if streams_records else max(tiles.block_n, width))
    elif not streams_records:
        elements += tiles.block_m * tiles.block_n
    codes = width * 2 * tiles.block_n * (depth if streams_records else 1) if float8 else 0
    return itemsize * elements + codes + _SMALL_BYTES


def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that one program may take on a device."""
    return _shared_memory(device) if device.type == "cuda" else _MEASURED_SHARED_BYTES


@cache
def _shared_memory(device: torch.device) -> int:
    # Not in torch's type stubs.
    return int(cast(Any, torch.cuda.get_device_properties(device)).shared_memory_per_block_optin)


def _halvings(size: int) -> list[int]:
    """A power of two and its halves, down to the smallest tile of a matrix product."""
    return [size >> shift for shift in range(size.bit_length()) if shift == 0 or size >> shift >= _SMALLEST_TILE]


def _divisor(at_most: int, of: int) -> int:
    """The largest power of two up to ``at_most`` that divides ``of``."""
    return min(1 << (at_most.bit_length() - 1), of & -of)
