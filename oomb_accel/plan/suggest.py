"""What would make a job fit: one setting, the fewest settings together, more host memory, more GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from oomb_accel.plan.fit import CHUNKS, Estimate, estimate, estimate_that_fits, fits, largest_tokens
from oomb_accel.plan.job import Job, are_settings_refused
from oomb_accel.plan.limits import LONGEST
from oomb_accel.plan.memory import estimate_memory
from oomb_accel.plan.remedies import SHORTEST_CHUNK
from oomb_accel.plan.sizes import GIB

_BUDGET, _LEAST_BUDGET = 8, 4
"""Times top_k: pages that a chunk may name for nothing, and for little, see docs/sparsity.md."""
_SMALL_TOP_K = 16
_SHORT_SPAN = 8192
_STORAGE: tuple[dict[str, Any], ...] = ({"span_tokens": _SHORT_SPAN}, {"attention": "sparse"}, {"page_dtype": "float8"})
"""What changes pages or how they are read; the cheapest first."""
_HOST_STEP, _MOST_HOST = 32, 4096
"""GiB in which host memory is counted, and the most that a machine may have."""
_GPUS_OF_A_HOST = (2, 4, 8)
_GPUS_OF_MORE_HOSTS = (16, 32, 64)
_MACHINE = ("num_gpus", "host_bytes")
"""What of a job is not settings."""
_NAMES = {"host_memory_bytes": "host_memory_gib", "device_pages_bytes": "device_pages_gib"}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What makes a job fit."""

    change: str
    """As a user would write it."""
    estimate: Estimate
    other_machine: bool = False
    """Whether it takes more host memory or GPUs than the job has."""


def suggestions(job: Job) -> list[Suggestion]:
    """Single settings with which the job fits, the fastest first, or the fewest together where none is enough alone;
    then other machines, with settings where it takes both: none with settings that are enough on this one."""
    settings, machines = (
        sorted(
            (Suggestion(change, found) for change, changed in changes if (found := estimate_that_fits(changed))),
            key=lambda s: s.estimate.time.seconds,
        )
        for changes in (_allowed_changes(job), _machines(job))
    )
    if not settings:
        settings = [_suggestion(job, wanted) for wanted in _together(job)]
        if not machines:
            machines = [*_host_with_settings(job), *_gpus_with_settings(job)]
            machines.sort(key=lambda s: s.estimate.time.seconds)
    enough = [_changed(job, found) for found in settings]
    needed = (machine for machine in machines if not any(found <= _changed(job, machine) for found in enough))
    return settings + [replace(machine, other_machine=True) for machine in needed]


def _changed(job: Job, suggestion: Suggestion) -> set[tuple[str, Any]]:
    """The settings in which they differ."""
    changed = suggestion.estimate.job
    values = ((field.name, getattr(changed, field.name)) for field in fields(Job) if field.name not in _MACHINE)
    return {(name, value) for name, value in values if value != getattr(job, name)}


def longest_on_this_machine(job: Job) -> Suggestion | None:
    """The longest document that fits without other attention or storage of K and V, and the settings for it. None where
    none does."""
    harmless = _harmless(job)
    longest, best = 0, harmless
    for chunk in reversed((job.chunk_tokens, *_smaller_chunks(job))):
        wanted = harmless | {"chunk_tokens": chunk}
        changed = _with(job, wanted)
        if fits(replace(changed, tokens=longest + job.page_tokens)):  # seldom: what chunks take, pages cannot have
            longest, best = largest_tokens(changed, job.tokens), wanted
    if not longest:
        return None
    shorter = replace(job, tokens=longest)
    return _suggestion(shorter, _without_unnecessary(shorter, best))


