"""Page lists to measure with: drawn at random, since the time of a kernel depends on how pages are shared, not on why.

Legend: G KV heads, B query blocks, K pages of a list, N candidate pages.
"""

from __future__ import annotations

from typing import Literal

import torch

from oomb_kernels import PageLists

Kind = Literal["random", "zipf", "hot page"]
KINDS: dict[Kind, str] = {
    "random": "all pages equally likely",
    "zipf": "a page's chance falls as 1 over its rank, ranks at random per KV head",
    "hot page": "one page is in every list, the others at random",
}


def draw_lists(
    kind: Kind,
    *,
    num_groups: int,
    num_blocks: int,
    num_pages: int,
    top_k: int,
    block_tokens: int,
    device: torch.device,
    seed: int,
) -> PageLists:
    """Lists of ``top_k`` distinct pages for every (KV head, query block).

    Drawn without replacement by the largest of log weight plus Gumbel noise.

    Args:
        kind: how pages are shared, see `KINDS`.
        num_pages: candidates, at least ``top_k``.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    noise_GBN = torch.empty(num_groups, num_blocks, num_pages, device=device).exponential_(generator=generator)
    keys_GBN = -noise_GBN.log_()
    if kind == "zipf":
        ranks_GN = torch.rand(num_groups, num_pages, device=device, generator=generator).argsort(-1) + 1
        keys_GBN -= ranks_GN.log()[:, None]
    elif kind == "hot page":
        keys_GBN[..., num_pages // 2] = torch.inf
    pages_GBK = keys_GBN.topk(top_k, dim=-1).indices.sort(-1).values.int()
    counts_GB = torch.full((num_groups, num_blocks), top_k, dtype=torch.int32, device=device)
    return PageLists(pages_GBK, counts_GB, block_tokens, num_pages)
