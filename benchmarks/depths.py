"""Long steps of dense attention, timed in part: a chunk's time grows evenly with the tokens before it.

A dense step over a million tokens takes half an hour. Here a few chunks, at given depths of the document, run in both
sweeps as in training; the pages of all others are filled with noise, so that these few find a whole past, on the device
or in host memory as it would be. A line through their times gives the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import oomb_accel
from benchmarks.floor import floor_seconds
from benchmarks.registry import GIB, Row, benchmark
from benchmarks.whole_step import SIDES, config_of
from oomb_accel.bench.models import SHAPES, lora_model
from oomb_accel.gradients import StepGradients
from oomb_accel.integrations import step
from oomb_accel.integrations.liger import use_liger
from oomb_accel.integrations.step_recurrence import StepRecurrence
from oomb_accel.plan.shape import shape_of
from oomb_accel.schedule import Chunk

DEPTHS = (0.25, 0.5, 1.0)
"""Of the document, at which a chunk is timed."""
LEAST_CHUNKS = 4
"""Two of them to compile, and two for a line."""


class _AtDepths(StepRecurrence):
    """Runs the first two chunks, to compile, and those at the depths."""

    seconds: dict[int, float]
    """By index of the chunk, both sweeps."""

    def __init__(self, state: Any, *rest: Any) -> None:
        super().__init__(state, *rest)
        chunks = self._schedule.chunks
        last = len(chunks) - 1
        self.seconds = dict.fromkeys(sorted({0, min(1, last), *(round(depth * last) for depth in DEPTHS)}), 0.0)
        _AtDepths.newest = self

    newest: _AtDepths

    def forward_sweep(self, embeds_1TD: Tensor | None, *, train: bool = False) -> Tensor:
        for chunk in self._schedule.chunks:
            start = self._now()
            with torch.no_grad():
                if chunk.index in self.seconds:
                    self._run(chunk, "forward", None)
                    self.seconds[chunk.index] += self._now() - start
                else:
                    self._fill(chunk)
        return torch.zeros(self._schedule.chunks[-1].end_target, device=self._device)

    def backward_sweep(self, grad_N: Tensor, gradients: StepGradients, embeds_1TD: Tensor | None) -> None:
        for chunk in reversed(self._schedule.chunks):
            start = self._now()
            if chunk.index in self.seconds:
                log_probs_N, _ = self._run_with_graph(chunk, "backward", None)
                self._memory.begin(chunk, "backward")
                grad_chunk_N = grad_N[chunk.first_target : chunk.end_target]
                self._back_propagate(gradients, log_probs_N, grad_chunk_N, None, last=chunk.index == 0)
                self.seconds[chunk.index] += self._now() - start
            self._memory.release(chunk)

    def _fill(self, chunk: Chunk) -> None:
        """Noise in place of K and V."""
        shape, cache = self._shape, self._memory.cache
        self._memory.begin(chunk, "forward")
        for layer in range(shape.num_layers):
            size = (2, shape.num_kv_heads, chunk.num_tokens, shape.head_dim)
            k_GTD, v_GTD = torch.randn(size, dtype=torch.bfloat16, device=self._device)
            cache.store(layer, chunk, k_GTD, v_GTD)
            cache.settle(layer)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@benchmark(
    "depths",
    [side for side in SIDES if side.startswith("oomb")],
    default_sides=("oomb-bf16-grads-no-kept",),
    default_lengths=(524288, 1048576),
    least_chunks=LEAST_CHUNKS,
)
def depths(
    *, shape: str, lengths: list[int], sides: list[str], chunk_tokens: int, timed: int, device: torch.device
) -> Iterator[Row]:
    """One row per length and side: the whole step, from chunks at `DEPTHS`. ``timed`` is not used."""
    model = lora_model(shape, device)
    use_liger(model, device, fused_loss=True)
    for tokens in lengths:
        for side in sides:
            ids = torch.randint(0, SHAPES[shape]["vocab_size"], (1, tokens), device=device)
            config = config_of(side, tokens, chunk_tokens)
            oomb_accel.enable(model, config)
            with patch.object(step, "StepRecurrence", _AtDepths), torch.autocast(device.type, torch.bfloat16):
                model(input_ids=ids, labels=ids).loss.backward()
            oomb_accel.disable(model)
            model.zero_grad(set_to_none=True)
            row = Row("depths", side, tokens, note="from chunks at depths")
            row.floor_seconds = floor_seconds(shape_of(SHAPES[shape], shape), tokens, config)
            seconds = dict(list(_AtDepths.newest.seconds.items())[2:])
            row.seconds = whole_step_seconds(seconds, -(-tokens // chunk_tokens))
            row.details = {"shape": shape, "chunk_tokens": chunk_tokens, "seconds_of_chunk": seconds}
            if device.type == "cuda":
                row.peak_gib = torch.cuda.max_memory_allocated() / GIB
                torch.cuda.empty_cache()
            yield row


def whole_step_seconds(seconds: dict[int, float], num_chunks: int) -> float:
    """The sum over all chunks of the line through the times of some."""
    slope, first = np.polyfit(list(seconds), list(seconds.values()), 1)
    return float(num_chunks * first + slope * num_chunks * (num_chunks - 1) / 2)