def nearest(job: Job) -> str:
    """For a job that nothing makes fit: what comes nearest, and what is short then."""
    chunks = _smaller_chunks(job)
    wanted = _harmless(job) | {"chunk_tokens": chunks[-1] if chunks else job.chunk_tokens}
    for step in _storage(job):
        wanted |= step
    changed = _with(job, wanted)
    host = replace(changed, host_bytes=1 << 50)
    low, high = 0, 1 << 12  # GiB that are short
    while high - low > 1:
        middle = (low + high) // 2
        larger = replace(host.gpu, memory_bytes=host.gpu.memory_bytes + middle * GIB)
        low, high = (low, middle) if fits(replace(host, gpu=larger)) else (middle, high)
    short = [] if fits(host) else [f"each GPU is short by {high} GiB"]
    more = next((gpus for gpus in _GPUS_OF_MORE_HOSTS if gpus > job.num_gpus and fits(_on(host, gpus))), None)
    if not short:
        short = [f"more than {_MOST_HOST:,} GiB of host memory are needed"]
    elif more is not None:
        short.append(f"on {more} such GPUs with ZeRO 3 it would fit, given the host memory")
    change = _text(job, changed)
    return f"Nearest{f', with {change}' if change else ''}: {'; '.join(short)}."


def _harmless(job: Job) -> dict[str, Any]:
    """Settings that take less memory and compute the same, but for rounding."""
    wanted: dict[str, Any] = {"keep_outputs": "auto", "offload": "auto", "page_grad_dtype": "bfloat16"}
    wanted |= {"base_dtype": "model", "host_memory_bytes": None, "device_pages_bytes": None}
    if job.num_gpus > 1:
        wanted["zero_stage"] = 3
    return wanted


def _storage(job: Job) -> list[dict[str, Any]]:
    """What the engine would not refuse of it, one on top of the other."""
    steps = []
    for step in _STORAGE:
        changed = replace(job, **step)
        if not are_settings_refused(changed):
            steps.append(step)
            job = changed
    return steps


def _smaller_chunks(job: Job) -> list[int]:
    """The largest first; the shortest one only for a GPU that has no room for others, since it is slow."""
    tight = _with(replace(job, host_bytes=1 << 50), _harmless(job) | {"chunk_tokens": max(CHUNKS[-1], job.page_tokens)})
    sizes = CHUNKS if fits(tight) else (*CHUNKS, SHORTEST_CHUNK)
    return [tokens for tokens in sizes if job.page_tokens <= tokens < job.chunk_tokens]


def _together(job: Job) -> list[dict[str, Any]]:
    """The cheapest changes, one on top of the other, until the job fits; without those that prove unnecessary. First
    with the chunk as it is, then with smaller ones alone, then with one for which the GPU has room: more chunks leave
    more pages with gradients. None or one set of settings."""
    budgets = [{"page_budget": _BUDGET * job.top_k}]
    budgets += [{"top_k": _SMALL_TOP_K, "page_budget": times * _SMALL_TOP_K} for times in (_BUDGET, _LEAST_BUDGET)]
    chunks: list[dict[str, Any]] = [{"chunk_tokens": tokens} for tokens in _smaller_chunks(job)]
    adapters: list[dict[str, Any]] = [] if job.lora_r else [{"lora_r": 16}]
    chunk = _cumulated(replace(job, host_bytes=1 << 50), _harmless(job), chunks)
    for start, steps in (
        (_harmless(job), [*_storage(job), *budgets]),
        (_harmless(job), chunks),
        (chunk or _harmless(job) | (chunks[-1] if chunks else {}), [*_storage(job), *budgets, *adapters]),
    ):
        wanted = _cumulated(job, start, steps)
        if wanted is not None:
            return [_without_unnecessary(job, wanted)]
    return []


