"""What fits: the whole estimate of a job, why it is refused, and the longest document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from oomb_accel.plan import rates
from oomb_accel.plan.gpus import H200
from oomb_accel.plan.job import Job
from oomb_accel.plan.limits import LONGEST
from oomb_accel.plan.memory import Memory, estimate_memory
from oomb_accel.plan.remedies import Remedy
from oomb_accel.plan.sizes import host_margin, size_text
from oomb_accel.plan.timing import StepTime, estimate_time

CHUNKS = (32768, 16384, 8192, 4096, 2048, 1024, 512)
"""Tokens of the chunks that are tried, the largest first."""
_STANDING = ("weights", "weights in 8 bits", "gathered weights", "optimizer", "gradient buckets", "gradients")


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
        return _problem(self.job, self.memory) is None

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.job.tokens / self.time.seconds

    @property
    def is_scaled(self) -> bool:
        """Whether rates were scaled from another GPU. How much memory a machine's own reports is no rate."""
        return replace(self.job.gpu, memory_bytes=H200.memory_bytes) != H200

    def cost_per_million_tokens(self, price_per_gpu_hour: float) -> float:
        """In the currency of the price."""
        return price_per_gpu_hour / 3600 / self.tokens_per_second * 1e6

    def needed(self) -> Memory:
        """Memory to show: of a step that fits as it is; of one that does not, what it cannot do without, and so no
        outputs that would be kept where there is room."""
        if self.fits or self.job.keep_outputs is True:
            return self.memory
        return estimate_memory(replace(self.job, keep_outputs=False))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; bytes and seconds. Of a step that does not fit there is no time and no traffic."""
        memory, time, fits = self.needed(), self.time, self.fits
        return {
            "fits": fits,
            "refusal": self.refusal,
            "tokens": self.job.tokens,
            "chunk_tokens": self.job.chunk_tokens,
            "gpu": self.job.gpu.name,
            "rates": "scaled from H200" if self.is_scaled else "measured",
            "device_bytes": memory.device | {"total": memory.device_bytes, "available": self.job.gpu.memory_bytes},
            "pinned_bytes": dict(memory.pinned),
            "pageable_bytes": dict(memory.pageable),
            "host_most_bytes": memory.host_most_bytes,
            "kept_chunks": len(memory.kept.attention.chunks),
            "kept_mlp_chunks": len(memory.kept.mlp.chunks),
            "kept_o_proj_chunks": len(memory.kept.o_proj.chunks),
            "kept_head_chunks": len(memory.kept.head.chunks),
            "seconds": time.parts | {"total": time.seconds} if fits else None,
            "up_bytes": round(time.up_bytes) if fits else None,
            "down_bytes": round(time.down_bytes) if fits else None,
            "tokens_per_second": self.tokens_per_second if fits else None,
        }


def estimate(job: Job) -> Estimate:
    """Memory and time of a job, whether or not it fits."""
    memory = estimate_memory(job)
    return Estimate(job, memory, estimate_time(job, memory))


def estimate_that_fits(job: Job) -> Estimate | None:
    """The same where the job fits: of others nobody needs the time, which is what takes long with many chunks."""
    memory = estimate_memory(job)
    return None if _problem(job, memory) is not None else Estimate(job, memory, estimate_time(job, memory))


def fits(job: Job) -> bool:
    """Whether a job fits, without its time."""
    return _problem(job, estimate_memory(job)) is None


def _refusal(job: Job, memory: Memory) -> str:
    if job.found is not None:  # weights and optimizer are there, and nothing but pages needs a place
        return memory.plan.message
    problem = _problem(job, memory)
    if problem is None:
        return ""
    what, remedy = problem
    if remedy.enough and remedy.settings:
        least_chunk = remedy.settings.get("chunk_tokens", job.page_tokens)
        enough = least_chunk >= job.page_tokens and fits(replace(job, **remedy.settings))
        remedy = replace(remedy, enough=enough)
    if not (remedy.enough and remedy.settings):
        remedy = next((given for given in _given_back(job) if fits(replace(job, **given.settings))), remedy)
    return f"{what}\n{remedy.line()}"


def _given_back(job: Job) -> Iterator[Remedy]:
    """Settings that take memory from what needs it, each left to us."""
    if job.device_pages_bytes is not None:
        yield Remedy("device_pages_gib='auto'", {"device_pages_bytes": None})
    if job.host_memory_bytes is not None:
        yield Remedy("host_memory_gib='auto'", {"host_memory_bytes": None})
    for name in ("keep_outputs", "offload"):
        if getattr(job, name) != "auto":
            yield Remedy(f"{name}='auto'", {name: "auto"})


def _problem(job: Job, memory: Memory) -> tuple[str, Remedy] | None:
    """What does not fit, in two lines, and what would be the next thing to change; None where everything fits."""
    plan = memory.plan
    of_pages = None if plan.remedy is None else (plan.message.rpartition("\n")[0], plan.remedy)
    if job.found is not None:
        return of_pages
    standing = rates.CONTEXT_BYTES + sum(memory.device[part] for part in _STANDING)
    if standing > job.gpu.memory_bytes:
        return (
            "The model does not fit on the GPU.\n"
            f"  Weights, gradients and optimizer take {size_text(standing)}, the GPU has "
            f"{size_text(job.gpu.memory_bytes)}."
        ), _for_large_models(job)
    if of_pages is not None:
        return of_pages
    if memory.device_bytes > job.gpu.memory_bytes:
        return (
            "The step does not fit on the GPU.\n"
            f"  It takes {size_text(memory.device_bytes)} of {size_text(job.gpu.memory_bytes)}, "
            f"{size_text(memory.device['kept attention outputs'])} of them kept attention outputs."
        ), Remedy("keep_outputs='auto'", {"keep_outputs": "auto"}, "which keeps what fits")
    budget = job.host_bytes - host_margin(job.host_bytes)
    if memory.host_bytes * job.num_gpus > budget:
        processes = "one process" if job.num_gpus == 1 else f"{job.num_gpus} processes"
        smaller = "Keep the optimizer on the GPU, or take" if job.zero_offload else "Take"
        return (
            "Host memory is too small.\n"
            f"  {size_text(memory.host_bytes * job.num_gpus)} are needed by {processes}; "
            f"{size_text(budget)} may be used."
        ), Remedy(f"{smaller} a machine with more memory.")
    return None


def _for_large_models(job: Job) -> Remedy:
    if job.base_dtype == "float8":
        less = f"which takes {size_text(job.float8_bytes)} less (8-bit copies come on top of the weights)"
        return Remedy("base_dtype='model'", {"base_dtype": "model"}, less)
    if not job.lora_r:
        return Remedy("Train adapters (lora_r: 16), put the optimizer on the host (ZeRO 2 or 3), or take more GPUs.")
    if job.zero_stage == 3:
        return Remedy("Divide it among more GPUs, or take GPUs with more memory.")
    if job.num_gpus == 1:
        return Remedy("Divide it among GPUs (ZeRO 3), or take a GPU with more memory.")
    among = f"which divides it among the {job.num_gpus} GPUs (--zero 3)"
    return Remedy("zero_stage=3", {"zero_stage": 3}, among)


def largest_tokens(job: Job, limit: int = LONGEST) -> int:
    """The longest document, in whole pages, with which the job fits; 0 where none does.

    Args:
        limit: tokens; no longer one is tried.
    """
    step = job.page_tokens
    if not fits(replace(job, tokens=step)):
        return 0
    good, bad = 1, max(1, limit // step) + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(replace(job, tokens=middle * step)):
            good = middle
        else:
            bad = middle
    return good * step
