"""Are the kernels right? Asked before their speed is told.

The truth is attention with a mask made of the lists, gradients by autograd, in fp64. Allowed is twice the error of the
same formula in the dtype under test, plus the rounding of that dtype.

Legend: H query heads, G KV heads, T tokens, D head_dim, B query blocks, N candidate pages, K pages of a list or keys of
pages, O other keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oomb_kernels import PageLists, page_attention_backward, page_attention_forward, quantize_pages

_PAGES, _TOP_K, _OTHER_KEYS = 6, 3, 48
_BLOCKS = 14
"""Enough of them share a page for its gradient to be cut into units, whose sums a kernel of its own adds up."""


class CheckSize(NamedTuple):
    """Sizes that the kernels are specialised for."""

    head_dim: int
    num_groups: int
    group: int
    page_tokens: int
    block_tokens: int


class _Case(NamedTuple):
    """What attention is computed of: selected pages, beside other keys that all queries but the first see."""

    dout_HTD: Tensor
    q_HTD: Tensor
    pool: Tensor
    slots_GN: Tensor
    lists: PageLists
    others_GO2D: Tensor
    scale: float
    stored: Tensor
    """The pool as the kernels are given it: ``pool`` is what they read in it."""
    scales_GN2: Tensor | None


class _Answer(NamedTuple):
    """What attention is by definition."""

    results: dict[str, Tensor]
    other_out_HTD: Tensor
    other_lse_HT: Tensor
    other_dq_HTD: Tensor
    """The part of the other keys in output, LSE and dQ: the kernels are given it."""


def check_kernels(
    size: CheckSize,
    dtype: torch.dtype,
    device: torch.device,
    page_grad_dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    *,
    float8: bool = False,
) -> dict[str, tuple[float, float]]:
    """Run a small case as training would: beside other keys, and with page gradients that hold something already; and
    attention over the pages alone.

    It has a ragged last block, lists of several lengths, an empty one among them, rows without any key, and a page
    that so many blocks attend to that its gradient is cut.

    Returns: per result its relative L2 error and what is allowed.

    Raises:
        RuntimeError: a result is wrong.
    """
    case = _random_case(size, dtype, device, float8=float8)
    truth, plain = _by_definition(case, torch.float64), _by_definition(case, dtype)
    found: dict[str, tuple[float, float]] = {}

    def compare(ours: Tensor, what: str, name: str, rounding: float = 0.0) -> None:
        allowed = 2 * _distance(plain.results[what], truth.results[what]) + torch.finfo(dtype).eps + rounding
        found[name] = (_distance(ours, truth.results[what]), allowed)

    for name, tensor in _forwards(case, truth).items():
        compare(tensor, name, name)
    for grad_dtype in page_grad_dtypes:
        dq_HTD, before, after = _backward(case, truth, grad_dtype)
        compare(dq_HTD, "dQ", "dQ")
        name = "dK and dV" if grad_dtype == torch.float32 else f"dK and dV in {grad_dtype}".replace("torch.", "")
        # What was there already is rounded once more together with what is added.
        rounding = torch.finfo(grad_dtype).eps * float(after.norm() / truth.results["dK and dV"].norm())
        compare(after - before, "dK and dV", name, rounding)
    wrong = {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}
    if wrong:
        details = "; ".join(
            f"{name} is off by {error:.2g}, allowed {limit:.2g}" for name, (error, limit) in wrong.items()
        )
        raise RuntimeError(
            f"The page kernels compute something wrong here, so their speed is not told.\n  {details}; "
            f"{size}, {dtype}, torch {torch.__version__}.\n"
            "  Please report this with the output of: oomb env. Train with attention='dense' until it is solved."
        )
    return found


def _random_case(size: CheckSize, dtype: torch.dtype, device: torch.device, *, float8: bool) -> _Case:
    generator = torch.Generator(device=device).manual_seed(1)
    num_heads, num_tokens = size.num_groups * size.group, _BLOCKS * size.block_tokens - size.block_tokens // 3

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    q_HTD, dout_HTD = (random(num_tokens, num_heads, size.head_dim).transpose(0, 1) for _ in range(2))
    pool = random(size.num_groups * _PAGES, 2, size.page_tokens, size.head_dim)
    order = torch.randperm(len(pool), device=device, generator=generator)
    stored, scales_GN2 = pool, None
    if float8:
        stored, scales_S2 = quantize_pages(pool)
        pool = (stored.float() * scales_S2[..., None, None]).to(dtype)
        scales_GN2 = scales_S2[order].view(size.num_groups, _PAGES, 2)
    return _Case(
        dout_HTD,
        q_HTD,
        pool,
        order.view(size.num_groups, _PAGES).int(),
        _lists(size, device, generator),
        random(size.num_groups, _OTHER_KEYS, 2, size.head_dim),
        size.head_dim**-0.5,
        stored,
        scales_GN2,
    )


def _lists(size: CheckSize, device: torch.device, generator: torch.Generator) -> PageLists:
    """Lists of 0 to ``_TOP_K`` pages; one page is in every list that has any."""
    rank_GBN = torch.rand(size.num_groups, _BLOCKS, _PAGES, device=device, generator=generator)
    rank_GBN[..., _PAGES // 2] = 2.0
    counts_GB = torch.arange(size.num_groups * _BLOCKS, device=device).view(size.num_groups, _BLOCKS) % (_TOP_K + 1)
    used_K = torch.arange(_TOP_K, device=device) < counts_GB[..., None]
    pages_GBK = rank_GBN.topk(_TOP_K, dim=-1).indices.masked_fill(~used_K, _PAGES).sort(-1).values
    return PageLists(pages_GBK.masked_fill(~used_K, 0).int(), counts_GB.int(), size.block_tokens, _PAGES)


def _forward(case: _Case, others: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    return page_attention_forward(
        case.q_HTD,
        case.stored,
        case.slots_GN,
        case.lists,
        scale=case.scale,
        others=others,
        scales_GN2=case.scales_GN2,
    )


def _other_part(case: _Case, truth: _Answer) -> tuple[Tensor, Tensor]:
    """Output and LSE of the other keys as training gives them to the kernels."""
    dtype = case.q_HTD.dtype
    return truth.other_out_HTD.to(dtype), truth.other_lse_HT.to(torch.promote_types(dtype, torch.float32))


def _forwards(case: _Case, truth: _Answer) -> dict[str, Tensor]:
    """Outputs of the kernel under test, beside the other keys and alone."""
    return {
        "output": _forward(case, _other_part(case, truth))[0],
        "output of the pages alone": _forward(case, None)[0],
    }


def _backward(case: _Case, truth: _Answer, grad_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dQ of the kernels under test, and page gradients before and after, widened."""
    out_HTD, lse_HT = _forward(case, _other_part(case, truth))
    before = (case.pool.flip(0) / 8).to(grad_dtype)
    grad_pool = before.clone()
    dq_HTD = page_attention_backward(
        case.dout_HTD,
        case.q_HTD,
        out_HTD,
        lse_HT,
        case.stored,
        case.slots_GN,
        grad_pool,
        case.slots_GN,
        case.lists,
        scale=case.scale,
        seed=0,
        dq_HTD=truth.other_dq_HTD.to(case.q_HTD.dtype),
        scales_GN2=case.scales_GN2,
    )
    return dq_HTD, before.double(), grad_pool.double()


