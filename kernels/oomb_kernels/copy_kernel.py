"""Records between host and device memory by a kernel that reads and writes pinned host memory in place.

n records; addresses are raw, int64.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_WORDS = 2048  # of 8 bytes: four accesses of 16 bytes a thread
_NUM_WARPS = 8
# PCIe is full with 8 of them already, and what they take is missing elsewhere.
_NUM_PROGRAMS = 16


# One build for all calls: those with 1 record, or a size never seen, must not compile again in mid-step.
@triton.jit(do_not_specialize=["num_records", "record_pairs"])
def _copy_records_kernel(addresses, num_records, record_pairs, BLOCK_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    # grid: any; programs stride over the records
    record_words = record_pairs * 2  # known to be even: masks do not split accesses of 16 bytes
    step = tl.num_programs(0).to(tl.int64)
    record = tl.program_id(0).to(tl.int64)
    sources, targets = addresses, addresses + num_records
    source = tl.load(sources + record, mask=record < num_records, other=0)
    target = tl.load(targets + record, mask=record < num_records, other=0)
    while record < num_records:
        # The next addresses are on their way while this record is copied.
        later = record + step
        next_source = tl.load(sources + later, mask=later < num_records, other=0)
        next_target = tl.load(targets + later, mask=later < num_records, other=0)
        read_at = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        write_at = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        for start in range(0, record_words, BLOCK_WORDS):
            word = start + tl.arange(0, BLOCK_WORDS)
            inside = word < record_words
            tl.store(write_at + word, tl.load(read_at + word, mask=inside), mask=inside)
        record, source, target = later, next_source, next_target


def launch_copy_records(
    sources: NDArray[np.int64], targets: NDArray[np.int64], record_bytes: int, device: torch.device
) -> Tensor:
    """Enqueues the kernel on the current stream of `device`.

    Args:
        sources, targets: [n], multiples of 16; host memory must be pinned.
        record_bytes: a multiple of 16.

    Returns: the addresses, int64 [2, n], pinned: to be kept until the stream has passed.
    """
    assert record_bytes % 16 == 0 and not (np.bitwise_or.reduce(sources | targets) & 15), "records are 16-byte aligned"
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device if on_gpu else -1):
        # The kernel reads them in place: a copy to the device would queue behind records that are on their way.
        addresses = torch.empty(2, len(sources), dtype=torch.int64, pin_memory=on_gpu)
        np.stack([sources, targets], out=addresses.numpy())
        _copy_records_kernel[(min(_NUM_PROGRAMS, len(sources)),)](
            addresses, len(sources), record_bytes // 16, BLOCK_WORDS=_BLOCK_WORDS, num_warps=_NUM_WARPS
        )
    return addresses
