"""Page attention by the textbook: dense attention over [candidate pages | other keys] with a mask made from the lists,
gradients by autograd, in any dtype. Nothing of the library's own references is used.

Suffixes as in `reference`; N candidate pages, P page_tokens, M tokens of other keys, B query blocks, S slots.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from oomb_kernels import PageLists

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class PageProblem:
    """The inputs of one page attention call, and the other keys that its `others` stand for."""

    q_HTD: Tensor
    dout_HTD: Tensor
    pool: Tensor
    """[S, 2, P, D]. Records of pages that no list names are NaN: nobody may read them."""
    slots_GN: Tensor
    lists: PageLists
    scale: float
    softcap: float | None
    other_k_GMD: Tensor
    other_v_GMD: Tensor
    other_bias_TM: Tensor
    """fp64, added to the scores of the other keys; -inf hides one."""


class PageAttention(NamedTuple):
    """Results of one softmax over the selected pages and the other keys, and of one over the other keys alone."""

    out: Tensor
    lse: Tensor
    other_out: Tensor
    other_lse: Tensor
    dq_pages: Tensor
    """What flows to the queries through the scores of the pages."""
    dq_others: Tensor
    dk_GNPD: Tensor
    dv_GNPD: Tensor
    other_dk: Tensor
    other_dv: Tensor


def selected(lists: PageLists, num_tokens: int) -> Tensor:
    """bool [G, T, N] on CPU: which query row attends to which page, read entry by entry."""
    pages, counts = lists.pages_GBK.tolist(), lists.counts_GB.tolist()
    seen = torch.zeros(len(pages), num_tokens, lists.num_pages, dtype=torch.bool)
    for group, blocks in enumerate(pages):
        for block, entries in enumerate(blocks):
            rows = slice(block * lists.block_tokens, (block + 1) * lists.block_tokens)
            for page in entries[: counts[group][block]]:
                seen[group, rows, page] = True
    return seen


def plain_page_attention(problem: PageProblem, dtype: torch.dtype) -> PageAttention:
    """The textbook formula in `dtype`."""
    q_HTD = problem.q_HTD
    num_groups = problem.slots_GN.shape[0]
    group = q_HTD.shape[0] // num_groups
    seen_GTN = selected(problem.lists, q_HTD.shape[1]).to(q_HTD.device)
    used_GN = seen_GTN.any(1)
    records = problem.pool[problem.slots_GN.long()].masked_fill(~used_GN[..., None, None, None], 0.0)
    leaves = (q_HTD, q_HTD, records[:, :, 0], records[:, :, 1], problem.other_k_GMD, problem.other_v_GMD)
    q_pages, q_others, k, v, other_k, other_v = (x.detach().to(dtype, copy=True).requires_grad_() for x in leaves)

    def scores(q: Tensor, keys_GKD: Tensor) -> Tensor:
        s = q @ keys_GKD.repeat_interleave(group, 0).transpose(1, 2) * problem.scale
        return s if problem.softcap is None else problem.softcap * torch.tanh(s / problem.softcap)

    seen_HTK = seen_GTN.repeat_interleave(problem.pool.shape[2], 2).repeat_interleave(group, 0)
    page_scores = scores(q_pages, k.flatten(1, 2)).masked_fill(~seen_HTK, NEVER)
    other_scores = scores(q_others, other_k) + problem.other_bias_TM.to(dtype)
    values_HKD = torch.cat([v.flatten(1, 2), other_v], 1).repeat_interleave(group, 0)
    out, lse = _softmax_times(torch.cat([page_scores, other_scores], 2), values_HKD)
    with torch.no_grad():
        other_out, other_lse = _softmax_times(other_scores, other_v.repeat_interleave(group, 0))
    out.backward(problem.dout_HTD.to(dtype))
    dq_pages, dq_others, dk, dv, other_dk, other_dv = (
        torch.zeros_like(x) if x.grad is None else x.grad for x in (q_pages, q_others, k, v, other_k, other_v)
    )
    return PageAttention(
        out.detach(), lse, other_out, other_lse, dq_pages, dq_others, dk, dv, other_dk, other_dv
    )  # fmt: skip


def _softmax_times(scores_HTK: Tensor, values_HKD: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of the scores times values, and their LSE; zeros and -inf for rows that see nothing."""
    if scores_HTK.shape[2] == 0:
        return scores_HTK @ values_HKD, scores_HTK.new_full(scores_HTK.shape[:2], NEVER)
    top = scores_HTK.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores_HTK - torch.where(top == NEVER, 0.0, top))
    total = weights.sum(-1, keepdim=True)
    out = (weights / torch.where(total > 0, total, 1.0)) @ values_HKD
    wide = torch.promote_types(scores_HTK.dtype, torch.float32)
    return out, torch.logsumexp(scores_HTK.detach().to(wide), dim=-1)


