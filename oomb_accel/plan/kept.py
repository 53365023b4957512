"""What is kept of chunks for the recompute, which then skips what makes it: of which chunks, and how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oomb_accel.plan.job import Job
from oomb_accel.plan.runs import ChunkRun, num_chunks
from oomb_accel.plan.sizes import DTYPE_BYTES, head_gradient_bytes, kept_product_bytes, output_bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """One kind of result."""

    chunks: range = range(0)
    """Indices: the latest, which save the most."""
    num_bytes: int = 0


class KeptResults(NamedTuple):
    """Of the chunks that run again: gradients of log-probabilities with respect to what the head reads, attention
    outputs with LSE, and outputs of the products that end MLPs and attention."""

    head: Kept
    attention: Kept
    mlp: Kept
    o_proj: Kept


def kept_results(job: Job, chunks: Sequence[ChunkRun], budget_bytes: float, *, offloads: bool) -> KeptResults:
    """What a step keeps. Gradients of the head save the most for their bytes, products of attention the least.

    Args:
        budget_bytes: device memory that nothing else needs; may be negative.
        offloads: whether pages leave the device, which then has no memory to spare.
    """
    again = repeated_chunks(job, chunks)
    outputs = [(run.count, run.num_tokens * attention_bytes_per_token(job)) for run in again]
    head, attention, products = Kept(), Kept(), {"mlp": Kept(), "o_proj": Kept()}
    if job.keep_outputs is True:
        attention = Kept(range(num_chunks(again)), sum(count * size for count, size in outputs))
    if job.keep_outputs is not False and not offloads:
        if _can_keep_head(job):
            of_target = head_gradient_bytes(job.model.hidden, DTYPE_BYTES[job.compute_dtype])
            sizes = [(run.count, run.num_targets * of_target) for run in again]
            head = _latest_that_fit(sizes, budget_bytes - attention.num_bytes)
        if job.keep_outputs == "auto":
            attention = _latest_that_fit(outputs, budget_bytes - head.num_bytes)
        left = budget_bytes - head.num_bytes - attention.num_bytes
        sizes = [(run.count, run.num_tokens * _product_bytes_per_token(job)) for run in again]
        for kind in block_ends(job):
            products[kind] = _latest_that_fit(sizes, left)
            left -= products[kind].num_bytes
    return KeptResults(head, attention, **products)


def bytes_before_pages(job: Job, chunks: Sequence[ChunkRun]) -> int:
    """Of attention outputs that are kept whatever is free: the rest is for pages, unless settings say how much is."""
    if job.keep_outputs is not True or job.offload != "auto" or job.device_pages_bytes is not None:
        return 0
    tokens = sum(run.count * run.num_tokens for run in repeated_chunks(job, chunks))
    return tokens * attention_bytes_per_token(job)


def repeated_chunks(job: Job, chunks: Sequence[ChunkRun]) -> Sequence[ChunkRun]:
    """Chunks that run again: where the last one's graph is kept, it holds its outputs. It is a run of its own."""
    return chunks[:-1] if job.keep_last_graph else chunks


def attention_bytes_per_token(job: Job) -> int:
    """Of attention outputs and LSE, over all layers."""
    model = job.model
    return model.num_layers * output_bytes(model.num_heads, model.head_dim, DTYPE_BYTES[job.compute_dtype])


def block_ends(job: Job) -> dict[str, int]:
    """How many inputs the products have that end MLPs and attention, where fused LoRA can skip them: those first that
    save most. Experts have many of the former."""
    if not job.fuses_adapters:
        return {}
    model = job.model
    ends = {} if model.num_experts or not job.adapters.are_on("down_proj") else {"mlp": model.intermediate}
    return ends | ({"o_proj": model.num_heads * model.head_dim} if job.adapters.are_on("o_proj") else {})


def _product_bytes_per_token(job: Job) -> int:
    """Of outputs of one of these products, over all layers."""
    model = job.model
    return model.num_layers * kept_product_bytes(model.hidden, job.lora_r, DTYPE_BYTES[job.compute_dtype])


def _can_keep_head(job: Job) -> bool:
    """Whether the head is frozen, and there whenever it is wanted. Models that change logits behind their head are not
    told apart."""
    return job.lora_r > 0 and job.zero_stage != 3 and not job.adapters.train_head


def _latest_that_fit(sizes: Sequence[tuple[int, int]], budget_bytes: float) -> Kept:
    """Of runs of so many chunks with so many bytes each."""
    first = end = sum(count for count, _ in sizes)
    num_bytes = 0
    for count, size in reversed(sizes):
        fit = max(0, min(count, int((budget_bytes - num_bytes) // max(1, size))))
        first, num_bytes = first - fit, num_bytes + fit * size
        if fit < count:
            break
    return Kept(range(first, end), num_bytes)
