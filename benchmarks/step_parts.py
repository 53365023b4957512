"""What the time of a step is spent on: launches on the device by part, and the least that each part can take.

A matrix product is told apart by the shapes of the operation that launched it: one with a side as short as LoRA's rank
is LoRA's, one with a side as long as the vocabulary the head's. Own kernels and Liger's are known by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.floor import step_flops
from oomb_accel.bench import ceiling
from oomb_accel.bench.figures import FLOOR_FLOPS_PER_SECOND
from oomb_accel.config import OombConfig
from oomb_accel.plan.shape import ModelShape
from oomb_accel.plan.sizes import parts_of
from oomb_accel.schedule import ChunkSchedule
from oomb_accel.selection import POOLED_TOKENS

BASE, LORA, HEAD, OTHER_PRODUCTS = "base products", "LoRA products", "head products", "other products"
LOCAL_FORWARD, LOCAL_BACKWARD = "library attention, forward", "library attention, backward"
"""To the own chunk, and to earlier tokens that all queries of a chunk attend to."""
SELECTED_FORWARD, SELECTED_DQ = "selected pages, forward", "selected pages, dQ"
SELECTED_DKV, SELECTED_INDEX = "selected pages, dK and dV", "selected pages, index"
SELECTION, PAGES = "selection of pages", "pages and merging"
NORMS, LOSS = "norm, RoPE, activation", "loss"
SUMS, COPIES = "sums and other elementwise", "copies, casts, fills"
OPTIMIZER, GAPS = "optimizer", "launch gaps"

_BY_NAME = {
    "_page_forward_kernel": SELECTED_FORWARD,
    "_page_dq": SELECTED_DQ,
    "_page_owner_kernel": SELECTED_DKV,
    "_page_reduce_kernel": SELECTED_DKV,
    "_row_stats_kernel": SELECTED_INDEX,
    "_index_": SELECTED_INDEX,
    "_lse_kernel": SELECTION,
    "_mass_kernel": SELECTION,
    "_top_pages_kernel": SELECTION,
    "_merge_kernel": PAGES,
    "_move_pages_kernel": PAGES,
    "_accumulate_kernel": PAGES,
    "_quantize_pages_kernel": PAGES,
    "_copy_records_kernel": PAGES,
    "_clear_records_kernel": PAGES,
    "_set_slots_kernel": PAGES,
    "_quantize_rows_kernel": COPIES,
    "_checksums_kernel": COPIES,
    "_forward_kernel": LOSS,
    "_backward_kernel": LOSS,
    "liger_cross_entropy": LOSS,
    "_rms_norm": NORMS,
    "_block_rms_norm": NORMS,
    "_triton_rope": NORMS,
    "_swiglu": NORMS,
}
"""Beginnings of the names of own kernels and of Liger's."""
_PRODUCT_OPS = ("mm", "addmm", "addmm_", "_addmm_activation", "bmm", "baddbmm", "_scaled_mm")
_PRODUCT_NAMES = ("nvjet", "gemm", "cutlass", "xmma", "splitkreduce")
_ATTENTION_NAMES = ("sdpa", "flash_fwd", "flash_bwd", "fmha", "cudnn::fusion")
_BACKWARD_NAMES = ("bprop", "bwd", "backward", "dot_do_o", "convert_dq", "reduce_head")
_COPY_OPS = ("copy_", "_to_copy", "clone", "contiguous", "cat", "fill_", "zero_", "zeros", "index_copy_", "index_put_")
_COPY_NAMES = ("memcpy", "memset", "copy", "catarray", "fillfunctor")
_MOST_RANKS = 3
"""Adapters whose products may run as one (those of queries, keys and values), so that a side is as many ranks long."""

ATTENTION_FORWARD_FLOPS, ATTENTION_BACKWARD_FLOPS = 600e12, 500e12
"""Of attention: cuDNN reaches 613 and 481 for 8,192 tokens among themselves, 600 and 545 with 32K and more keys."""
MEMORY_BYTES = 4.0e12
"""A second, read and written by elementwise kernels; the data sheet says 4.8."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, copy or fill on the device; on the CPU an operation."""

    name: str
    us: float
    op: str = ""
    """The innermost torch operation that launched it, such as ``aten::mm``; empty for Triton kernels."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the operation's inputs."""


def part_of(launch: Launch, rank: int, vocabulary: int) -> str:
    """The part of a step that a launch belongs to."""
    for beginning, part in _BY_NAME.items():
        if launch.name.startswith(beginning):
            return part
    name, op = launch.name.lower(), launch.op.removeprefix("aten::")
    if op in _PRODUCT_OPS:
        return _product_part(op, launch.shapes, rank, vocabulary)
    if "attention" in op or (not op and _has(name, _ATTENTION_NAMES)):
        return LOCAL_BACKWARD if "backward" in op or _has(name, _BACKWARD_NAMES) else LOCAL_FORWARD
    if op.startswith(("_foreach", "_fused_adam")) or "multi_tensor_apply" in name:
        return OPTIMIZER
    if _has(name, _PRODUCT_NAMES):
        return OTHER_PRODUCTS
    return COPIES if op in _COPY_OPS or _has(name, _COPY_NAMES) else SUMS


