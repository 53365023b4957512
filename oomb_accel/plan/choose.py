"""The settings that are "auto": the chunk and the storage of page gradients, from what a step would take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from oomb_accel.plan.fit import CHUNKS, Estimate, estimate
from oomb_accel.plan.job import Job
from oomb_accel.plan.sizes import size_text

_MEASURED = (8192, 4096)
"""Chunks whose time was measured. Smaller ones run slower than the estimate says."""
_USUAL = max(_MEASURED)
_GAIN = 0.03
"""Share by which another chunk than the usual one must be faster."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the planner has chosen, or left as it was."""

    chunk_tokens: int
    page_grad_dtype: Literal["float32", "bfloat16"]
    reasons: tuple[str, ...]
    """For each setting that was chosen, as a line for the user."""


def choose(job: Job, *, chunk_tokens: bool, page_grad_dtype: bool) -> Choice:
    """Choose settings for a job.

    Page gradients are in float32 where all pages then fit on the device, unless chunks would have to be shorter for it
    than the usual ones, else in bfloat16.

    Args:
        job: with some value for what is to be chosen.
        chunk_tokens, page_grad_dtype: whether to choose it.
    """
    best = _with_best_chunk if chunk_tokens else estimate
    reasons = []
    if page_grad_dtype:
        chosen, wide = (best(replace(job, page_grad_dtype=dtype)) for dtype in ("bfloat16", "float32"))
        chunk = wide.job.chunk_tokens
        usual = chunk >= min(_MEASURED) or chunk == chosen.job.chunk_tokens
        if wide.fits and not wide.memory.plan.offloads and usual:
            chosen = wide
        reasons.append(_why_storage(chosen, wide))
    else:
        chosen = best(job)
    if chunk_tokens:
        reasons.insert(0, _why_chunk(chosen))
    return Choice(chosen.job.chunk_tokens, chosen.job.page_grad_dtype, tuple(reasons))


def _with_best_chunk(job: Job) -> Estimate:
    """With the usual chunk, or another of those that were measured if it is faster by `_GAIN`; with a larger one for a
    model that is bound by the host. Where none of them fits, with the largest smaller one that does. Where none does,
    with the largest for which it is only host memory that is short, or with the smallest."""
    sizes = [tokens for tokens in CHUNKS if job.page_tokens <= tokens <= _USUAL] or [job.page_tokens]
    found = [estimate(replace(job, chunk_tokens=tokens)) for tokens in sizes]
    measured = [e for e in found if e.fits and e.job.chunk_tokens in _MEASURED]
    if measured:
        fastest = min(measured, key=lambda e: e.time.seconds)
        usual = measured[0]
        gains = fastest.time.seconds < usual.time.seconds * (1 - _GAIN)
        return fastest if gains else _with_larger_chunk(usual)
    short_of_host = (e for e in found if e.memory.plan.offloads)
    return next((e for e in found if e.fits), None) or next(short_of_host, found[-1])


def _with_larger_chunk(usual: Estimate) -> Estimate:
    """As long as the host bounds the step, a larger one is faster by `_GAIN`, and no pages leave the device for it.
    Models that the GPU takes longer to compute than the host to launch would pay twice the memory for a few per cent,
    which only estimates have seen: 41 instead of 24 GiB for 6 % of a dense step of a 0.5B over 32K tokens."""
    best = usual
    for tokens in sorted(size for size in CHUNKS if size > usual.job.chunk_tokens):
        if not best.time.by_host:
            break
        larger = estimate(replace(usual.job, chunk_tokens=tokens))
        gains = larger.time.seconds < best.time.seconds * (1 - _GAIN)
        if not larger.fits or not gains or larger.memory.plan.offloads > usual.memory.plan.offloads:
            break
        best = larger
    return best


def _why_chunk(chosen: Estimate) -> str:
    tokens = chosen.job.chunk_tokens
    why = f"chunk_tokens={tokens} for {chosen.job.tokens:,} tokens"
    if tokens > _USUAL >= chosen.job.page_tokens:
        usual = estimate(replace(chosen.job, chunk_tokens=_USUAL))
        share = 1 - chosen.time.seconds / usual.time.seconds
        return f"{why}: by the estimate {share:.0%} faster than {_USUAL}, with which the host bounds a step"
    larger = [size for size in CHUNKS if tokens < size <= _USUAL]
    if not chosen.fits:
        return f"{why}: none fits by the estimate"
    if not larger or tokens == chosen.job.page_tokens:
        return f"{why}: the usual one, which fits"
    before = estimate(replace(chosen.job, chunk_tokens=larger[-1]))
    if before.fits:
        share = 1 - chosen.time.seconds / before.time.seconds
        return f"{why}: by the estimate {share:.0%} faster than {larger[-1]}"
    what, measured, _ = before.refusal.splitlines()
    return f"{why}: {larger[-1]} does not fit. {what} {measured.strip()}"


def _why_storage(chosen: Estimate, wide: Estimate) -> str:
    pages = wide.memory.pages
    size = size_text(pages.value_bytes + pages.gradient_bytes)
    why = f"page_grad_dtype={chosen.job.page_grad_dtype} for {wide.job.tokens:,} tokens"
    if chosen is wide:
        return f"{why}: all pages, {size}, fit on the device"
    return f"{why}: with float32, pages of {size} do not fit on the device beside a usual chunk"
