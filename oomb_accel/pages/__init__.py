"""Paged storage of K, V and their gradients: ids (table), storage (pool), movement (mover), and the cache over them."""

from oomb_accel.pages.cache import PagedKVCache
from oomb_accel.pages.mover import NullMover, PageMover
from oomb_accel.pages.pool import PagePool
from oomb_accel.pages.shape import PageShape
from oomb_accel.pages.table import PageTable

__all__ = ["NullMover", "PageMover", "PagePool", "PageShape", "PageTable", "PagedKVCache"]
