"""Host memory for pages: what the machine has (limits), slabs of pinned memory (arena), records in slabs (store)."""

from oomb_accel.host.arena import HostArena, HostMemoryError, Slab
from oomb_accel.host.limits import HostLimits, MemoryGroup, gib_above, gib_text, host_budget, host_limits
from oomb_accel.host.mapping import Pinner, cuda_pinner
from oomb_accel.host.store import HostStore

__all__ = [
    "HostArena",
    "HostLimits",
    "HostMemoryError",
    "HostStore",
    "MemoryGroup",
    "Pinner",
    "Slab",
    "cuda_pinner",
    "gib_above",
    "gib_text",
    "host_budget",
    "host_limits",
]
