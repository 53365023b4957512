"""What is kept of chunks for the recompute, which then skips what makes it: of which chunks, and how many bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from oomb_accel.plan.job import Job
from oomb_accel.plan.places import ALIGNED_BYTES, LAYERS_ON_THEIR_WAY, Places, Run, host_bytes_for_results, place
from oomb_accel.plan.runs import ChunkRun, num_chunks
from oomb_accel.plan.sizes import DTYPE_BYTES, head_gradient_bytes, kept_product_bytes, output_bytes, slab_bytes_for


class KeptResults(NamedTuple):
    """Of the chunks that run again: gradients of log-probabilities with respect to what the head reads, attention
    outputs with LSE, and outputs of the products that end MLPs and attention."""

    head: Places
    attention: Places
    mlp: Places
    o_proj: Places

    @property
    def host_bytes(self) -> int:
        return sum(places.host_bytes for places in self)


def kept_results(
    job: Job, chunks: Sequence[ChunkRun], budget_bytes: int, host_budget_bytes: int, page_bytes: int
) -> tuple[KeptResults, int]:
    """What a step keeps, and device memory that is set aside for what is on its way to the host or back. Gradients of
    the head save the most for their bytes, products of attention the least.

    Args:
        budget_bytes: device memory that nothing else needs; may be negative. Where pages leave the device, what they
            leave to results on their way.
        host_budget_bytes: host memory that the process may have for pages and results.
        page_bytes: what pages take of it.
    """
    again = repeated_chunks(job, chunks)
    attention = Places(range(num_chunks(again)), device_bytes=_device_bytes(again, attention_bytes_per_token(job)))
    always = {"attention": attention} if job.keep_outputs is True else {}
    sizes = {} if job.keep_outputs is False else _sizes(job, again, without=always)
    staging = _staging(job, again, sizes)
    host_bytes = _host_bytes(job, host_budget_bytes, page_bytes)
    if not page_bytes:  # otherwise pages have left it
        budget_bytes -= sum(places.device_bytes for places in always.values())
    placed = place([runs for _, runs in sizes.values()], budget_bytes, host_bytes, staging)
    places = dict.fromkeys(KeptResults._fields, Places()) | always
    return KeptResults(**places | dict(zip(sizes, placed.kinds, strict=True))), placed.staging_bytes


def _sizes(job: Job, again: Sequence[ChunkRun], without: Collection[str]) -> dict[str, tuple[int, list[Run]]]:
    """By kind, those first that save most for their bytes: bytes per token, and of these chunks."""
    layers, found = job.model.num_layers, dict[str, tuple[int, list[Run]]]()

    def add(name: str, per_token: int, makers: int, tokens: Sequence[int]) -> None:
        gaps = 2 * makers * ALIGNED_BYTES  # of two tensors each
        sizes = [per_token * count for count in tokens]
        runs = [Run(run.count, size, size + gaps) for run, size in zip(again, sizes, strict=True)]
        found[name] = per_token, runs

    tokens = [run.num_tokens for run in again]
    if _can_keep_head(job):
        of_target = head_gradient_bytes(job.model.hidden, DTYPE_BYTES[job.compute_dtype])
        add("head", of_target, 1, [run.num_targets for run in again])
    if "attention" not in without:
        add("attention", attention_bytes_per_token(job), layers, tokens)
    for name in block_ends(job):
        add(name, _product_bytes_per_token(job), layers, tokens)
    return found


def bytes_on_their_way(job: Job, chunks: Sequence[ChunkRun], host_budget_bytes: int, page_bytes: int) -> int:
    """Device memory that results need which are kept on the host beside pages; 0 where none are."""
    if job.keep_outputs is False or _host_bytes(job, host_budget_bytes, page_bytes) <= 0:
        return 0
    return _staging(job, chunks, _sizes(job, chunks, without=["attention"] if job.keep_outputs is True else []))


def _staging(job: Job, chunks: Sequence[ChunkRun], sizes: Mapping[str, tuple[int, list[Run]]]) -> int:
    """Device memory for results on their way to the host or back."""
    layers = [per_token for name, (per_token, _) in sizes.items() if name != "head"]
    longest = max((run.num_tokens for run in chunks), default=0)
    return LAYERS_ON_THEIR_WAY * longest * sum(layers) // job.model.num_layers


def _host_bytes(job: Job, host_budget_bytes: int, page_bytes: int) -> int:
    """What of the host's memory kept results may take beside pages, in whole slabs."""
    if job.offload != "auto":
        return 0
    most = host_bytes_for_results(host_budget_bytes, is_asked_for=job.host_memory_bytes is not None)
    most = max(0, most - page_bytes)
    slab_bytes = slab_bytes_for(most, ALIGNED_BYTES)
    return most // slab_bytes * slab_bytes


def bytes_before_pages(job: Job, chunks: Sequence[ChunkRun]) -> int:
    """Of attention outputs that are kept whatever is free: the rest is for pages, unless settings say how much is."""
    if job.keep_outputs is not True or job.offload != "auto" or job.device_pages_bytes is not None:
        return 0
    return _device_bytes(repeated_chunks(job, chunks), attention_bytes_per_token(job))


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


def _device_bytes(chunks: Sequence[ChunkRun], bytes_per_token: int) -> int:
    return bytes_per_token * sum(run.count * run.num_tokens for run in chunks)
