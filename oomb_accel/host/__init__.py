"""Host memory for pages: what the machine has (limits), slabs of pinned memory (arena), records in slabs
(store), pieces of any size that come and go in order (stack)."""

from oomb_accel.host.arena import HostArena, HostMemoryError, Slab
from oomb_accel.host.limits import HostLimits, MemoryGroup, host_budget, host_limits
from oomb_accel.host.mapping import Pinner, cuda_pinner
from oomb_accel.host.stack import HostStack, Piece
from oomb_accel.host.store import HostStore

__all__ = [
    "HostArena",
    "HostLimits",
    "HostMemoryError",
    "HostStack",
    "HostStore",
    "MemoryGroup",
    "Piece",
    "Pinner",
    "Slab",
    "cuda_pinner",
    "host_budget",
    "host_limits",
]