def _by_definition(case: _Case, dtype: torch.dtype) -> _Answer:
    """The textbook formula in ``dtype``."""
    lists, device = case.lists, case.q_HTD.device
    num_heads, num_tokens, _ = case.q_HTD.shape
    group, page_tokens = num_heads // len(case.slots_GN), case.pool.shape[2]
    block_T = torch.arange(num_tokens, device=device) // lists.block_tokens
    seen_GBN = torch.zeros(*lists.counts_GB.shape, lists.num_pages, dtype=torch.bool, device=device)
    entry_K = torch.arange(lists.pages_GBK.shape[-1], device=device)
    used_GBK = entry_K < lists.counts_GB[..., None]
    seen_GBN.scatter_(-1, lists.pages_GBK.long(), used_GBK)
    # An unused entry says 0, and may have overwritten a page 0 that is really listed.
    seen_GBN[..., 0] |= ((lists.pages_GBK == 0) & used_GBK).any(-1)
    seen_HTK = seen_GBN[:, block_T].repeat_interleave(page_tokens, -1).repeat_interleave(group, 0)
    seen_HTO = (block_T > 0)[:, None].expand(num_heads, -1, _OTHER_KEYS)

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype, copy=True).requires_grad_()

    # The queries twice, so that each part's contribution to dQ is known.
    q_HTD, other_q_HTD, records = leaf(case.q_HTD), leaf(case.q_HTD), leaf(case.pool)
    keys, values = (x.flatten(1, 2).repeat_interleave(group, 0) for x in records[case.slots_GN.long()].unbind(2))
    other_keys, other_values = (x.repeat_interleave(group, 0) for x in case.others_GO2D.to(dtype).unbind(2))
    scores_HTK = (q_HTD @ keys.transpose(1, 2) * case.scale).masked_fill(~seen_HTK, -torch.inf)
    scores_HTO = (other_q_HTD @ other_keys.transpose(1, 2) * case.scale).masked_fill(~seen_HTO, -torch.inf)
    weights = _softmax(torch.cat([scores_HTK, scores_HTO], -1))
    out_HTD = weights @ torch.cat([values, other_values], 1)
    out_HTD.backward(case.dout_HTD.to(dtype))
    assert q_HTD.grad is not None and other_q_HTD.grad is not None and records.grad is not None
    results = {
        "output": out_HTD.detach(),
        "output of the pages alone": _softmax(scores_HTK.detach()) @ values.detach(),
        "dQ": q_HTD.grad + other_q_HTD.grad,
        "dK and dV": records.grad,
    }
    other_scores = scores_HTO.detach()
    return _Answer(results, _softmax(other_scores) @ other_values, other_scores.logsumexp(-1), other_q_HTD.grad)


def _softmax(scores: Tensor) -> Tensor:
    """Zeros in rows that see no key."""
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)


def _distance(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())
