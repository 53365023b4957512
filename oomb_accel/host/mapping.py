"""The memory of one slab: mapped, made present page by page, registered with CUDA, given back."""

from __future__ import annotations

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
_REFUSED = ctypes.c_void_p(-1).value

# Not `mmap.mmap`: that unmaps its addresses in a forked process too, where others may lie there by then.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostMapping:
    """Anonymous private memory of this process, which a forked one does not get.

    In a forked process it is a hole, into which come a malloc's arenas or a thread's stack: nothing that is done to
    this object there, and nothing that happens when it dies, touches those addresses.

    Attributes:
        memory: uint8 ``[num_bytes]`` over all of it.
        address: of its first byte; a page border.
        registered: whether CUDA knows it as pinned.

    Raises:
        OSError: the kernel refuses the mapping.
    """

    def __init__(self, num_bytes: int) -> None:
        # A page more than is used: slabs that touch could be taken for one piece, which CUDA registered as two.
        self._length = num_bytes + mmap.PAGESIZE
        self.address = _map(self._length)
        self._owner = os.getpid()
        self._bytes = (ctypes.c_ubyte * self._length).from_address(self.address)
        # Tensors hold the bytes. At the interpreter's end nobody unmaps: the process is all but gone.
        weakref.finalize(self._bytes, _unmap, self.address, self._length, self._owner).atexit = False
        for advice in _ADVICE:
            self._advise(advice)
        self.memory: Tensor = torch.frombuffer(self._bytes, dtype=torch.uint8, count=num_bytes)
        self.registered = False

    def touch(self, start: int, end: int) -> None:
        """Make the pages of these bytes present. Threads may do so side by side: numpy releases the interpreter."""
        np.frombuffer(memoryview(self._bytes), dtype=np.uint8)[start : end : mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Give the memory back now. Where somebody still holds a tensor over it, the addresses stay valid until that
        is gone, and read as zeros."""
        self._advise("MADV_DONTNEED")
        del self.memory, self._bytes

    def _advise(self, advice: str) -> None:
        number = getattr(mmap, advice, None)
        if number is not None and os.getpid() == self._owner:
            _libc.madvise(self.address, self._length, number)  # what a kernel without it answers does not matter


def _map(length: int) -> int:
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int = _libc.mmap(None, length, access, kind, -1, 0)
    if address == _REFUSED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address


def _unmap(address: int, length: int, owner: int) -> None:
    if os.getpid() == owner:
        _libc.munmap(address, length)


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
