"""What a stream keeps of its forward sweep."""

from __future__ import annotations

from typing import Literal, TypeAlias

from oomb_accel.kept_results import HEAD, Key
from oomb_accel.memory import StreamMemory

What: TypeAlias = Literal["head", "attention", "products"]


def num_kept(memory: StreamMemory, what: What, *, on_host: bool = False) -> dict[int, int]:
    """By chunk, of how many layers results of this kind are kept; chunks without any are left out.

    Args:
        on_host: those on the host, not those on the device.
    """
    found: dict[int, int] = {}
    for index, results in memory.results.items():
        keys = results.on_device
        if on_host:
            keys = frozenset() if results.on_host is None else results.on_host.keys
        count = sum(_kind(key) == what for key in keys)
        if count:
            found[index] = count
    return found


def _kind(key: Key) -> What:
    if key == HEAD:
        return "head"
    return "attention" if isinstance(key, int) else "products"
