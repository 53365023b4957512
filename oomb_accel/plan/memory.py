"""Memory of a step by part, on the GPU at its worst moment and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomb_accel.plan import rates
from oomb_accel.plan.job import Job, are_settings_refused
from oomb_accel.plan.kept import (
    KeptResults,
    attention_bytes_per_token,
    bytes_before_pages,
    bytes_on_their_way,
    kept_results,
    repeated_chunks,
)
from oomb_accel.plan.memory_plan import MemoryPlan, plan_memory
from oomb_accel.plan.pages import PageDemand, page_demand
from oomb_accel.plan.runs import ChunkRun, num_chunks
from oomb_accel.plan.sizes import (
    DTYPE_BYTES,
    float8_input_bytes,
    gathered_numbers,
    host_margin,
    in_slabs,
    page_backward_bytes,
    slab_bytes_for,
)

PAGES_ON_HOST = "K, V and page gradients"
_ADAM_BYTES = 8
"""Both moments in fp32, per number that is trained."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a step on one GPU and in the host memory of its process."""

    device: dict[str, int]
    """By part, at the worst moment; ends with what torch does not count."""
    pinned: dict[str, int]
    pageable: dict[str, int]
    pages_most_bytes: int
    """Pinned for pages where there is room: a record that has been on the host keeps its place until it is gone. The
    least, without which the step does not run, is among ``pinned``."""
    pages: PageDemand
    plan: MemoryPlan
    kept: KeptResults
    chunks: Sequence[ChunkRun]

    @property
    def device_bytes(self) -> int:
        """Everything, the CUDA context too."""
        return sum(self.device.values())

    @property
    def peak_bytes(self) -> int:
        """What torch counts: `torch.cuda.max_memory_allocated`."""
        return self.device_bytes - self.device["CUDA context"]

    @property
    def host_bytes(self) -> int:
        return sum(self.pinned.values()) + sum(self.pageable.values())

    @property
    def host_most_bytes(self) -> int:
        """Host memory where there is room."""
        return self.host_bytes - self.pinned[PAGES_ON_HOST] + self.pages_most_bytes


