"""Where pages live between uses. The cache announces every use; a mover brings pages in time."""

from __future__ import annotations

from typing import Protocol

from oomb_accel.schedule import PageRange


class PageMover(Protocol):
    """What the cache asks of the part that moves pages between device and host memory."""

    def written(self, layer: int, pages: PageRange) -> None:
        """K and V of these pages were just written to their slots and never change again."""

    def fetch(self, layer: int, pages: PageRange) -> None:
        """Order the compute stream behind the arrival of these pages in device slots."""


class NullMover:
    """Everything stays on the device: nothing to do."""

    def written(self, layer: int, pages: PageRange) -> None:
        return None

    def fetch(self, layer: int, pages: PageRange) -> None:
        return None
