"""What fits: the whole estimate of a job, the longest document, and the one setting that would make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from oomb_accel.plan import rates
from oomb_accel.plan.gpus import H200
from oomb_accel.plan.job import Job
from oomb_accel.plan.memory import Memory, estimate_memory
from oomb_accel.plan.sizes import GIB, host_margin
from oomb_accel.plan.timing import StepTime, estimate_time

LONGEST = 1 << 24
"""Tokens; no estimate looks further."""
CHUNKS = (8192, 4096, 2048, 1024, 512)
"""Tokens of the chunks that are tried, the largest first."""
_BUDGET, _LEAST_BUDGET = 8, 4
"""Times top_k: pages that a chunk may name for nothing, and for little, see docs/sparsity.md."""
_SMALL_TOP_K = 16
_STANDING = ("weights", "weights in 8 bits", "gathered weights", "optimizer", "gradient buckets", "gradients")
_SHORT_SPAN = 8192


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory and time of one optimizer step."""

    job: Job
    memory: Memory
    time: StepTime

    @property
    def refusal(self) -> str:
        """Why the job does not fit, in three lines; empty where it does."""
        return _refusal(self.job, self.memory)

    @property
    def fits(self) -> bool:
        return not self.refusal

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.job.tokens / self.time.seconds

    @property
    def is_scaled(self) -> bool:
        """Whether rates were scaled from another GPU."""
        return self.job.gpu != H200

    def cost_per_million_tokens(self, price_per_gpu_hour: float) -> float:
        """In the currency of the price."""
        return price_per_gpu_hour / 3600 / self.tokens_per_second * 1e6

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; bytes and seconds."""
        memory, time = self.memory, self.time
        return {
            "fits": self.fits,
            "refusal": self.refusal,
            "tokens": self.job.tokens,
            "chunk_tokens": self.job.chunk_tokens,
            "gpu": self.job.gpu.name,
            "rates": "scaled from H200" if self.is_scaled else "measured",
            "device_bytes": memory.device | {"total": memory.device_bytes, "available": self.job.gpu.memory_bytes},
            "pinned_bytes": dict(memory.pinned),
            "pageable_bytes": dict(memory.pageable),
            "host_most_bytes": memory.host_most_bytes,
            "kept_chunks": len(memory.kept),
            "seconds": time.parts | {"total": time.seconds},
            "up_bytes": round(time.up_bytes),
            "down_bytes": round(time.down_bytes),
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change that makes a job fit."""

    change: str
    """As a user would write it."""
    estimate: Estimate


def estimate(job: Job) -> Estimate:
    """Memory and time of a job, whether or not it fits."""
    memory = estimate_memory(job)
    return Estimate(job, memory, estimate_time(job, memory))


def _fits(job: Job) -> bool:
    return not _refusal(job, estimate_memory(job))


def _refusal(job: Job, memory: Memory) -> str:
    if job.found is not None:  # weights and optimizer are there, and nothing but pages needs a place
        return memory.plan.message
    standing = rates.CONTEXT_BYTES + sum(memory.device[part] for part in _STANDING)
    if standing > job.gpu.memory_bytes:
        return (
            "The model does not fit on the GPU.\n"
            f"  Weights, gradients and optimizer take {standing / GIB:,.1f} GiB, the GPU has "
            f"{job.gpu.memory_bytes / GIB:,.1f} GiB.\n"
            f"  {_for_large_models(job)}"
        )
    if not memory.plan.fits:
        return memory.plan.message
    if memory.device_bytes > job.gpu.memory_bytes:
        return (
            "The step does not fit on the GPU.\n"
            f"  It takes {memory.device_bytes / GIB:,.1f} GiB of {job.gpu.memory_bytes / GIB:,.1f} GiB, "
            f"{memory.device['kept attention outputs'] / GIB:,.1f} GiB of them kept attention outputs.\n"
            "  Set keep_outputs='auto', which keeps what fits."
        )
    budget = job.host_bytes - host_margin(job.host_bytes)
    if memory.host_bytes * job.num_gpus > budget:
        return (
            "Host memory is too small.\n"
            f"  {memory.host_bytes * job.num_gpus / GIB:,.1f} GiB are needed by {job.num_gpus} processes; "
            f"{budget / GIB:,.1f} GiB may be used.\n"
            "  Keep the optimizer on the GPU, or take a machine with more memory."
        )
    return ""


def _for_large_models(job: Job) -> str:
    if job.base_dtype == "float8":
        return f"Set base_dtype='model', which takes {job.float8_bytes / GIB:,.1f} GiB less."
    if not job.lora_r:
        return "Train adapters (lora_r: 16), put the optimizer on the host (ZeRO 2 or 3), or take more GPUs."
    if job.zero_stage != 3:
        return "Divide it among GPUs (ZeRO 3), or take a GPU with more memory."
    return "Divide it among more GPUs, or take GPUs with more memory."


def largest_tokens(job: Job) -> int:
    """The longest document, in whole pages, with which the job fits; 0 where none does."""
    step = job.page_tokens
    if not _fits(replace(job, tokens=step)):
        return 0
    fits, fails = 1, LONGEST // step + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if _fits(replace(job, tokens=middle * step)):
            fits = middle
        else:
            fails = middle
    return fits * step


def suggestions(job: Job) -> list[Suggestion]:
    """Single settings with which the job fits, the fastest first, or several together where none is enough alone; then
    other machines."""
    settings, machines = (
        sorted(
            (s for s in (Suggestion(change, estimate(changed)) for change, changed in changes) if s.estimate.fits),
            key=lambda s: s.estimate.time.seconds,
        )
        for changes in (_changes(job), _machines(job))
    )
    return (settings or _together(job)) + machines