def estimate_memory(job: Job) -> Memory:
    """Memory of a step. Where it does not fit, the plan says so and sizes are those that it would take."""
    chunks = job.chunks()
    standing, gradients = _training_state(job), _gradients(job)
    longest = max(run.num_tokens for run in chunks)
    activations = int(longest * _graph_bytes_per_token(job))
    targets = min(longest, job.tokens - 1)
    logits = rates.LOGIT_COPIES * DTYPE_BYTES[job.compute_dtype] * targets * job.model.vocabulary
    workspace = _sparse_workspace(job, chunks)
    may_be_float8 = not are_settings_refused(replace(job, page_dtype="float8"))
    demand = replace(page_demand(job.pages, chunks), may_be_float8=may_be_float8)
    pinned, pageable = _host_state(job)
    working = rates.WORKSPACE_BYTES
    if job.base_dtype == "float8":
        working += float8_input_bytes(longest, job.model.hidden, job.model.intermediate)
    free = free_device_bytes(job, standing) - working - sum(gradients.values())
    pages_budget = host_budget_bytes(job) - (0 if job.found else sum(pinned.values()))
    asked = None if job.found else job.host_memory_bytes  # in what was found it is counted
    there, pages_budget = pages_budget, pages_budget if asked is None else min(pages_budget, asked)
    record = max(job.pages.value_record, job.pages.gradient_record)
    chunk_bytes = activations + max(logits, workspace)  # logits are gone when the first layer's backward runs

    def plan_beside(results_bytes: int) -> MemoryPlan:
        return plan_memory(
            demand,
            free_device_bytes=free - results_bytes,
            activation_bytes=chunk_bytes,
            outputs_bytes=bytes_before_pages(job, chunks),
            host_budget_bytes=there,
            chunk_tokens=job.chunk_tokens,
            offload=job.offload,
            device_pages_bytes=None if job.device_pages_bytes is None else job.device_pages_bytes - results_bytes,
            zero_stage=job.zero_stage,
            host_memory_bytes=asked,
            record_bytes=record,
        )

    def made_for(plan: MemoryPlan) -> int:
        """Host memory for pages."""
        return in_slabs(plan.host_bytes, slab_bytes_for(plan.host_bytes, record)) if plan.offloads else 0

    plan = plan_beside(0)
    spare = free - chunk_bytes - plan.device_value_bytes - plan.device_gradient_bytes - demand.resident_bytes
    if plan.offloads:
        spare, on_their_way = 0, bytes_on_their_way(job, chunks, pages_budget, made_for(plan))
        tighter = plan_beside(on_their_way)
        if plan.fits and tighter.fits:  # otherwise pages come first
            plan, spare = tighter, on_their_way
    kept, staging = kept_results(job, chunks, spare, pages_budget, made_for(plan))
    reused = longest * attention_bytes_per_token(job) if kept.attention.on_device else 0
    heads_run_again = len(kept.head.chunks) < num_chunks(repeated_chunks(job, chunks))
    device = {
        **standing,
        **_worst_moment(
            job,
            activations,
            logits,
            logits if heads_run_again else 0,
            workspace,
            reused,
            plan.device_gradient_bytes + demand.sink_gradient_bytes,
            demand.mean_key_bytes,
        ),
        **gradients,
        "K and V": plan.device_value_bytes,
        "scales": demand.scale_bytes,
        "page lists": demand.list_bytes,
        "kept head gradients": kept.head.device_bytes,
        "kept attention outputs": kept.attention.device_bytes,
        "kept MLP outputs": kept.mlp.device_bytes,
        "kept o_proj outputs": kept.o_proj.device_bytes,
        "outputs on their way": staging,
        "workspace": working,
        "CUDA context": rates.CONTEXT_BYTES,
    }
    slab_bytes, least = slab_bytes_for(plan.host_bytes, record), made_for(plan)
    left = pages_budget - kept.host_bytes
    most = max(least, min(in_slabs(demand.living_bytes, slab_bytes), left)) if plan.offloads else 0
    pinned = {**pinned, PAGES_ON_HOST: least, "kept outputs": kept.host_bytes}
    return Memory(device, pinned, pageable, most, demand, plan, kept, chunks)


def _worst_moment(
    job: Job,
    activations: int,
    logits: int,
    logits_again: int,
    workspace: int,
    reused: int,
    page_gradients: int,
    mean_keys: int,
) -> dict[str, int]:
    """Activations, logits, page gradients, the workspace of a backward and mean keys when they are most together.

    Args:
        logits_again: of a chunk that runs again.
        reused: kept attention outputs with which a chunk runs again instead of making its own.
    """
    again = activations - reused
    moments = [(again, logits_again, page_gradients, 0, 0)]  # a chunk that ran again, before its backward
    moments.append((again, 0, page_gradients, workspace, 0))  # its last layer's
    if job.keep_last_graph:
        moments.append((activations, logits, 0, 0, mean_keys))  # the last chunk's forward: no page has a gradient
        moments.append((activations, 0, page_gradients, workspace, 0))  # its backward's first layers
    names = (
        "activations of one chunk",
        "logits of one chunk",
        "page gradients",
        "workspace of the sparse backward",
        "mean keys",
    )
    return dict(zip(names, max(moments, key=sum), strict=True))


def free_device_bytes(job: Job, standing: dict[str, int]) -> int:
    """Device memory for a step: what is free, but for what is never planned for.

    Args:
        standing: bytes of weights, optimizer and the like, where nobody has looked what is free.
    """
    if job.found is not None:
        return job.found.device_bytes
    whole = int(job.gpu.memory_bytes * (1 - rates.DEVICE_RESERVE))
    return whole - rates.CONTEXT_BYTES - sum(standing.values())


