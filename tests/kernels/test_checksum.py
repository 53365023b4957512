"""Checksums: the same from the kernel and by definition, another after any change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oomb_kernels import checksums
from oomb_kernels.checksum import checksum_reference, launch_checksums
from tests.kernels.reference import TRITON_PLACES

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SIZES = [8, 4104, 300_008]


def by_hand(x: Tensor) -> int:
    """With Python's own whole numbers."""
    total = 0
    words = x.contiguous().flatten().view(torch.int32).tolist()
    for index, word in enumerate(words):
        place = (index * 0x9E3779B1) % 2**32
        signed = place - 2**32 if place >= 2**31 else place
        product = word * ((signed ^ (signed >> 16)) | 1) % 2**32
        total += product - 2**32 if product >= 2**31 else product
    return total


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_definition(dtype: torch.dtype) -> None:
    tensors = [torch.randn(size, dtype=torch.float64).to(dtype) for size in SIZES[:2]]
    assert checksums(tensors) == [by_hand(x) for x in tensors]


@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_kernel(device: str, dtype: torch.dtype) -> None:
    tensors = [torch.randn(size, device=device).to(dtype) for size in SIZES]
    assert launch_checksums(tensors).tolist() == [int(checksum_reference(x)) for x in tensors] == checksums(tensors)


def test_any_change_is_seen() -> None:
    x = torch.randn(64, 48).bfloat16()
    (before,) = checksums([x])
    changed = [x.clone() for _ in range(4)]
    changed[0].view(torch.int16)[5, 7] ^= 1  # the last bit
    changed[1][[3, 4]] = changed[1][[4, 3]]
    changed[2] = changed[2].flip(1)
    changed[3][:, [1, 2]] = changed[3][:, [2, 1]]
    assert before not in checksums(changed) and checksums([x, x.clone()]) == [before] * 2


def test_tensors_that_are_not_whole() -> None:
    """A view, an odd number of numbers, none at all."""
    x = torch.randn(6, 10).bfloat16()
    assert checksums([x.t(), x[1:3, 1:4], x[0, :3], x[:0]]) == [
        int(checksum_reference(y)) for y in (x.t().contiguous(), x[1:3, 1:4].clone(), x[0, :3].clone(), x[:0].clone())
    ]
    assert checksums([]) == []
