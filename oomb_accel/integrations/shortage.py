"""What to say when memory runs out in the middle of a step: what was short, by the numbers, and what would fit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from oomb_accel.config import OombConfig
from oomb_accel.host import HostMemoryError
from oomb_accel.progress import GIB

_SHORT = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""Words of torch, Triton and the libraries."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_SPARE = 0.01
"""Of the device, that a remedy frees beyond what was missing: memory is given in blocks."""


class DeviceMemoryError(torch.OutOfMemoryError):
    """The device ran out of memory in the middle of a step. The text says what was short, and what would fit."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The moment when memory ran out; bytes."""

    sweep: str
    chunk: int
    num_chunks: int
    device: torch.device
    free: int
    """On the device, for new tensors."""
    total: int
    kept: Mapping[str, int]
    """On the device, by tier: what is kept from chunk to chunk."""
    planned: Mapping[str, int]
    """Device memory of pages and their gradients, as the step planned it."""
    least: int
    """Device memory without which pages cannot work."""
    whole: int
    """All pages and gradients, wherever they lie."""
    activations: int
    """Of the longest chunk."""
    longest_chunk: int
    """Tokens."""
    host: Mapping[str, int]
    """Host memory for pages and kept outputs: ``used``, ``limit`` and ``spare``, what they could still take."""
    config: OombConfig
    float8_base: int = 0
    """Of frozen weights in 8 bits."""


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, on the device or for pages on the host."""
    if isinstance(error, torch.OutOfMemoryError | HostMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHORT)


def explained(error: BaseException, shortage: Shortage) -> RuntimeError:
    """The error to raise instead: of the same kind, with what was short and what would fit."""
    if isinstance(error, HostMemoryError):
        return HostMemoryError(_host_text(error, shortage))
    return DeviceMemoryError(_device_text(error, shortage))


def _host_text(error: HostMemoryError, shortage: Shortage) -> str:
    what, measured, remedy = (*(line.strip() for line in str(error).splitlines()), "", "")[:3]
    more = []
    if shortage.config.page_grad_dtype == "float32":
        more.append("page_grad_dtype='bfloat16', which halves page gradients")
    if shortage.config.device_pages_gib != "auto" and shortage.free > 0.1 * shortage.total:
        roomy = sum(shortage.planned.values()) + 0.8 * shortage.free
        more.append(f"device_pages_gib={_gib_setting(roomy)}, as the device has room")
    also = f" Or set {' or '.join(more)}." if more else ""
    return (
        f"{what.rstrip('.')}, in the {_place(shortage)}.\n"
        f"  {measured} Pages hold {_gib(shortage.host['used'])} GiB on the host; the device holds {_held(shortage)} "
        f"and has {_gib(shortage.free)} of {_gib(shortage.total)} GiB free.\n"
        f"  {remedy}{also} {_UNHARMED}"
    )


def _device_text(error: BaseException, shortage: Shortage) -> str:
    asked = _asked(str(error))
    place = "device" if shortage.device.type != "cpu" else "machine"
    wanted = "" if asked is None else f"{_gib(asked)} GiB were asked for, "
    return (
        f"The {place} ran out of memory in the {_place(shortage)}.\n"
        f"  {_first_sentences(str(error))} {wanted}{_gib(shortage.free)} of {_gib(shortage.total)} GiB are free; "
        f"{_held(shortage)}; host memory for pages and outputs: {_gib(shortage.host['used'])} of at most "
        f"{_gib(shortage.host['limit'])} GiB.\n"
        f"  {_remedy(shortage, asked)} {_UNHARMED}"
    )


_UNHARMED = "Weights and optimizer state are those from before the step."


def _place(shortage: Shortage) -> str:
    return f"{shortage.sweep} sweep of a step, chunk {shortage.chunk} of {shortage.num_chunks}"


def _held(shortage: Shortage) -> str:
    names = {"pages": "K and V", "page_gradients": "page gradients", "kept_outputs": "kept outputs"}
    parts = [f"{words} {_gib(shortage.kept.get(name, 0))} GiB" for name, words in names.items()]
    return ", ".join(parts)


def _remedy(shortage: Shortage, asked: int | None) -> str:
    """Settings each of which frees what was missing, or all that free anything."""
    missing = (asked or 0) - min(shortage.free, asked or 0) + int(_SPARE * shortage.total)
    savings = _savings(shortage, missing)
    enough = [setting for setting, saved in savings.items() if saved >= missing]
    if enough:
        return f"Set {' or '.join(enough)}."
    if savings:
        return f"Set {', '.join(savings)} together, or train on shorter documents."
    return "Train on shorter documents, or free memory that others have on this device."


def _savings(shortage: Shortage, missing: int) -> dict[str, int]:
    """Device bytes that settings would free, by the setting as it would be written."""
    config, savings = shortage.config, {}
    if shortage.kept.get("kept_outputs"):
        savings["keep_outputs=False"] = shortage.kept["kept_outputs"]
    if shortage.float8_base:
        savings["base_dtype='model'"] = shortage.float8_base
    on_device = sum(shortage.planned.values())
    fewer = max(shortage.least, on_device - missing)
    if fewer < on_device and shortage.whole - fewer <= shortage.host["spare"] + shortage.host["used"]:
        offload = "offload='auto' with " if config.offload is False else ""
        savings[f"{offload}device_pages_gib={_gib_setting(fewer)}"] = on_device - fewer
    if config.page_grad_dtype == "float32" and on_device >= shortage.whole:
        savings["page_grad_dtype='bfloat16'"] = shortage.planned["gradients"] // 2
    tokens = config.known_chunk_tokens // 2
    while tokens >= config.page_tokens:
        saved = int(shortage.activations * max(0.0, 1 - tokens / shortage.longest_chunk))
        if saved >= missing or tokens // 2 < config.page_tokens:
            savings[f"chunk_tokens={tokens}"] = saved
            break
        tokens //= 2
    return savings


def _asked(text: str) -> int | None:
    """Bytes that torch says were asked for."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]i?B)", text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def _first_sentences(text: str) -> str:
    """What others look for in the message, without the rest of it."""
    match = re.match(r".*?[Tt]ried to allocate [\d.]+ (?:bytes|[KMG]i?B)\.?", text, re.DOTALL)
    words = match[0] if match else text.splitlines()[0] if text else "No memory"
    return f"{words.rstrip('.')}."


def _gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:.3g}" if size < 100 else f"{size:,.1f}"


def _gib_setting(num_bytes: float) -> str:
    """Three decimals, or six below 1 GiB, rounded up: the least that works must not be undercut."""
    scale = 1000 if num_bytes >= GIB else 1_000_000
    return f"{math.ceil(num_bytes / GIB * scale - 1e-3) / scale:.10g}"
