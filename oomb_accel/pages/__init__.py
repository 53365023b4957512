"""Paged storage of K, V and their gradients: records on the device (stored) or in two tiers (tiered), what moves them
(mover), and the cache over them."""

from oomb_accel.pages.ahead import Need
from oomb_accel.pages.cache import PagedKVCache
from oomb_accel.pages.host_room import HostRoom
from oomb_accel.pages.least_worth import Places, Worths
from oomb_accel.pages.mover import CudaMover, HostMover, Mark, PageMover
from oomb_accel.pages.pool import PagePool
from oomb_accel.pages.room import DeviceRoom, Kind, PageRooms, PassNeeds, divide, working_bytes
from oomb_accel.pages.shape import PageShape
from oomb_accel.pages.stored import Records, StoredPages, Wanted, WantedLater
from oomb_accel.pages.table import PageTable
from oomb_accel.pages.tiered import TieredPages, Worth

__all__ = [
    "CudaMover",
    "DeviceRoom",
    "HostMover",
    "HostRoom",
    "Kind",
    "Mark",
    "Need",
    "PageMover",
    "PagePool",
    "PageRooms",
    "PageShape",
    "PageTable",
    "PagedKVCache",
    "PassNeeds",
    "Places",
    "Records",
    "StoredPages",
    "TieredPages",
    "Wanted",
    "WantedLater",
    "Worth",
    "Worths",
    "divide",
    "working_bytes",
]
