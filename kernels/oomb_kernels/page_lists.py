"""Which earlier pages each block of queries attends to.

Suffixes as in `page_store`; B query blocks, K room in a list, N candidate pages.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageLists:
    """A list of pages for every (KV head, query block): the query heads of a group share it.

    Pages are logical: numbers in [0, num_pages) of a range of candidates. Where a page lies is looked up at each
    use, so lists stay true when pages move.
    """

    pages_GBK: Tensor
    """int32, ascending and distinct within a list; entries at or beyond the list's count are 0."""
    counts_GB: Tensor
    """int32, pages of each list, from 0 to K."""
    block_tokens: int
    """Query rows of a block; the last block may have fewer."""
    num_pages: int
    """Candidates, N."""

    def slots_GBK(self, slots_GN: Tensor) -> Tensor:
        """int32, the slot of each entry.

        Args:
            slots_GN: int32, the slot of each candidate page.
        """
        num_groups = slots_GN.shape[0]
        return slots_GN.gather(1, self.pages_GBK.view(num_groups, -1).long()).view(self.pages_GBK.shape)

    def scales_GBK2(self, scales_GN2: Tensor) -> Tensor:
        """The scales of each entry's K and V.

        Args:
            scales_GN2: fp32, of each candidate page.
        """
        pages_GL2 = self.pages_GBK.view(scales_GN2.shape[0], -1, 1).long().expand(-1, -1, 2)
        return scales_GN2.gather(1, pages_GL2).view(*self.pages_GBK.shape, 2)
