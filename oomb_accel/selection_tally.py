"""What a step selected, counted without making anybody wait: for metrics.

Legend: H query heads, G KV heads, T tokens, D head_dim, C mean keys, N candidate pages, K pages per list.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oomb_kernels import PageLists, pool_queries


@dataclass(slots=True)
class SelectionTally:
    """Distinct pages per chunk, layer and KV head, and samples of the attention mass that selected pages have."""

    _num_counts: int = 0
    _sum: int = 0
    _could: int = 0
    _most: int = 0
    _masses: deque[tuple[Tensor, Any]] = field(default_factory=deque)
    """On the host, and the event behind which they are there; None on the CPU."""
    _mass_sum: float = 0.0
    _num_masses: int = 0

    def count(self, distinct_G: Any, could: int) -> None:
        """Count the distinct pages that the lists of one chunk name in one layer, by KV head; None counts nothing.

        Args:
            could: the most that the lists of one KV head could name.
        """
        if distinct_G is not None:
            self._num_counts += len(distinct_G)
            self._could += len(distinct_G) * could
            self._sum += int(distinct_G.sum())
            self._most = max(self._most, int(distinct_G.max()))

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
        if mass.is_cuda:
            host = torch.empty(mass.shape, dtype=mass.dtype, pin_memory=True).copy_(mass, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(mass.device))
            self._masses.append((host, copied))
        else:
            self._masses.append((mass, None))

    def take(self) -> dict[str, float | int]:
        """The figures since the last call, and begin anew; nothing where no pages were selected."""
        self._add_masses()
        found: dict[str, float | int] = {}
        if self._num_counts:
            found = {"pages_selected": self._sum / self._num_counts, "pages_selected_most": self._most}
            found["distinct_share"] = self._sum / self._could
        if self._num_masses:
            found["selected_mass"] = self._mass_sum / self._num_masses
        self._num_counts = self._sum = self._could = self._most = self._num_masses = 0
        self._mass_sum = 0.0
        self._masses.clear()
        return found

    def _add_masses(self) -> None:
        """Add up those that are there, in their order."""
        while self._masses and (self._masses[0][1] is None or self._masses[0][1].query()):
            self._mass_sum += float(self._masses.popleft()[0])
            self._num_masses += 1
