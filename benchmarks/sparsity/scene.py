"""One chunk's queries in one layer, and the keys they may attend to: what a selection is made from and judged by.

Legend: H query heads, G KV heads, E query heads of a KV head, T tokens of the chunk, B query blocks, N candidate pages,
P page tokens, M local keys (sinks, recent pages, then the chunk's own), D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import oomb_accel.attention
import oomb_accel.integrations.attention_interface
from oomb_accel.chunk_pass import ChunkPass, LayerCall
from oomb_accel.schedule import PageRange
from oomb_accel.selected_part import SelectedPages
from oomb_accel.selection import Reach

Hook = Callable[[Tensor, Tensor, LayerCall, ChunkPass, bool], SelectedPages | None]


@dataclass(slots=True)
class Scene:
    """Of a chunk with one segment."""

    q_HTD: Tensor
    keys_GND: Tensor
    """Candidates, page after page: ``[G, N * P, D]``."""
    local_GMD: Tensor
    page_tokens: int
    scale: float
    q_block: int
    before_HTD: Tensor | None = None
    """The last ``q_block`` queries before the chunk."""

    @property
    def num_pages(self) -> int:
        return self.keys_GND.shape[1] // self.page_tokens

    def local_lse(self) -> Tensor:
        """Log of the local keys' share of each query's softmax sum, fp32 ``[H, T]``."""
        scores_GETM = self._scores(self.q_HTD, self.local_GMD)
        tokens, local = scores_GETM.shape[2:]
        row = torch.arange(tokens, device=scores_GETM.device)[:, None]
        column = torch.arange(local, device=scores_GETM.device)[None]
        scores_GETM.masked_fill_(column > row + local - tokens, -torch.inf)
        return scores_GETM.logsumexp(-1).flatten(0, 1)

    def exact_masses(self) -> tuple[Tensor, Tensor]:
        """Of the whole softmax: each page's share for every query, fp32 ``[G, E, T, N]``, and the local share
        ``[G, E, T]``. They sum to 1."""
        scores_GETK = self._scores(self.q_HTD, self.keys_GND)
        groups, heads, tokens, _ = scores_GETK.shape
        local_GET = self.local_lse().view(groups, heads, tokens)
        total_GET = torch.logaddexp(scores_GETK.logsumexp(-1), local_GET)
        weights_GETK = scores_GETK.sub_(total_GET[..., None]).exp_()
        return weights_GETK.unflatten(-1, (-1, self.page_tokens)).sum(-1), (local_GET - total_GET).exp()

    def in_blocks(self, mass_GETN: Tensor) -> Tensor:
        """Sum over the queries of each block and over the heads of a KV head: ``[G, B, N]``."""
        return torch.stack([rows.sum((1, 2)) for rows in mass_GETN.split(self.q_block, dim=2)], 1)

    def _scores(self, q_HTD: Tensor, keys_GKD: Tensor) -> Tensor:
        """fp32 ``[G, E, T, K]``. Products of bf16 numbers are exact in TF32."""
        q_GETD = q_HTD.float().unflatten(0, (keys_GKD.shape[0], -1))
        return (q_GETD @ keys_GKD.float().mT.unsqueeze(1)).mul_(self.scale)


def scene_of(q_HTD: Tensor, k_GTD: Tensor, layer: LayerCall, run: ChunkPass, reach: Reach, q_block: int) -> Scene:
    """The scene of a layer.

    Args:
        q_HTD, k_GTD: the chunk's own queries and keys; earlier keys are in the run's cache.
    """

    def keys(pages: PageRange) -> Tensor:
        return run.memory.cache.load(layer.layer, pages)[0]

    local_GMD = torch.cat([*(keys(pages) for pages in (reach.sinks, reach.recents) if pages), k_GTD], 1)
    return Scene(q_HTD, keys(reach.candidates), local_GMD, run.settings.page_tokens, layer.scale, q_block)


@contextmanager
def selection_replaced(hook: Hook) -> Iterator[None]:
    """Inside, attention asks ``hook(q_HTD, k_GTD, layer, run, first_run)`` which pages a layer attends to."""
    attention, interface = oomb_accel.attention, oomb_accel.integrations.attention_interface
    selected_pages, chunk_attention = attention.selected_pages, interface.chunk_attention
    own_keys: list[Tensor] = []

    def select(q_HTD: Tensor, layer: LayerCall, run: ChunkPass, *, first_run: bool) -> SelectedPages | None:
        return hook(q_HTD, own_keys.pop(), layer, run, first_run)

    def attend(q_HTD: Tensor, k_GTD: Tensor, *others: Any) -> Tensor:
        own_keys.append(k_GTD.detach())
        return chunk_attention(q_HTD, k_GTD, *others)

    attention.selected_pages, interface.chunk_attention = select, attend  # type: ignore[assignment]
    try:
        yield
    finally:
        attention.selected_pages, interface.chunk_attention = selected_pages, chunk_attention