def _cumulated(job: Job, wanted: dict[str, Any], steps: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The settings with the fewest steps on top of them that make the job fit."""
    for step in ({}, *steps):
        wanted = wanted | step
        if fits(_with(job, wanted)):
            return wanted
    return None


def _without_unnecessary(job: Job, wanted: dict[str, Any]) -> dict[str, Any]:
    """The fewest that are left, whether the first ones are left out first or the last ones; with the largest chunk."""
    for tokens in _smaller_chunks(job):
        if tokens > wanted.get("chunk_tokens", LONGEST) and fits(_with(job, wanted | {"chunk_tokens": tokens})):
            wanted = wanted | {"chunk_tokens": tokens}
            break
    first = _left(job, wanted, list(wanted))
    if len(first) < 3:
        return first
    return min(first, _left(job, wanted, list(reversed(wanted))), key=len)


def _left(job: Job, wanted: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    for name in order:
        fewer = {other: value for other, value in wanted.items() if other != name}
        needed = name == "top_k" and "page_budget" in wanted  # what a budget costs in loss depends on it
        if getattr(job, name) == wanted[name] or (not needed and fits(_with(job, fewer))):
            wanted = fewer
    return wanted


def _with(job: Job, wanted: dict[str, Any]) -> Job:
    """With these settings and what follows from them: ZeRO 3 has no base weights in 8 bits, and an fp32 copy of its own
    of what is trained; base weights below adapters are in bf16."""
    if wanted.get("zero_stage") == 3:
        wanted = {**wanted, "base_dtype": "model"}
    if "lora_r" in wanted or (wanted.get("zero_stage") == 3 and job.compute_dtype == "bfloat16"):
        wanted = {**wanted, "weights_dtype": "bfloat16"}
    return replace(job, **wanted)


def _on(job: Job, gpus: int) -> Job:
    """On a larger machine; a document for each GPU, and the host grows with it."""
    return _with(replace(job, num_gpus=gpus, host_bytes=job.host_bytes * gpus // job.num_gpus), {"zero_stage": 3})


def _suggestion(job: Job, wanted: dict[str, Any]) -> Suggestion:
    changed = _with(job, wanted)
    return Suggestion(_text(job, changed, list(wanted)), estimate(changed))


def _text(job: Job, changed: Job, order: Sequence[str] = ()) -> str:
    """The settings in which they differ."""
    names = list(dict.fromkeys([*order, "zero_stage", "base_dtype", *_harmless(job), "chunk_tokens"]))
    names += [name for step in _STORAGE for name in step if name not in names]
    return ", ".join(
        f"{_NAMES.get(name, name)}: {'auto' if getattr(changed, name) is None else getattr(changed, name)}"
        for name in names
        if getattr(job, name) != getattr(changed, name)
    )


def _allowed_changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Without those that the engine would refuse."""
    return ((change, changed) for change, changed in _changes(job) if not are_settings_refused(changed))


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
    if job.attention == "dense":
        yield "attention: sparse", replace(job, attention="sparse")
    if job.offload != "auto":
        yield "offload: auto", replace(job, offload="auto")
    if job.device_pages_bytes is not None:
        yield "device_pages_gib: auto", replace(job, device_pages_bytes=None)
    if job.host_memory_bytes is not None:
        yield "host_memory_gib: auto", replace(job, host_memory_bytes=None)
    if job.num_gpus > 1 and job.zero_stage != 3:
        divided = _with(job, {"zero_stage": 3})
        yield _text(job, divided), divided
    if not job.lora_r:
        yield "lora_r: 16", replace(job, lora_r=16, weights_dtype="bfloat16")
    if not job.lora_r and not job.zero_offload:
        stage = job.zero_stage or 2
        yield f"ZeRO {stage}, optimizer on the host", replace(job, zero_stage=stage, zero_offload=True)


def _smaller_chunk(job: Job) -> Iterator[tuple[str, Job]]:
    """The largest one that fits; and a larger one, which is faster, where smaller gradients make that fit."""
    sizes = _smaller_chunks(job)
    alone = next((tokens for tokens in sizes if fits(replace(job, chunk_tokens=tokens))), 0)
    if alone:
        yield f"chunk_tokens: {alone}", replace(job, chunk_tokens=alone)
    narrow = replace(job, page_grad_dtype="bfloat16")
    for tokens in (tokens for tokens in sizes if tokens > alone > 0 and narrow != job):
        if fits(replace(narrow, chunk_tokens=tokens)):
            yield f"chunk_tokens: {tokens}, page_grad_dtype: bfloat16", replace(narrow, chunk_tokens=tokens)
            break


def _smaller_budget(job: Job) -> Iterator[tuple[str, Job]]:
    """The largest half, quarter and so on of what lists can name: fewer pages have a gradient at one moment."""
    budget = -(-job.chunk_tokens // job.q_block) * job.top_k // 2 if job.sparse_layers else 0
    while budget >= _LEAST_BUDGET * job.top_k:
        smaller = replace(job, page_budget=budget)
        if budget < (job.page_budget or LONGEST) and fits(smaller):
            yield f"page_budget: {budget}", smaller
            return
        budget //= 2


def _machines(job: Job) -> Iterator[tuple[str, Job]]:
    for gpus in _GPUS_OF_A_HOST:
        wider = _on(job, gpus)
        if gpus > job.num_gpus and fits(wider):
            base = ", base_dtype: model" if job.base_dtype == "float8" else ""
            yield f"{_machine(wider)}{base}", wider
            break
    gib = _least_host(job)
    if gib is not None:
        yield f"{gib:,} GiB of host memory", replace(job, host_bytes=gib * GIB)


def _machine(job: Job) -> str:
    return f"{job.num_gpus} GPUs with ZeRO 3, {job.host_bytes / GIB:,.0f} GiB of host memory"


def _gpus_with_settings(job: Job) -> Iterator[Suggestion]:
    """The fewest GPUs of a host with which settings that compute the same are enough."""
    for gpus in _GPUS_OF_A_HOST:
        wider = _on(job, gpus)
        chunks = [{"chunk_tokens": tokens} for tokens in _smaller_chunks(wider)]
        wanted = _cumulated(wider, _harmless(wider), chunks) if gpus > job.num_gpus else None
        if wanted is not None:
            found = _suggestion(wider, _without_unnecessary(wider, wanted))
            yield replace(found, change=f"with {_machine(wider)}: {found.change}")
            return


def _host_with_settings(job: Job) -> Iterator[Suggestion]:
    """The fewest settings with which a larger host is enough; and where page gradients are not among them, these too:
    they take less of it."""
    harmless = _harmless(job)
    narrow = {"page_grad_dtype": harmless.pop("page_grad_dtype")}
    chunks = [{"chunk_tokens": tokens} for tokens in _smaller_chunks(job)]
    rich = replace(job, host_bytes=_MOST_HOST * GIB)
    # Chunks before K and V in 8 bits and selection, which compute something else.
    wanted = _cumulated(rich, harmless, chunks) or _cumulated(rich, harmless | narrow, [*chunks, *_storage(job)])
    if wanted is None:
        return
    wanted = _without_unnecessary(rich, wanted)
    sets = [wanted] if job.page_grad_dtype == "bfloat16" or "page_grad_dtype" in wanted else [wanted, wanted | narrow]
    for settings in sets:
        gib = _least_host(_with(job, settings))
        if gib is not None:
            found = _suggestion(replace(job, host_bytes=gib * GIB), settings)
            yield replace(found, change=f"with {gib:,} GiB of host memory: {found.change}")


def _least_host(job: Job) -> int | None:
    """GiB of host memory with which a job fits, as machines have it; None where its size does not decide."""
    if job.offload is False or fits(job) or not estimate_memory(replace(job, host_bytes=1 << 50)).plan.offloads:
        return None
    bad, good = -(-job.host_bytes // (GIB * _HOST_STEP)), _MOST_HOST // _HOST_STEP
    if bad >= good or not fits(replace(job, host_bytes=good * _HOST_STEP * GIB)):
        return None
    while good - bad > 1:
        middle = (good + bad) // 2
        if fits(replace(job, host_bytes=middle * _HOST_STEP * GIB)):
            good = middle
        else:
            bad = middle
    return good * _HOST_STEP
