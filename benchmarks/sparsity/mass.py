"""What selections miss: the share of the exact softmax that falls on attended keys, layer by layer (part c).

The model runs dense, so every selection is judged on the same queries and keys. For each layer, chunk, block of
queries and KV head: the mean over queries and heads of the softmax weight that the local keys and the selected pages
carry; the same as a share of what lies on candidates; and how many of the truly heaviest pages are among the selected.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.sparsity.running import Bench, dense_settings, switched_on, token_losses
from benchmarks.sparsity.scene import Scene, scene_of, selection_replaced
from benchmarks.sparsity.texts import held_out_documents
from benchmarks.sparsity.variants import VARIANTS
from oomb_accel.chunk_pass import ChunkPass, LayerCall
from oomb_accel.schedule import PageRange
from oomb_accel.selection import Reach
from oomb_kernels import top_pages

Q_BLOCK = 128
Key = tuple[str, int, int, int]
"""Variant, page tokens, query block, top_k."""


def mass(bench: Bench) -> None:
    """Rows of attention mass and recall, one per variant, page size, block and top_k, with a value per layer."""
    sizes = bench.sizes
    model = bench.model(long=True, adapted=True)
    tally = Tally(bench.sizes.pages, sizes.page, sizes.top_ks)
    finest = min(sizes.pages)
    before: dict[int, Tensor] = {}

    def look(q_HTD: Tensor, k_GTD: Tensor, layer: LayerCall, run: ChunkPass, first_run: bool) -> None:
        if run.chunk.index in sizes.mass_chunks:
            for page_tokens in sizes.pages:
                reach = reach_in(run, page_tokens // finest, sizes.recent_tokens // finest)
                scene = scene_of(q_HTD, k_GTD, layer, run, reach, Q_BLOCK)
                scene.page_tokens, scene.before_HTD = page_tokens, before[layer.layer]
                tally.add(layer.layer, scene)
        before[layer.layer] = q_HTD[:, -Q_BLOCK:]

    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.mass_documents)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with switched_on(model, dense_settings(sizes.long_chunk, finest)), selection_replaced(look):
            for number, ids in enumerate(documents):
                token_losses(model, ids, sparse=False)
                bench.say(f"attention mass: document {number + 1}")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    for row in tally.rows():
        bench.results.add("mass", documents=sizes.mass_documents, tokens=sizes.long_tokens, **row)


def reach_in(run: ChunkPass, pages_each: int, recent: int) -> Reach:
    """One sink page of ``pages_each`` fine pages, the recent ones, and between them whole pages of candidates."""
    past = run.chunk.past_pages
    first = past.first + pages_each
    end = past.end - recent
    end -= (end - first) % pages_each
    return Reach(PageRange(past.first, first), PageRange(end, past.end), PageRange(first, end))


class Tally:
    """Sums over documents and chunks; on the device, as a copy per number would be slow."""

    def __init__(self, pages: tuple[int, ...], page: int, top_ks: tuple[int, ...]) -> None:
        self._page, self._top_ks = page, top_ks
        self._sums: dict[Key, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def add(self, layer: int, scene: Scene) -> None:
        """Judge all variants on one chunk of one layer. Other page sizes than the usual one, and other blocks, are
        looked at for the library's selection, the truth, and few others."""
        page_GETN, local_GET = scene.exact_masses()
        names = list(VARIANTS) if scene.page_tokens == self._page else ["product", "outlier", "oracle"]
        for q_block in (Q_BLOCK, Q_BLOCK // 2) if scene.page_tokens == self._page else (Q_BLOCK,):
            scene.q_block = q_block
            truth_GBN = scene.in_blocks(page_GETN)
            queries_B = torch.tensor([float(len(x)) for x in local_GET[0, 0].split(q_block)], device=truth_GBN.device)
            per_row_GB1 = (queries_B * local_GET.shape[1])[None, :, None]
            local_GB = torch.stack([x.sum((1, 2)) for x in local_GET.split(q_block, dim=2)], 1) / per_row_GB1[..., 0]
            for name in names if q_block == Q_BLOCK else ("product", "oracle", "causal"):
                if name == "causal" and q_block != Q_BLOCK:
                    scene.before_HTD = scene.before_HTD[:, -q_block:] if scene.before_HTD is not None else None
                mass_GBN = truth_GBN if name == "oracle" else VARIANTS[name][0](scene)
                for top_k in self._top_ks:
                    if top_k < scene.num_pages:
                        key = (name, scene.page_tokens, q_block, top_k)
                        self._sums[key][layer].append(judge(mass_GBN, truth_GBN / per_row_GB1, local_GB, top_k))
        if scene.page_tokens == self._page:
            self._per_query_oracle(layer, page_GETN, local_GET)

    def _per_query_oracle(self, layer: int, page_GETN: Tensor, local_GET: Tensor) -> None:
        """The truth without blocks: every query of a KV head has its own list. The price of sharing a list."""
        for top_k in self._top_ks:
            if top_k < page_GETN.shape[-1]:
                chosen = page_GETN.sum(1).topk(top_k, dim=-1).indices  # [G, T, K]
                held = page_GETN.gather(-1, chosen.unsqueeze(1).expand(-1, page_GETN.shape[1], -1, -1)).sum(-1)
                covered = (held + local_GET).mean()
                share = held.sum() / page_GETN.sum()
                values = torch.stack([covered, share, torch.ones_like(share), local_GET.mean()])
                self._sums[("oracle", self._page, 1, top_k)][layer].append(values)

    def rows(self) -> list[dict[str, Any]]:
        """One row per variant and setting; lists by layer."""
        rows = []
        for (name, page_tokens, q_block, top_k), layers in self._sums.items():
            by_layer = [torch.stack(layers[layer]).double().mean(0).tolist() for layer in sorted(layers)]
            covered, share, recall, local = ([round(x[i], 6) for x in by_layer] for i in range(4))
            row = {"variant": name, "page": page_tokens, "q_block": q_block, "top_k": top_k}
            rows.append(row | {"covered": covered, "of_candidates": share, "recall": recall, "local": local})
        return rows


def judge(mass_GBN: Tensor, truth_GBN: Tensor, local_GB: Tensor, top_k: int) -> Tensor:
    """Mean covered mass, share of the candidates' mass, recall of the truly heaviest pages, and mean local mass.

    Args:
        mass_GBN: what the selection goes by; truth_GBN: mean softmax weight of each page; local_GB: of local keys.
    """
    chosen = top_pages(mass_GBN.float(), top_k).long()
    best = top_pages(truth_GBN, top_k).long()
    held_GB = truth_GBN.gather(-1, chosen).sum(-1)
    is_best = torch.zeros_like(truth_GBN, dtype=torch.bool).scatter(-1, best, True)
    recall = is_best.gather(-1, chosen).float().mean()
    return torch.stack([(held_GB + local_GB).mean(), held_GB.sum() / truth_GBN.sum(), recall, local_GB.mean()])
