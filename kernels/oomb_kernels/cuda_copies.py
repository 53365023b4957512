"""Copies between host and device memory by CUDA's driver library, called through ctypes: a whole batch in one call, or
one call a copy.

Prototypes and values are those of `cuda.h` of CUDA 12.8, which later drivers keep for programs built with it. Arrays
are int64 [n], contiguous: addresses, and bytes of each copy.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
_BATCH_VERSION = 12080  # the first with cuMemcpyBatchAsync; 13000 has the same without fail_index
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
# The device begins with the first copies of a batch when the call returns, so it need not be idle while the host hands
# over the rest: of records of 64 KiB in a step at 256K tokens, calls of 4,096 / 256 / 64 made it 29.9 / 28.3 / 28.0 s.
# (Drivers 580 have crashed and hung with tens of thousands of copies in a call, vLLM issue 49276.)
_MOST_COPIES = 64

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_ON_DEVICE, _ON_HOST = 1, 2  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST


class CudaCopyError(RuntimeError):
    """CUDA refused a call."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        """The CUresult."""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class _Driver:
    library: Any
    batch: Any
    """cuMemcpyBatchAsync, or None where the driver has none."""


def has_batch_copies() -> bool:
    """Whether the driver is there and has cuMemcpyBatchAsync."""
    try:
        return _driver().batch is not None
    except OSError:
        return False


def sees_host_addresses(device_index: int) -> bool:
    """Whether kernels may use the host's own address of registered memory."""
    handle, value = ctypes.c_int(), ctypes.c_int()
    _check(_driver().library.cuDeviceGet(ctypes.byref(handle), device_index), "cuDeviceGet")
    code = _driver().library.cuDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTER, handle)
    _check(code, "cuDeviceGetAttribute")
    return bool(value.value)


def copy_batch(
    sources: Int64s, targets: Int64s, sizes: Int64s, *, to_device: bool, device_index: int, stream: int
) -> None:
    """Enqueues all copies by cuMemcpyBatchAsync, in no order among themselves; the arrays may change afterwards.

    Args:
        stream: its handle; 0, the legacy default stream, is refused.
    """
    if stream == 0:
        raise ValueError(
            "A batch of copies was asked for on the default stream.\n"
            "cuMemcpyBatchAsync takes any stream of its own, not handle 0.\n"
            'Call it under torch.cuda.stream(torch.cuda.Stream()), or use method "loop".'
        )
    batch, failed = _driver().batch, ctypes.c_size_t(0)
    target, source, size = (array.ctypes.data for array in (targets, sources, sizes))
    order, first = _attributes(to_device, device_index)
    with _Context(device_index):
        for begin in range(0, len(sizes), _MOST_COPIES):
            count, skipped = min(_MOST_COPIES, len(sizes) - begin), 8 * begin
            code = batch(
                target + skipped, source + skipped, size + skipped, count, order, first, 1, ctypes.byref(failed), stream
            )
            if code:
                raise _refused(code, begin + min(failed.value, count - 1), sources, targets, sizes)


def copy_each(
    sources: Int64s, targets: Int64s, sizes: Int64s, *, to_device: bool, device_index: int, stream: int
) -> None:
    """Enqueues the copies one by one, in order; host memory that is not pinned makes it wait for each."""
    library = _driver().library
    copy = library.cuMemcpyHtoDAsync_v2 if to_device else library.cuMemcpyDtoHAsync_v2
    with _Context(device_index):
        for number, (source, target, size) in enumerate(
            zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True)
        ):
            code = copy(target, source, size, stream)
            if code:
                raise _refused(code, number, sources, targets, sizes)


@cache
def _attributes(to_device: bool, device_index: int) -> tuple[Any, Any]:
    """References to those of every copy of a batch, and to the number of the first copy that has them. Sources are read
    in stream order: read earlier, records going to the host might not have been written yet."""
    host, device = _Location(_ON_HOST, 0), _Location(_ON_DEVICE, device_index)
    source, target = (host, device) if to_device else (device, host)
    order = _Attributes(_STREAM_ORDER, source, target, 0)
    return ctypes.byref(order), ctypes.byref(ctypes.c_size_t(0))


@cache
def _driver() -> _Driver:
    """Raises: OSError: there is no driver."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    for name, arguments in {
        "cuGetProcAddress_v2": (ctypes.c_char_p, pointer, integer, ctypes.c_uint64, pointer),
        "cuGetErrorName": (integer, pointer),
        "cuDeviceGet": (pointer, integer),
        "cuDeviceGetAttribute": (pointer, integer, integer),
        "cuDevicePrimaryCtxRetain": (pointer, integer),
        "cuCtxGetCurrent": (pointer,),
        "cuCtxPushCurrent_v2": (pointer,),
        "cuCtxPopCurrent_v2": (pointer,),
        "cuMemcpyHtoDAsync_v2": (pointer, pointer, size, pointer),
        "cuMemcpyDtoHAsync_v2": (pointer, pointer, size, pointer),
    }.items():
        getattr(library, name).argtypes = arguments
    address, status = ctypes.c_void_p(), ctypes.c_int()
    code = library.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync", ctypes.byref(address), _BATCH_VERSION, 0, ctypes.byref(status)
    )
    if code or status.value or not address.value:
        return _Driver(library, None)
    # targets, sources, sizes, count; attributes, first copy of each, count; fail_index, stream
    batch = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return _Driver(library, ctypes.CFUNCTYPE(integer, *batch)(address.value))


@cache
def _primary_context(device_index: int) -> int:
    """The context that torch uses on the device too; kept until the process ends."""
    library, handle, context = _driver().library, ctypes.c_int(), ctypes.c_void_p()
    _check(library.cuDeviceGet(ctypes.byref(handle), device_index), "cuDeviceGet")
    _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    assert context.value is not None
    return context.value


class _Context:
    """The device's is current inside: copies may come from a thread where CUDA's runtime has not made it so yet."""

    def __init__(self, device_index: int) -> None:
        self._wanted, self._pushed = _primary_context(device_index), False

    def __enter__(self) -> None:
        library, current = _driver().library, ctypes.c_void_p()
        _check(library.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
        if current.value != self._wanted:
            _check(library.cuCtxPushCurrent_v2(self._wanted), "cuCtxPushCurrent")
            self._pushed = True

    def __exit__(self, *error: object) -> None:
        if self._pushed:
            _driver().library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _check(code: int, name: str) -> None:
    if code:
        raise CudaCopyError(
            code,
            f"CUDA refused {name}: {_error_name(code)}.\n"
            "The driver library answered, the device did not.\n"
            "Check it with nvidia-smi, and CUDA_VISIBLE_DEVICES.",
        )


def _refused(code: int, number: int, sources: Int64s, targets: Int64s, sizes: Int64s) -> CudaCopyError:
    return CudaCopyError(
        code,
        f"CUDA refused to copy records: {_error_name(code)}.\n"
        f"At copy {number} of {len(sizes)}: {sizes[number]} bytes from {sources[number]:#x} to {targets[number]:#x}.\n"
        "Each copy must stay inside one device allocation and one registered range of host memory; if it does, the "
        "error is that of earlier work: run with CUDA_LAUNCH_BLOCKING=1 to find it.",
    )


def _error_name(code: int) -> str:
    name = ctypes.c_char_p()
    _driver().library.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"