# What a block selects, from its number, the number of candidates and a source of chance.
Pattern = Callable[[int, int, random.Random], Iterable[int]]
PATTERNS: dict[str, Pattern] = {
    "none": lambda block, pages, chance: [],
    "one": lambda block, pages, chance: [chance.randrange(pages)],
    "many": lambda block, pages, chance: chance.sample(range(pages), (pages + 1) // 2),
    "all": lambda block, pages, chance: range(pages),
    "hot": lambda block, pages, chance: [pages // 2],
    "hot and another": lambda block, pages, chance: {pages // 2, chance.randrange(pages)},
    "counts differ": lambda block, pages, chance: chance.sample(range(pages), (block + 1) % (pages + 1)),
    "first block empty": lambda block, pages, chance: chance.sample(range(pages), min(block, pages)),
}


def make_lists(
    pattern: Pattern, num_groups: int, num_blocks: int, num_pages: int, block_tokens: int, device: str = "cpu"
) -> PageLists:
    """Lists by a pattern, with room for one entry more than the longest needs where that can be."""
    chance = random.Random(17)
    chosen = [
        [sorted(pattern(b, num_pages, chance)) for b in range(num_blocks)] for _ in range(num_groups)
    ]  # fmt: skip
    longest = max(len(pages) for blocks in chosen for pages in blocks)
    return as_lists(chosen, max(1, min(num_pages, longest + 1)), num_pages, block_tokens, device)


def as_lists(
    chosen: list[list[list[int]]], room: int, num_pages: int, block_tokens: int, device: str = "cpu"
) -> PageLists:
    """Lists of page numbers by KV head and block, padded to `room`."""
    padded = [[pages + [0] * (room - len(pages)) for pages in blocks] for blocks in chosen]
    counts = [[len(pages) for pages in blocks] for blocks in chosen]
    pages_GBK, counts_GB = (torch.tensor(x, dtype=torch.int32, device=device) for x in (padded, counts))
    return PageLists(pages_GBK, counts_GB, block_tokens, num_pages)


@st.composite
def any_lists(draw: st.DrawFn, num_groups: int, num_blocks: int, num_pages: int, block_tokens: int) -> PageLists:
    """Strategy: any page lists of these sizes."""
    one = st.lists(st.integers(0, num_pages - 1), unique=True, max_size=num_pages).map(sorted)
    chosen = [[draw(one) for _ in range(num_blocks)] for _ in range(num_groups)]
    longest = max(len(pages) for blocks in chosen for pages in blocks)
    return as_lists(chosen, draw(st.integers(max(1, longest), num_pages)), num_pages, block_tokens)


# Nats added to the scores of the other keys, for the first and the last query row.
SHIFTS = {"low": (-200.0, -200.0), "lower": (-30.0, -30.0), "high": (200.0, 200.0), "slope": (-200.0, 200.0)}


def shuffled_slots(num_groups: int, num_pages: int, spare: int, device: str, seed: int) -> Tensor:
    """int32 [G, N], distinct slots out of `G * N + spare`."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_groups * num_pages + spare, generator=generator)[: num_groups * num_pages]
    return order.to(torch.int32).reshape(num_groups, num_pages).to(device)


def laid_out(layout: str, heads: int, tokens: int, dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random [H, T, D] with memory as a projection, a contiguous copy or a fused projection gives it, or with rows
    that do not start on a 16-byte border."""
    if layout == "heads first":
        return torch.randn(heads, tokens, dim, device=device).to(dtype)
    if layout == "unaligned":
        return torch.randn(tokens, heads, dim + 1, device=device).to(dtype).transpose(0, 1)[..., :dim]
    wide = heads if layout == "token major" else heads + 3
    return torch.randn(tokens, wide, dim, device=device).to(dtype).transpose(0, 1)[wide - heads :]


def make_problem(
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    tokens: int,
    block_tokens: int,
    groups: int = 2,
    group: int = 2,
    head_dim: int = 16,
    page_tokens: int = 16,
    pages: int = 4,
    pattern: str = "many",
    others: str = "none",
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "token major",
) -> PageProblem:
    """A random problem.

    Args:
        others: "none" (no other keys), "some" (causal: at least one key per row), "gaps" (every third row sees none),
            or a key of `SHIFTS`: as "some", but pages take everything, or nothing, or anything between from row to row.
    """
    torch.manual_seed(3)
    heads = groups * group
    q, dout = (laid_out(layout, heads, tokens, head_dim, dtype, device) for _ in range(2))
    slots = shuffled_slots(groups, pages, 3, device, seed=5)
    lists = make_lists(PATTERNS[pattern], groups, -(-tokens // block_tokens), pages, block_tokens, device)
    pool = torch.full((groups * pages + 3, 2, page_tokens, head_dim), float("nan"), dtype=dtype, device=device)
    used = slots[selected(lists, tokens).any(1).to(device)].long()
    pool[used] = torch.randn(len(used), *pool.shape[1:], device=device).to(dtype)
    num_others = 0 if others == "none" else tokens
    other_k, other_v = (torch.randn(groups, num_others, head_dim, device=device).to(dtype) for _ in range(2))
    bias = torch.full((tokens, num_others), NEVER, dtype=torch.float64, device=device).triu(1)
    if others == "gaps":
        bias[::3] = NEVER
    if others in SHIFTS:
        bias += torch.linspace(*SHIFTS[others], tokens, dtype=torch.float64, device=device)[:, None]
    return PageProblem(
        q, dout, pool, slots, lists, head_dim**-0.5 if scale is None else scale, softcap, other_k, other_v, bias
    )