def _has(name: str, words: Sequence[str]) -> bool:
    return any(word in name for word in words)


def _product_part(op: str, shapes: Sequence[tuple[int, ...]], rank: int, vocabulary: int) -> str:
    """By the two factors; what is added to comes before them."""
    first = 1 if "add" in op else 0
    sides = [side for shape in shapes[first : first + 2] for side in shape]
    if op in ("bmm", "baddbmm") or not sides:
        return OTHER_PRODUCTS
    if vocabulary in sides:
        return HEAD
    return LORA if min(sides) <= _MOST_RANKS * rank else BASE


def floors(shape: ModelShape, tokens: int, config: OombConfig, rank: int) -> dict[str, float]:
    """Seconds that the parts of a step take on one document: operations as in `floor_seconds`, but those of attention
    at the rates above, which libraries reach; and bytes.

    What a perfect kernel need not do has no floor: copies, casts, merging, gaps. Norms, RoPE, activations and sums of
    residuals read each input once and write each output once.
    """
    flops = step_flops(shape, tokens, config)
    whole = step_flops(shape, tokens, replace(config, keep_outputs=False))
    forwards = 1 + whole[ceiling.RECOMPUTE, False] / whole[ceiling.FORWARD, False]
    adapters = shape.lora_parameters(rank) * (forwards + 2)
    if config.keep_outputs:  # those of the last product of attention and of the MLP do not run again
        ends = shape.num_heads * shape.head_dim + shape.intermediate + 2 * shape.hidden
        adapters -= shape.num_layers * rank * ends * (forwards - 1)
    base = sum(flops[part, False] for part in (ceiling.FORWARD, ceiling.RECOMPUTE, ceiling.GRADIENT))
    found = {
        BASE: base / FLOOR_FLOPS_PER_SECOND,
        LORA: 2 * adapters * tokens / FLOOR_FLOPS_PER_SECOND,
        HEAD: flops[ceiling.HEAD, False] / FLOOR_FLOPS_PER_SECOND,
    }
    local = (ceiling.OWN, ceiling.ALWAYS, ceiling.PAST)
    found[LOCAL_FORWARD] = sum(flops[part, False] for part in local) / ATTENTION_FORWARD_FLOPS
    found[LOCAL_BACKWARD] = sum(flops[part, True] for part in local) / ATTENTION_BACKWARD_FLOPS
    if flops[ceiling.SELECTED, False]:
        found[SELECTED_FORWARD] = flops[ceiling.SELECTED, False] / ATTENTION_FORWARD_FLOPS
        backward = flops[ceiling.SELECTED, True] / ATTENTION_BACKWARD_FLOPS
        found |= {SELECTED_DQ: backward / 5, SELECTED_DKV: backward * 4 / 5}  # scores and dS are made once
        found[SELECTION] = _score_flops(shape, tokens, config) / FLOOR_FLOPS_PER_SECOND
    loss_forwards = 1 if config.keep_outputs else forwards
    moved = _moved_bytes(shape, tokens, forwards, loss_forwards, rank)
    return found | {name: count / MEMORY_BYTES for name, count in moved.items()}


def _moved_bytes(shape: ModelShape, tokens: int, forwards: float, loss_forwards: float, rank: int) -> dict[str, float]:
    hidden, keys = shape.hidden, shape.num_kv_heads * shape.head_dim
    rotated = shape.num_heads * shape.head_dim + keys
    # Norms read x and write y, backwards dy, x and dx; the activation has gate, up and their product.
    norm_numbers = forwards * (2 * 2 * hidden + 2 * rotated + 3 * shape.intermediate)
    norm_numbers += 2 * 3 * hidden + 2 * rotated + 5 * shape.intermediate
    sum_numbers = 2 * 3 * hidden * (forwards + 1)
    page_numbers = 2 * 2 * keys + 2 * keys  # K and V are stored, their gradients read
    bf16 = 2 * tokens * shape.num_layers
    return {
        NORMS: bf16 * norm_numbers,
        SUMS: bf16 * sum_numbers,
        PAGES: bf16 * page_numbers,
        LOSS: 2 * tokens * shape.vocabulary * (loss_forwards + 2),  # read; backwards read and overwritten
        OPTIMIZER: 28 * shape.lora_parameters(rank),  # weight, gradient and two moments in fp32; three are written
    }


def _score_flops(shape: ModelShape, tokens: int, config: OombConfig) -> float:
    """Of pooled queries against mean keys, where pages are selected."""
    assert config.chunk_tokens != "auto"
    schedule = ChunkSchedule.build([tokens], (), chunk_tokens=config.chunk_tokens, page_tokens=config.page_tokens)
    always, pairs = config.sink_pages + config.recent_pages, 0.0
    for chunk in schedule.chunks:
        candidates = len(chunk.past_pages) - always
        if candidates > config.top_k:
            pairs += chunk.num_tokens / POOLED_TOKENS * candidates * parts_of(config.page_tokens)
    return 2.0 * shape.num_heads * shape.head_dim * pairs * shape.num_layers
