"""Checksums of tensors: whether one has changed, by whatever way, without a second copy of it.

Each number counts by its place, so exchanged numbers are seen too: the bits of a tensor are read as words of 32 bits,
each is multiplied by an odd number that stands for its place, and the products, modulo 2^32, are added. A change of one
word is always seen, any other change but for a chance of about 2^-32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_MULTIPLIER = -1640531535
"""The golden ratio's 32 bits, as a signed number: neighbours get numbers far from each other."""
_PROGRAMS = 64
"""Per tensor: the largest of a 7B is 68 million numbers, and tensors of all sizes are read at once."""
_BLOCK_WORDS = 2048
_PIECE = 16
"""Bytes of one access."""


def checksum_reference(tensor: Tensor) -> Tensor:
    """By definition, in plain torch: int64, ``[]``, on the tensor's device."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    words = torch.nn.functional.pad(bits, (0, -len(bits) % 4)).view(torch.int32)
    place = torch.arange(len(words), dtype=torch.int32, device=words.device) * _MULTIPLIER
    return (words * ((place ^ (place >> 16)) | 1)).sum(dtype=torch.int64)


@triton.jit
def _checksums_kernel(  # type: ignore[no-untyped-def]
    table, sums, MULTIPLIER: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    # grid: (tensors, PROGRAMS). Programs of one tensor take its blocks in turn.
    tensor, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    words = tl.multiple_of(tl.load(table + 2 * tensor).to(tl.pointer_type(tl.int32)), 16)
    num_words = tl.load(table + 2 * tensor + 1) * 4  # known to be fours: masks do not split accesses of 16 bytes
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(program * BLOCK, num_words, PROGRAMS * BLOCK):
        index = start + lane
        place = index.to(tl.int32) * MULTIPLIER
        word = tl.load(words + index, mask=index < num_words, other=0)
        total += (word * ((place ^ (place >> 16)) | 1)).to(tl.int64)
    tl.store(sums + tensor * PROGRAMS + program, tl.sum(total, 0))


def launch_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """The Triton kernel, one launch for all tensors of a device: int64 ``[tensors]``. Reads each once.

    Args:
        tensors: contiguous, of whole pieces of 16 bytes, see `_is_whole`.
    """
    device = tensors[0].device
    table = torch.tensor([(t.data_ptr(), t.numel() * t.element_size() // _PIECE) for t in tensors], device=device)
    sums = torch.empty(len(tensors), _PROGRAMS, dtype=torch.int64, device=device)
    with torch.cuda.device_of(tensors[0]):
        _checksums_kernel[(len(tensors), _PROGRAMS)](
            table, sums, MULTIPLIER=_MULTIPLIER, PROGRAMS=_PROGRAMS, BLOCK=_BLOCK_WORDS, num_warps=8
        )
    return sums.sum(1)


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """The checksum of each tensor; the host waits for one copy from each device."""
    found: dict[int, int] = {}
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(place)
    for device, places in by_device.items():
        fast = [place for place in places if device.type == "cuda" and _is_whole(tensors[place])]
        slow = sorted(set(places) - set(fast))
        sums = [launch_checksums([tensors[place] for place in fast])] if fast else []
        sums += [checksum_reference(tensors[place])[None] for place in slow]
        found.update(zip(fast + slow, torch.cat(sums).tolist(), strict=True))
    return [found[place] for place in range(len(tensors))]


def _is_whole(tensor: Tensor) -> bool:
    """Whether the kernel can read it."""
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and not num_bytes % _PIECE and not tensor.data_ptr() % _PIECE
