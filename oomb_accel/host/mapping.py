"""The memory of one slab: mapped, made present page by page, registered with CUDA, given back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK")
"""Huge pages make touching and registering faster. A forked process (data loaders) must not get the memory: the kernel
would copy every pinned page for it or, before Linux 5.9, leave the parent with pages that the GPU does not write to."""

_mappings = weakref.WeakSet[mmap.mmap]()
"""All that are there, be it for a tensor alone."""


def _leave_to_the_parent() -> None:
    """Keep mappings in a forked process for good. It has a hole where the memory was, into which anything may come that
    it maps, and the end of a mapping would unmap that."""
    for mapping in tuple(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_leave_to_the_parent)


class HostMapping:
    """Anonymous private memory of this process, which a forked one does not get.

    Attributes:
        memory: uint8 ``[num_bytes]`` over all of it.
        address: of its first byte; a page border.
        registered: whether CUDA knows it as pinned.

    Raises:
        OSError: the kernel refuses the mapping.
    """

    def __init__(self, num_bytes: int) -> None:
        # A page more than is used: slabs that touch could be taken for one piece, which CUDA registered as two.
        self._mapping = mmap.mmap(-1, num_bytes + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in _ADVICE:
            self._advise(advice)
        _mappings.add(self._mapping)
        self.memory: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes)
        self.address = self.memory.data_ptr()
        self.registered = False

    def touch(self, start: int, end: int) -> None:
        """Make the pages of these bytes present. Threads may do so side by side: numpy releases the interpreter."""
        np.frombuffer(self._mapping, dtype=np.uint8)[start : end : mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Give the memory back now. Where somebody still holds a tensor over it, the addresses stay valid until that
        is gone, and read as zeros."""
        self._advise("MADV_DONTNEED")
        del self.memory, self._mapping

    def _advise(self, advice: str) -> None:
        number = getattr(mmap, advice, None)
        if number is not None:
            with contextlib.suppress(OSError):  # a kernel without it
                self._mapping.madvise(number)


@dataclass(frozen=True, slots=True)
class Pinner:
    """How memory is pinned."""

    register: Callable[[int, int], None]
    """Pin (address, bytes). Raises RuntimeError with the reason where that is refused."""

    unregister: Callable[[Sequence[int]], None]
    """Unpin what was registered at these addresses, once nothing copies from or to it any more."""


def cuda_pinner(device: int) -> Pinner:
    """Pin for a CUDA device.

    Args:
        device: its number. A new thread is on device 0 otherwise, and would open a context there.
    """

    def register(address: int, num_bytes: int) -> None:
        with torch.cuda.device(device):
            portable = 1  # cudaHostRegisterPortable: for every device of this process
            _check(torch.cuda.cudart().cudaHostRegister(address, num_bytes, portable))

    def unregister(addresses: Sequence[int]) -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            for address in addresses:
                _check(torch.cuda.cudart().cudaHostUnregister(address))

    return Pinner(register, unregister)


def _check(code: int) -> None:
    if int(code) != 0:
        raise RuntimeError(f"CUDA error {int(code)}: {torch.cuda.cudart().cudaGetErrorString(code)}")
