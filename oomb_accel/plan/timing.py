"""Time of a step by part, and what goes over PCIe. Every chunk is counted by itself: what bounds an early one need not
bound a late one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from oomb_accel.plan import rates
from oomb_accel.plan.job import Job
from oomb_accel.plan.kept import KeptResults, block_ends
from oomb_accel.plan.memory import Memory, activation_bytes_per_token
from oomb_accel.plan.pages import chunks_backwards
from oomb_accel.plan.runs import ChunkRun, num_chunks
from oomb_accel.plan.sizes import parts_of, scores_are_formed_twice

_POOLED_TOKENS = 16
"""Queries whose mean is scored against mean keys."""


_PARTS = (
    *("linear layers", "norms, activations, adapters", "attention inside chunks", "attention to the past"),
    *("selection of pages", "launches", "waiting for host memory", "host's work for pages", "ZeRO", "optimizer"),
)


@dataclass(slots=True)
class StepTime:
    """Seconds and transfers of one optimizer step on one GPU."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    up_bytes: float = 0.0
    """Host to device."""
    down_bytes: float = 0.0
    by_host: bool = False
    """Whether the host takes longer to launch the step than the GPU to compute it."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def estimate_time(job: Job, memory: Memory) -> StepTime:
    """Time of a step whose memory is planned."""
    step, kept, ends = StepTime(), memory.kept, block_ends(job)
    of_ends = {"mlp": kept.mlp.chunks, "o_proj": kept.o_proj.chunks}
    last = memory.chunks[-1].index
    borders = [border for places in kept for border in (places.on_host.start, places.on_device.start)]
    for run in _even_runs(job, memory.chunks, borders):
        repeated = not (run.index == last and job.keep_last_graph)
        of_chunk = _compute(
            job,
            run,
            repeated=repeated,
            attends_again=repeated and run.index not in kept.attention.chunks,
            skipped=[inputs for kind, inputs in ends.items() if run.index in of_ends[kind]],
            keeps_head=run.index in kept.head.chunks,
        )
        for part, seconds in of_chunk.items():
            step.parts[part] += run.count * seconds
        _move_results(job, kept, run, sum(of_chunk.values()), step)
    passes = 3 * num_chunks(memory.chunks) - (1 if job.keep_last_graph else 0)
    of_host = _launch_seconds(job, passes)
    step.by_host = of_host > step.seconds
    step.parts["launches"] += max(0.0, of_host - step.seconds)
    _transfers(job, memory, step, of_host)
    _zero(job, step, passes)
    _optimizer(job, step)
    return step


def _move_results(job: Job, kept: KeptResults, run: ChunkRun, seconds: float, step: StepTime) -> None:
    """Add bytes of kept results of a run between device and host, and how long the GPU waits for them: down beside the
    forward sweep, up beside the recompute.

    Args:
        seconds: that a chunk is computed for.
    """
    moved = sum(places.host_bytes / len(places.on_host) for places in kept if run.index in places.on_host)
    step.down_bytes += run.count * moved
    step.up_bytes += run.count * moved
    late = max(0.0, moved / job.gpu.host_bytes_per_second - seconds / 4)
    step.parts["waiting for host memory"] += 2 * run.count * late


def _even_runs(job: Job, runs: Sequence[ChunkRun], borders: Sequence[int] = ()) -> Iterator[ChunkRun]:
    """Runs in which what a chunk computes grows evenly with its past, so that the mean past stands for all.

    Args:
        borders: indices of chunks with which a run begins.
    """
    layout, page = job.pages, job.page_tokens
    windows = {window for window in layout.windows if window is not None}
    for run in runs:
        pasts = [layout.always_pages + layout.top_k, *(window // page for window in windows)]
        pasts += [(window - run.num_tokens) // page for window in windows]
        numbers = {run.up_to(past) for past in pasts} | {border - run.index for border in borders}
        cuts = sorted(number for number in numbers if 0 < number < run.count)
        yield from (run.part(first, end) for first, end in pairwise([0, *cuts, run.count]))


def _compute(
    job: Job,
    run: ChunkRun,
    *,
    repeated: bool,
    attends_again: bool,
    skipped: Sequence[int] = (),
    keeps_head: bool = False,
) -> dict[str, float]:
    """Seconds by part for what the GPU computes for a chunk in both sweeps, on average of an even run.

    Args:
        skipped: inputs of the products of each layer without which it runs again, see `block_ends`.
        keeps_head: whether it runs again without the head.
    """
    model, tokens, gpu, parts = job.model, run.num_tokens, job.gpu, dict.fromkeys(_PARTS, 0.0)
    forwards, attention_forwards = 1 + repeated, 1 + attends_again
    # With adapters only gradients of inputs are computed in the frozen layers, otherwise those of weights too.
    faster = rates.FLOAT8 if job.base_dtype == "float8" else 1.0
    copied = model.linear_layer_weights
    base = copied / faster + model.num_layers * model.active_layer_weights - copied
    linear = 2 * tokens * base + 2 * run.num_targets * model.head_weights
    linear += 2 * tokens * model.lora_parameters(job.lora_r)
    products = forwards + (1 if job.lora_r else 2)
    matrix = (rates.FUSED_MATRIX if job.fuses_adapters else rates.MATRIX) * gpu.flops_per_second
    parts["linear layers"] += linear * products / matrix
    if keeps_head:
        parts["linear layers"] -= 2 * run.num_targets * model.head_weights / matrix
    for inputs in skipped:
        weights = inputs * model.hidden / faster + job.lora_r * (inputs + model.hidden)
        parts["linear layers"] -= 2 * tokens * model.num_layers * weights / matrix
    moved = rates.ELEMENTWISE_TURNS * activation_bytes_per_token(job)
    if job.lora_r and not job.fuses_adapters:
        outputs = sum(out * count for _, out, count in model.linears) if not model.num_experts else 0
        moved += rates.PEFT_TURNS * 2 * model.num_layers * outputs
    parts["norms, activations, adapters"] += tokens * moved * (forwards + 2) / gpu.memory_bytes_per_second
    parts["launches"] += rates.LAYER_PASS_SECONDS * model.num_layers * (forwards + 1)

    own, past, selected = attended_pairs(job, run)
    pairs_flops = 4 * model.num_heads * model.head_dim / min(1.0, (model.head_dim / rates.HEAD_DIM) ** 0.5)
    peak = gpu.flops_per_second

    def attention(pairs: float, forward: float, backward: float, products: float = rates.BACKWARD) -> float:
        return pairs * pairs_flops * (attention_forwards / forward + products / backward) / peak

    parts["attention inside chunks"] += attention(own, rates.ATTENTION_FORWARD, rates.ATTENTION_BACKWARD)
    parts["attention to the past"] += attention(past, rates.ATTENTION_FORWARD, rates.ATTENTION_BACKWARD)
    parts["attention to the past"] += attention(
        selected * (1 + rates.LIST_KEYS / (job.top_k * job.page_tokens)),
        rates.SELECTED_FORWARD,
        rates.SELECTED_BACKWARD,
        _products(job, tokens),
    )
    if selected:
        mean_keys = run.mean_past_pages * parts_of(job.page_tokens)
        scores = tokens / _POOLED_TOKENS * mean_keys * 2 * model.num_heads * model.head_dim
        layers = len(job.sparse_layers)
        # The recompute replays the lists, but merges again.
        parts["selection of pages"] += layers * rates.SPARSE_LAYER_SECONDS * attention_forwards
        parts["selection of pages"] += layers * scores / (rates.SCORING * peak)
    return parts


def _products(job: Job, tokens: int) -> float:
    """Of the backward of attention to selected pages, over those of its forward."""
    twice = scores_are_formed_twice(
        num_heads=job.model.num_heads,
        num_kv_heads=job.model.num_kv_heads,
        num_blocks=-(-tokens // job.q_block),
        q_block=job.q_block,
        top_k=job.top_k,
        page_tokens=job.page_tokens,
    )
    return rates.BACKWARD_TWICE if twice else rates.BACKWARD


def _launch_seconds(job: Job, passes: int) -> float:
    """Of the host: what is quicker to compute than to launch takes as long as launching does."""
    return rates.HOST_PASS_SECONDS * job.model.num_layers * passes


def attended_pairs(job: Job, run: ChunkRun) -> tuple[float, float, float]:
    """(Query, key) pairs of a chunk over all layers, on average of an even run: inside it, densely with its past, and
    with selected pages."""
    tokens, past, layout = run.num_tokens, run.mean_past_pages * job.page_tokens, job.pages
    triangle = tokens * (tokens + 1) / 2
    own = dense = selected = 0.0
    for window, layers in Counter(layout.windows).items():
        if window is None or window >= tokens + past:
            own += triangle * layers
            dense += tokens * past * layers
        else:
            reach = min(window, tokens)
            own += (reach * (reach + 1) / 2 + (tokens - reach) * reach) * layers
            dense += min(window, past) * reach / 2 * layers
    if layout.sparse_layers and layout.selects(run.mean_past_pages):
        layers = len(layout.sparse_layers)
        dense += tokens * (layout.always_pages * job.page_tokens - past) * layers
        selected = float(tokens * layout.top_k * job.page_tokens * layers)
    return own, dense, selected


def _transfers(job: Job, memory: Memory, step: StepTime, launching: float) -> None:
    """Bytes between host and device, and how long the GPU waits for them.

    What a chunk needs of the pages that exist is absent in the proportion in which they exceed the pool. Copies of each
    direction run beside the computation; in the forward sweep of sparse layers only beside the attention of the chunk
    to itself, since before that nobody knows which pages are wanted. The host's work for pages in sparse layers runs
    beside the computation as far as launching leaves it time.

    Args:
        launching: seconds of the host.
    """
    plan, layout, num_pages = memory.plan, job.pages, memory.chunks[-1].past_pages
    if not plan.offloads or not num_pages:
        return
    rate = job.gpu.host_bytes_per_second
    count = num_chunks(memory.chunks)
    compute = sum(step.parts.values()) - step.parts["optimizer"] - step.parts["waiting for host memory"]
    shares = _shares_of_time(job, memory.chunks)
    values_per_page = memory.pages.value_bytes / num_pages
    gradients_per_page = memory.pages.gradient_bytes / num_pages
    num_records = num_pages * len(layout.windows) * layout.num_kv_heads
    value_record = memory.pages.value_bytes / num_records
    gradient_record = memory.pages.gradient_bytes / num_records
    sparse = len(layout.sparse_layers) / len(layout.windows)
    own_share = step.parts["attention inside chunks"] / (1 + rates.BACKWARD) / count
    device_values, device_gradients = plan.device_value_bytes, plan.device_gradient_bytes
    attention_kept = memory.kept.attention.chunks
    waiting, by_host, untouched, num_layers = 0.0, 0.0, 1.0, len(layout.windows)
    for run, number, distinct_pages in chunks_backwards(layout, memory.chunks):
        index, past, own = run.index + number, run.past_pages + number * run.own_pages, run.own_pages
        seen = (1 - sparse) * past + sparse * distinct_pages(past)
        values_absent = max(0.0, 1 - device_values / max(1.0, past * values_per_page))
        read = seen * values_per_page * values_absent
        beyond = (past + own) * values_per_page - device_values
        written = min(own * values_per_page, max(0.0, beyond))  # a page is written once: K and V do not change
        had = 1 - untouched  # the share of pages that have a gradient
        untouched *= 1 - seen / past if past else 0.0
        grads = past * gradients_per_page * (1 - untouched)
        absent = max(0.0, 1 - device_gradients / max(1.0, grads))
        dirty = seen * gradients_per_page * absent
        # The backward uses the pages of the recompute, and those stay that fit.
        again = not (job.keep_last_graph and index == count - 1) and index not in attention_kept
        read_again = min(read, max(0.0, seen * values_per_page - device_values)) if again else 0.0
        up, down = read + read_again + dirty * had, dirty
        step.up_bytes += read + up
        step.down_bytes += written + down
        seconds = compute * shares[index]
        hidden = own_share if sparse == 1 else seconds / 4
        waiting += max(0.0, max(read, written) / rate - hidden)
        waiting += max(0.0, max(up, down) / rate - seconds * 3 / 4)
        if values_absent:
            moved = (read + written + read_again) / value_record + dirty * (had + 1) / gradient_record
            by_host += sparse * (num_layers * rates.HOST_LAYER_SECONDS + moved * rates.HOST_RECORD_SECONDS)
    step.parts["waiting for host memory"] += waiting
    step.parts["host's work for pages"] = max(0.0, by_host - (compute - launching))


def _shares_of_time(job: Job, runs: Sequence[ChunkRun]) -> list[float]:
    """Of each chunk among all others, roughly: its own computation alone."""
    seconds: list[float] = []
    for run in _even_runs(job, runs):
        first, last = (
            sum(_compute(job, run.part(n, n + 1), repeated=True, attends_again=True).values())
            for n in (0, run.count - 1)
        )
        more = (last - first) / max(1, run.count - 1)
        seconds += [first + number * more for number in range(run.count)]
    whole = sum(seconds)
    return [of_chunk / whole for of_chunk in seconds]


def _zero(job: Job, step: StepTime, passes: int) -> None:
    """What DeepSpeed and communication add."""
    model = job.model
    if job.zero_stage in (None, 0) and job.num_gpus == 1:
        return
    if job.zero_stage != 3:
        added = rates.ZERO_STEP_SHARE * step.seconds
        gradient_bytes = job.trainable * (4 if job.zero_stage is None else 2)
        added += 2 * gradient_bytes * (job.num_gpus - 1) / job.num_gpus / job.gpu.link_bytes_per_second
        step.parts["ZeRO"] = added
        return
    gather = 2 * model.num_parameters * (job.num_gpus - 1) / job.num_gpus / job.gpu.link_bytes_per_second
    added = max(gather, rates.ZERO3_LAYER_SECONDS * model.num_layers) * passes
    if job.is_sharded and job.lora_r:
        host = rates.ZERO3_HOST_SECONDS * model.num_layers * passes
        added = max(added, host - step.seconds)
    if job.reduce_per_chunk:
        added += passes / 3 * 6 * job.trainable / job.gpu.memory_bytes_per_second
    step.parts["ZeRO"] = added


def _optimizer(job: Job, step: StepTime) -> None:
    numbers = job.trainable // (job.num_gpus if job.zero_stage else 1)
    if job.zero_offload and job.zero_stage is not None:
        transfer = 6 * numbers / job.gpu.host_bytes_per_second
        step.parts["optimizer"] = numbers * rates.HOST_ADAMW_SECONDS + transfer
        step.down_bytes += 4 * numbers
        step.up_bytes += 2 * numbers
        return
    # AdamW reads weight, gradient and two moments and writes three of them; sums over chunks were added to before.
    num_chunks = -(-job.tokens // job.chunk_tokens)
    step.parts["optimizer"] = (28 * numbers + 10 * job.trainable * num_chunks) / job.gpu.memory_bytes_per_second