def _sparse_workspace(job: Job, chunks: Sequence[ChunkRun]) -> int:
    """Bytes that the backward of attention to selected pages works in, where a chunk selects any."""
    layout, model = job.pages, job.model
    selecting = [run.num_tokens for run in chunks if layout.selects(run.last_past_pages)]
    if not selecting or not layout.sparse_layers:
        return 0
    return page_backward_bytes(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        num_blocks=-(-max(selecting) // layout.q_block),
        q_block=layout.q_block,
        top_k=layout.top_k,
        page_tokens=layout.page_tokens,
        head_dim=layout.head_dim,
    )


def host_budget_bytes(job: Job) -> int:
    """Host memory that one GPU's process may take for pages and optimizer states; for pages alone where somebody has
    looked."""
    if job.found is not None:
        return job.found.host_bytes
    return (job.host_bytes - host_margin(job.host_bytes)) // job.num_gpus - rates.PROCESS_BYTES


def activation_bytes_per_token(job: Job) -> int:
    """What a token's graph holds between forward and backward, in bf16: inputs of every linear layer and norm, queries,
    keys and values, both halves of the MLP, and attention's LSE."""
    model = job.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    active = max(1, model.experts_per_token)
    # Norm inputs and outputs (four), queries, attention output, keys and values; gate, up and their product.
    numbers = 4 * model.hidden + 2 * queries + 2 * keys + 3 * model.intermediate * active
    if model.num_experts:
        numbers += 2 * active * model.hidden  # each expert's input and output
    adapters = 2 * 7 * job.lora_r
    return model.num_layers * (2 * numbers + adapters + 4 * model.num_heads + 8)


def _graph_bytes_per_token(job: Job) -> float:
    return activation_bytes_per_token(job) if job.found is None else job.found.graph_bytes_per_token


def _training_state(job: Job) -> dict[str, int]:
    """Device bytes that stand before and after every step."""
    total, trained = job.model.num_parameters, job.trainable
    ranks = job.num_gpus
    itemsize = 4 if job.weights_dtype == "float32" else 2
    adapters = trained if job.lora_r else 0
    if job.zero_stage is None:
        # PEFT makes adapters in fp32, and copies in the type of the weights of what is trained whole beside them.
        whole = job.trained_whole if job.lora_r else trained
        of_adapters = 4 * (trained - whole) + itemsize * job.trained_whole
        moments = _ADAM_BYTES if itemsize == 4 else 4  # AdamW's are in the type of the weights
        optimizer, buckets = _ADAM_BYTES * (trained - whole) + moments * whole, 0
        if ranks > 1:
            buckets = trained * (4 if job.lora_r else itemsize)  # of DDP
    else:
        of_adapters = 2 * adapters
        share = ranks if job.zero_stage else 1
        optimizer = 0 if job.zero_offload else (4 + _ADAM_BYTES) * trained // share
        buckets = 0
        if job.zero_stage == 3:
            grad_bytes = 4 if job.reduce_per_chunk else 2
            buckets = rates.ZERO3_BUCKET_BYTES + grad_bytes * trained // ranks
    gathered = gathered_numbers(total, max(job.model.layer_weights, job.model.head_weights))
    weights = itemsize * total + of_adapters
    if itemsize == 4:
        weights += 2 * total  # autocast's copies
    return {
        "weights": weights // ranks if job.is_sharded else weights,
        "weights in 8 bits": job.float8_bytes,
        "gathered weights": itemsize * gathered if job.is_sharded else 0,
        "optimizer": optimizer,
        "gradient buckets": buckets,
    }


def _gradients(job: Job) -> dict[str, int]:
    """Of trained weights, at the worst moment: sums over chunks in fp32, and the head's of the chunk at work."""
    sums = 4 * job.trainable
    if job.reduce_per_chunk and job.zero_stage is not None:
        sums = 0 if job.zero_stage == 3 else sums // (job.num_gpus if job.zero_stage == 2 else 1)
    head = 2 * job.model.head_weights if not job.lora_r or job.trained_whole else 0
    return {"gradients": sums + head}


def _host_state(job: Job) -> tuple[dict[str, int], dict[str, int]]:
    """Pinned and pageable bytes of one GPU's process, without pages."""
    pinned = {}
    if job.zero_offload and job.zero_stage is not None:
        numbers = job.trainable // (job.num_gpus if job.zero_stage else 1)
        # Master weights, gradients and both moments; torch rounds pinned memory up to a power of two.
        pinned["optimizer"] = 4 * (1 << (4 * numbers - 1).bit_length())
    return pinned, {"process": rates.PROCESS_BYTES}
