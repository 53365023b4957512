"""What a few numbers of the host change on the device: slots in a table, and records that become zero.

The numbers may lie in pinned host memory, where the kernels read them in place: a copy of them would queue behind
whatever else is being copied.

M numbers of int32; S slots, P page_tokens, D head_dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_NUMBERS = 256
_BLOCK_ELEMENTS = 8192
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["first", "count"])
def _set_slots_kernel(table, first, numbers, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # grid: cdiv(count, BLOCK)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.load(numbers + at, mask=inside, other=0)
    slot = tl.load(numbers + count + at, mask=inside, other=0)
    tl.store(table + first + place, slot, mask=inside)


@triton.jit
def _clear_records_kernel(pool, slots, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # grid: M
    record = pool + tl.load(slots + tl.program_id(0)).to(tl.int64) * ELEMENTS
    for start in range(0, ELEMENTS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(record + at, tl.zeros([BLOCK], pool.dtype.element_ty), mask=at < ELEMENTS)


def launch_set_slots(table: Tensor, first: int, numbers_2M: Tensor) -> None:
    """The Triton kernel of `set_slots`."""
    count = numbers_2M.shape[1]
    with torch.cuda.device_of(table):
        _set_slots_kernel[(triton.cdiv(count, _BLOCK_NUMBERS),)](table, first, numbers_2M, count, BLOCK=_BLOCK_NUMBERS)


def launch_clear_records(pool: Tensor, slots_M: Tensor) -> None:
    """The Triton kernel of `clear_records`."""
    elements = pool[0].numel()
    block = min(_BLOCK_ELEMENTS, triton.next_power_of_2(elements))
    with torch.cuda.device_of(pool):
        _clear_records_kernel[(len(slots_M),)](pool, slots_M, ELEMENTS=elements, BLOCK=block, num_warps=_NUM_WARPS)


def set_slots_reference(table: Tensor, first: int, numbers_2M: Tensor) -> None:
    """The definition of `set_slots`."""
    places, slots = numbers_2M
    table.view(-1)[first + places.long()] = slots


def clear_records_reference(pool: Tensor, slots_M: Tensor) -> None:
    """The definition of `clear_records`."""
    pool[slots_M.long()] = 0


def set_slots(table: Tensor, first: int, numbers_2M: Tensor) -> None:
    """Writes ``numbers[1]`` to the places ``first + numbers[0]`` of a table laid out in a row.

    Args:
        table: int32, contiguous, with less than 2^31 elements.
        numbers_2M: int32 [2, M], contiguous, on the table's device or in pinned host memory that is left alone until
            the stream has passed; equal places have equal slots, M at least 1.
    """
    assert table.dtype == numbers_2M.dtype == torch.int32 and table.is_contiguous() and numbers_2M.is_contiguous()
    (launch_set_slots if table.is_cuda else set_slots_reference)(table, first, numbers_2M)


def clear_records(pool: Tensor, slots_M: Tensor) -> None:
    """Fills records with zeros.

    Args:
        pool: [S, 2, P, D], contiguous.
        slots_M: int32 [M], contiguous, where `set_slots` may have its numbers; M at least 1.
    """
    assert slots_M.dtype == torch.int32 and pool.is_contiguous() and slots_M.is_contiguous()
    (launch_clear_records if pool.is_cuda else clear_records_reference)(pool, slots_M)
