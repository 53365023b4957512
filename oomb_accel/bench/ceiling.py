"""What a step cannot be faster than on this GPU: its matrix products and its attention, timed as plain library calls.

Counted are the products with base weights and head (forwards, in the recompute, for gradients of inputs) and attention,
in the very shapes of the step, with ``base_dtype="float8"`` from 8-bit floats. Selected pages are counted as that many
neighbouring keys in one dense call. LoRA's own products, norms, activations, quantising, the choice of pages, the loss,
sums, copies and the optimizer have no share in it.

Legend: H query heads, G KV heads, T tokens, D head_dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomb_accel.bench.figures import BACKWARD
from oomb_accel.bench.timing import Measure, Task
from oomb_accel.config import OombConfig
from oomb_accel.integrations.float8_base import LONGEST_FAST_SUM
from oomb_accel.past import past_ranges
from oomb_accel.plan.shape import ModelShape
from oomb_accel.schedule import Chunk, ChunkSchedule
from oomb_kernels import (
    AttentionCall,
    dense_attention_backward,
    dense_attention_forward,
    float8_product,
    has_float8_product,
    quantize_rows,
)

FORWARD, RECOMPUTE, GRADIENT = "products, forward sweep", "products, recompute", "products, input gradients"
HEAD, OWN = "head", "attention in the chunk"
ALWAYS, SELECTED, PAST = "attention to sinks, recent pages", "attention to selected pages", "attention to the past"
PARTS = (FORWARD, RECOMPUTE, GRADIENT, HEAD, OWN, ALWAYS, SELECTED, PAST)


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a linear layer, whose weight is stored ``[outputs, inputs]``."""

    rows: int
    inputs: int
    outputs: int
    gradient: bool
    """Of the inputs, from that of the outputs; otherwise outputs from inputs."""
    float8: bool = False
    """Of numbers in 8 bits, which are there already: quantising them is not in it."""

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs

    def task(self, device: torch.device, dtype: torch.dtype) -> Task:
        return self._float8_task(device, dtype) if self.float8 else self._plain_task(device, dtype)

    def _float8_task(self, device: torch.device, dtype: torch.dtype) -> Task:
        """Scaled products read both matrices along the sum, and the step has a copy of the weight for each way."""
        made, summed = (self.inputs, self.outputs) if self.gradient else (self.outputs, self.inputs)

        def prepare() -> Sequence[Tensor]:
            sizes = (self.rows, summed), (made, summed)
            pairs = [quantize_rows(torch.randn(size, device=device, dtype=dtype)) for size in sizes]
            return [*pairs[0], *pairs[1]]

        def run(tensors: Sequence[Tensor]) -> Tensor:
            rows, row_scales, weight, weight_scales = tensors
            out = torch.empty(self.rows, made, device=device, dtype=dtype)
            fast = not self.gradient and summed <= LONGEST_FAST_SUM  # as in the step
            float8_product(rows, row_scales, weight, weight_scales, None, out, fast=fast)
            return out

        return Task(run, prepare)

    def _plain_task(self, device: torch.device, dtype: torch.dtype) -> Task:
        def prepare() -> tuple[Tensor, Tensor]:
            width = self.outputs if self.gradient else self.inputs
            weight = torch.randn(self.outputs, self.inputs, device=device, dtype=dtype)
            return torch.randn(self.rows, width, device=device, dtype=dtype), weight

        def run(tensors: tuple[Tensor, Tensor]) -> Tensor:
            rows, weight = tensors
            return torch.mm(rows, weight if self.gradient else weight.t())

        return Task(run, prepare)


@dataclass(frozen=True, slots=True)
class Attention:
    """One call of attention, in one direction."""

    num_heads: int
    num_groups: int
    """KV heads."""
    head_dim: int
    queries: int
    keys: int
    causal: bool
    backward: bool

    @property
    def flops(self) -> float:
        pairs = self.queries * (self.queries + 1) / 2 if self.causal else self.queries * self.keys
        return 4.0 * self.num_heads * self.head_dim * pairs * (BACKWARD if self.backward else 1.0)

    def task(self, device: torch.device, dtype: torch.dtype) -> Task:
        call = AttentionCall(scale=self.head_dim**-0.5, causal=self.causal)

        def tokens(count: int, heads: int) -> Tensor:
            return torch.randn(count, heads, self.head_dim, device=device, dtype=dtype).transpose(0, 1)

        def forward(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            q_HTD, k_GTD, v_GTD = tensors[:3]
            return dense_attention_forward(q_HTD, k_GTD, v_GTD, call, "auto")

        def backward(tensors: Sequence[Tensor]) -> object:
            q_HTD, k_GTD, v_GTD, out_HTD, lse_HT, dout_HTD = tensors
            return dense_attention_backward(dout_HTD, q_HTD, k_GTD, v_GTD, out_HTD, lse_HT, call, "auto")

        def prepare() -> Sequence[Tensor]:
            tensors = [tokens(self.queries, self.num_heads), *(tokens(self.keys, self.num_groups) for _ in range(2))]
            return [*tensors, *forward(tensors), tokens(self.queries, self.num_heads)] if self.backward else tensors

        return Task(backward if self.backward else forward, prepare)


class Work(NamedTuple):
    """Equal library calls of one part of a step."""

    part: str
    call: Product | Attention
    times: int


@dataclass(frozen=True, slots=True)
class CeilingPart:
    """All library calls of one part."""

    name: str
    seconds: float
    flops: float

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "seconds": self.seconds, "flops": self.flops}


