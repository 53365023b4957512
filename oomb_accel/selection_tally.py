"""What a step selected, counted without making anybody wait: for metrics.

Legend: L layers, H query heads, G KV heads, T tokens, D head_dim, C mean keys, N candidate pages, K pages per list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oomb_kernels import PageLists, pool_queries


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def is_there(self) -> bool:
        """Whether nobody would wait for it."""
        return self._copied is None or self._copied.query()

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


@dataclass(slots=True)
class SelectionTally:
    """Distinct pages per chunk, layer and KV head, and samples of the attention mass that selected pages have."""

    _num_counts: int = 0
    _sum: int = 0
    _could: int = 0
    _most: int = 0
    _counts: deque[tuple[HostCopy, int]] = field(default_factory=deque)
    """With the most that the lists of one KV head could name."""
    _masses: deque[HostCopy] = field(default_factory=deque)
    _mass_sum: float = 0.0
    _num_masses: int = 0

    def count(self, lists: Sequence[PageLists]) -> None:
        """Count the distinct pages that the lists of one chunk name, by layer and KV head: a few small kernels.

        Args:
            lists: all of one size, and full.
        """
        pages_LGX = torch.stack([one.pages_GBK.flatten(1) for one in lists]).long()
        named_LGN = pages_LGX.new_zeros(*pages_LGX.shape[:2], lists[0].num_pages, dtype=torch.bool)
        could = min(lists[0].num_pages, pages_LGX.shape[2])
        self._counts.append((HostCopy(named_LGN.scatter_(2, pages_LGX, True).sum(2)), could))
        self._add_counts()

    def sample(
        self,
        q_HTD: Tensor,
        centroids_GCD: Tensor,
        lists: PageLists,
        *,
        pooled_tokens: int,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Estimate the mass of the last queries on the pages that were selected for them, among all candidates, from
        the mean keys: a few small kernels."""
        groups, parts = centroids_GCD.shape[0], centroids_GCD.shape[1] // lists.num_pages
        with torch.autocast(q_HTD.device.type, enabled=False):
            pooled_HRD = pool_queries(q_HTD[:, -pooled_tokens:], pooled_tokens).to(centroids_GCD.dtype)
            scores_GRC = pooled_HRD.reshape(groups, -1, q_HTD.shape[2]) @ centroids_GCD.mT * scale
            if softcap is not None:
                scores_GRC = softcap * torch.tanh(scores_GRC / softcap)
            weights_GRN = scores_GRC.float().softmax(-1).unflatten(-1, (-1, parts)).sum(-1)
            pages_GRK = lists.pages_GBK[:, -1:].long().expand(-1, weights_GRN.shape[1], -1)
            mass = weights_GRN.gather(2, pages_GRK).sum(2).mean()
        self._add_masses()
        self._masses.append(HostCopy(mass))

    def take(self) -> dict[str, float | int]:
        """The figures since the last call, and begin anew; nothing where no pages were selected."""
        self._add_counts()
        self._add_masses()
        found: dict[str, float | int] = {}
        if self._num_counts:
            found = {"pages_selected": self._sum / self._num_counts, "pages_selected_most": self._most}
            found["distinct_share"] = self._sum / self._could
        if self._num_masses:
            found["selected_mass"] = self._mass_sum / self._num_masses
        self._num_counts = self._sum = self._could = self._most = self._num_masses = 0
        self._mass_sum = 0.0
        self._counts.clear()
        self._masses.clear()
        return found

    def _add_counts(self) -> None:
        """Add up those that are there, in their order."""
        while self._counts and self._counts[0][0].is_there():
            copy, could = self._counts.popleft()
            distinct_LG = copy.wait()
            self._num_counts += distinct_LG.numel()
            self._could += distinct_LG.numel() * could
            self._sum += int(distinct_LG.sum())
            self._most = max(self._most, int(distinct_LG.max()))

    def _add_masses(self) -> None:
        """As `_add_counts`."""
        while self._masses and self._masses[0].is_there():
            self._mass_sum += float(self._masses.popleft().wait())
            self._num_masses += 1
