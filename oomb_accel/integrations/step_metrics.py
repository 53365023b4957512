"""The figures of a step beyond its loss: tokens, utilisation, selected pages, copies, peaks of memory.

Nothing here waits for the device: what is not there yet is left out. docs/metrics.md says what each figure means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oomb_accel.integrations.attachment import Attachment, attachment_of
from oomb_accel.integrations.support import compute_dtype, whole_numel
from oomb_accel.memory_report import MemoryReport
from oomb_accel.plan import gpu_of_device
from oomb_accel.plan.flops import ModelFlops, SparseReach
from oomb_accel.progress import GIB
from oomb_accel.selection_tally import SelectionTally


class StepMetrics:
    """Collects what the streams of a step say, on this rank.

    Args:
        model: switched on.
        report: of its memory, if there is one.
    """

    def __init__(self, model: nn.Module, report: MemoryReport | None) -> None:
        self._state = state = attachment_of(model)
        self._report = report
        self._flops: ModelFlops | None = None
        self._tokens = self._targets = 0
        self._needed = 0.0
        self._copied, self._waited = state.offload.copied_bytes(), state.offload.waited_seconds()
        if state.sparse_layers:
            state.tally = SelectionTally()
        state.on_stream = self._count

    def _count(self, document_tokens: tuple[int, ...], num_targets: int) -> None:
        if self._flops is None:  # chunks are chosen by now
            self._flops = flops_of_attachment(self._state)
        self._tokens += sum(document_tokens)
        self._targets += num_targets
        if self._flops is not None:
            self._needed += self._flops.of_stream(document_tokens, num_targets)

    def take(self, seconds: float) -> dict[str, Any]:
        """The figures since the last call, and begin anew.

        Args:
            seconds: that this took.
        """
        state = self._state
        peak = peak_flops(state)
        found: dict[str, Any] = {
            "tokens": self._tokens,
            "trained_tokens": self._targets,
            "tokens_per_second": self._tokens / seconds,
            "mfu": self._needed / seconds / peak if peak and self._needed else None,
        }
        found |= self._copies(seconds) | (state.tally.take() if state.tally is not None else {}) | self._peaks()
        self._tokens = self._targets = 0
        self._needed = 0.0
        return found

    def _copies(self, seconds: float) -> dict[str, Any]:
        copied, waited = self._state.offload.copied_bytes(), self._state.offload.waited_seconds()
        before, self._copied = self._copied, copied
        stalled, self._waited = waited - self._waited, waited
        moved = {way: copied[way] - before.get(way, 0) for way in copied}
        if not any(moved.values()):
            return {}
        return {
            "copied_up_gib": moved["up"] / GIB,
            "copied_down_gib": moved["down"] / GIB,
            "waited_seconds": stalled,
            "copy_stall": stalled / seconds,
        }

    def _peaks(self) -> dict[str, Any]:
        """Of this step alone."""
        if self._report is None:
            return {}
        peaks = self._report.take_peaks()
        names = {"allocated": "step_gpu_gib", "pinned": "pinned_gib", "pageable": "pageable_gib"}
        return {name: peaks[tier] / GIB for tier, name in names.items() if tier in peaks}


def peak_flops(state: Attachment) -> float | None:
    """Peak of the device; None without a GPU whose data sheet is known, or where it does not compute in 16 bits."""
    device = next(state.model.parameters()).device
    if device.type != "cuda" or compute_dtype(state.base, device).itemsize > 2:
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.flops_per_second


def flops_of_attachment(state: Attachment) -> ModelFlops | None:
    """What the model's arithmetic is counted by; None where its config does not say how large it is."""
    try:
        shape = state.model_shape()
    except ValueError:
        return None
    trained = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
    adapters = {name for name in trained if "lora_" in name}
    heads = {id(p) for module in _heads(state.base) for p in module.parameters()}
    config = state.settled
    sparse = SparseReach(
        layers=state.sparse_layers,
        chunk_tokens=state.chunk_tokens,
        page_tokens=config.page_tokens,
        always_pages=config.sink_pages + config.recent_pages,
        top_k=config.top_k,
    )
    return ModelFlops(
        shape=shape,
        adapters=sum(whole_numel(trained[name]) for name in adapters),
        layers_trained=any(
            p.dim() > 1 and id(p) not in heads for name, p in trained.items() if name not in adapters
        ),  # of norms and biases alone there is nothing to count
        head_trained=any(id(p) in heads for name, p in trained.items() if name not in adapters),
        sparse=sparse if state.sparse_layers else None,
    )


def _heads(base: Any) -> list[nn.Module]:
    """The output layer and the embedding."""
    found = (base.get_output_embeddings(), base.get_input_embeddings())
    return [module for module in found if isinstance(module, nn.Module)]