def step_work(shape: ModelShape, tokens: int, config: OombConfig, *, trains_all: bool = False) -> list[Work]:
    """All calls of one step on one document, without gradients of weights.

    Attention, its last product, that of MLPs and the head are recomputed with ``keep_outputs=False``; otherwise outputs
    and head gradients of all chunks count as kept.

    Args:
        shape: of a model without sliding windows and experts.
        tokens: of the document.
        config: with a size of chunks, not ``"auto"``.
        trains_all: all weights are trained: outputs of products and head gradients are kept with adapters only.
    """
    assert config.chunk_tokens != "auto"
    schedule = ChunkSchedule.build(
        [tokens], range(tokens - 1), chunk_tokens=config.chunk_tokens, page_tokens=config.page_tokens
    )
    chunks = [chunk for chunk in schedule.chunks if chunk.num_targets]  # a last one without targets is not run
    keeps_more = bool(config.keep_outputs) and not trains_all
    queries, keys, o_proj, gates, down = shape.linears
    linears = [(*linear, True) for linear in (queries, keys, gates)]
    linears += [(*block_end, not keeps_more) for block_end in (o_proj, down)]
    found: Counter[tuple[str, Product | Attention]] = Counter()
    for chunk in chunks:
        recomputes = 1 - (chunk is chunks[-1] and config.keep_last_graph)
        for inputs, outputs, count, again in linears:
            float8 = config.base_dtype == "float8" and has_float8_product(outputs, inputs)
            forward, gradient = (Product(chunk.num_tokens, inputs, outputs, back, float8) for back in (False, True))
            found[FORWARD, forward] += count * shape.num_layers
            found[RECOMPUTE, forward] += again * recomputes * count * shape.num_layers
            found[GRADIENT, gradient] += count * shape.num_layers
        head_again = 0 if keeps_more else recomputes
        found[HEAD, Product(chunk.num_targets, shape.hidden, shape.vocabulary, False)] += 1 + head_again
        found[HEAD, Product(chunk.num_targets, shape.hidden, shape.vocabulary, True)] += 1
        for part, attended, causal in _attended(chunk, config):
            attended_again = 0 if config.keep_outputs else recomputes
            for backward, times in ((False, 1 + attended_again), (True, 1)):
                heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
                call = Attention(*heads, chunk.num_tokens, attended, causal, backward)
                found[part, call] += times * shape.num_layers
    return [Work(part, call, times) for (part, call), times in found.items() if times]


def _attended(chunk: Chunk, config: OombConfig) -> Iterator[tuple[str, int, bool]]:
    """Part, number of keys and causality of each call of a layer."""
    yield OWN, chunk.num_tokens, True
    always, past = config.sink_pages + config.recent_pages, len(chunk.past_pages)
    if config.attention == "sparse" and past > always + config.top_k:
        yield ALWAYS, always * config.page_tokens, False
        yield SELECTED, config.top_k * config.page_tokens, False
        return
    span_pages = config.span_tokens // config.page_tokens
    for pages in past_ranges(chunk.past_pages, None, None, span_pages=span_pages, page_tokens=config.page_tokens):
        yield PAST, sum(map(len, pages)) * config.page_tokens, False


def measure_ceiling(
    work: Sequence[Work], measure: Measure, device: torch.device, dtype: torch.dtype
) -> list[CeilingPart]:
    """Time each call once, and add up by part.

    Returns:
        Parts in the order of `PARTS`; those without work are left out.
    """
    calls = {repr(item.call): item.call for item in work}
    ms = measure({name: call.task(device, dtype) for name, call in calls.items()})
    parts = []
    for name in PARTS:
        own = [item for item in work if item.part == name]
        if own:
            seconds = sum(ms[repr(item.call)] * item.times for item in own) / 1e3
            parts.append(CeilingPart(name, seconds, sum(item.call.flops * item.times for item in own)))
    return parts