def _together(job: Job) -> list[Suggestion]:
    """The cheapest changes, one on top of the other, until the job fits; without those that prove unnecessary. Smaller
    chunks come last: they help a GPU that is too small, and more of them leave more pages with gradients."""
    storage: list[dict[str, Any]] = [{"span_tokens": _SHORT_SPAN}, {"attention": "sparse"}, {"page_dtype": "float8"}]
    budgets = [{"page_budget": _BUDGET * job.top_k}]
    budgets += [{"top_k": _SMALL_TOP_K, "page_budget": times * _SMALL_TOP_K} for times in (_BUDGET, _LEAST_BUDGET)]
    chunks: list[dict[str, Any]] = [{"chunk_tokens": tokens} for tokens in CHUNKS if tokens < job.chunk_tokens]
    for steps in ([*storage, *budgets], [*chunks, *storage]):
        wanted: dict[str, Any] = {"keep_outputs": "auto", "offload": "auto", "page_grad_dtype": "bfloat16"}
        wanted["base_dtype"] = "model"
        for step in steps:
            wanted |= step
            if _fits(replace(job, **wanted)):
                return [_without_unnecessary(job, wanted)]
    return []


def _without_unnecessary(job: Job, wanted: dict[str, Any]) -> Suggestion:
    for name in [name for name in wanted if name != "top_k"]:  # what a budget costs in loss depends on it
        fewer = {other: value for other, value in wanted.items() if other != name}
        if getattr(job, name) == wanted[name] or _fits(replace(job, **fewer)):
            wanted = fewer
    change = ", ".join(f"{name}: {value}" for name, value in wanted.items())
    return Suggestion(change, estimate(replace(job, **wanted)))


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    if job.keep_outputs is True:
        yield "keep_outputs: auto", replace(job, keep_outputs="auto")
    if job.base_dtype == "float8":
        yield "base_dtype: model", replace(job, base_dtype="model")
    if job.page_grad_dtype == "float32":
        yield "page_grad_dtype: bfloat16", replace(job, page_grad_dtype="bfloat16")
    if job.page_dtype == "model":
        yield "page_dtype: float8", replace(job, page_dtype="float8")
    yield from _smaller_chunk(job)
    yield from _smaller_budget(job)
    if job.span_tokens > _SHORT_SPAN:
        yield f"span_tokens: {_SHORT_SPAN}", replace(job, span_tokens=_SHORT_SPAN)
    if job.attention == "dense" and any(window is None for window in job.model.windows):
        yield "attention: sparse", replace(job, attention="sparse")
    if job.offload is False:
        yield "offload: auto", replace(job, offload="auto")
    if job.host_memory_bytes is not None:
        yield "host_memory_gib: auto", replace(job, host_memory_bytes=None)
    if not job.lora_r:
        yield "lora_r: 16", replace(job, lora_r=16, weights_dtype="bfloat16")
    if not job.lora_r and not job.zero_offload:
        stage = job.zero_stage or 2
        yield f"ZeRO {stage}, optimizer on the host", replace(job, zero_stage=stage, zero_offload=True)


def _smaller_chunk(job: Job) -> Iterator[tuple[str, Job]]:
    """The largest one that fits; and a larger one, which is faster, where smaller gradients make that fit."""
    sizes = [tokens for tokens in CHUNKS if job.page_tokens <= tokens < job.chunk_tokens]
    alone = next((tokens for tokens in sizes if _fits(replace(job, chunk_tokens=tokens))), 0)
    if alone:
        yield f"chunk_tokens: {alone}", replace(job, chunk_tokens=alone)
    narrow = replace(job, page_grad_dtype="bfloat16")
    for tokens in (tokens for tokens in sizes if tokens > alone > 0 and narrow != job):
        if _fits(replace(narrow, chunk_tokens=tokens)):
            yield f"chunk_tokens: {tokens}, page_grad_dtype: bfloat16", replace(narrow, chunk_tokens=tokens)
            break


def _machines(job: Job) -> Iterator[tuple[str, Job]]:
    for gpus in (2, 4, 8):  # a document for each; the host grows with the machine
        host_bytes = job.host_bytes * gpus // job.num_gpus
        wider = replace(job, num_gpus=gpus, zero_stage=3, host_bytes=host_bytes, base_dtype="model")
        if gpus > job.num_gpus and _fits(wider):
            base = ", base_dtype: model" if job.base_dtype == "float8" else ""
            yield f"{gpus} GPUs with ZeRO 3, {wider.host_bytes / GIB:,.0f} GiB of host memory{base}", wider
            break
    yield from _more_host(job)


def _smaller_budget(job: Job) -> Iterator[tuple[str, Job]]:
    """The largest half, quarter and so on of what lists can name: fewer pages have a gradient at one moment."""
    budget = -(-job.chunk_tokens // job.q_block) * job.top_k // 2 if job.sparse_layers else 0
    while budget >= _LEAST_BUDGET * job.top_k:
        smaller = replace(job, page_budget=budget)
        if budget < (job.page_budget or LONGEST) and _fits(smaller):
            yield f"page_budget: {budget}", smaller
            return
        budget //= 2


def _more_host(job: Job) -> Iterator[tuple[str, Job]]:
    """With as much host memory as it takes, as machines have it."""
    if job.offload is False:
        return
    needed = estimate_memory(replace(job, host_bytes=1 << 50)).plan
    if not needed.fits or not needed.offloads:
        return
    first = math.ceil(job.host_bytes / GIB / 32) + 1
    for gib in (32 * number for number in range(first, 129)):
        larger = replace(job, host_bytes=gib * GIB)
        if _fits(larger):
            yield f"{gib} GiB of host memory", larger
            return
