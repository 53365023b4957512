"""One optimizer step that reduces gradients chunk by chunk.

``engine.backward`` on a step's loss delivers every gradient once, whole, in fp32. That is nothing for LoRA, but 4 bytes
per parameter and rank for full fine-tuning, which is what ZeRO 2 and 3 are meant to save. Here each chunk is a
backward of the engine: its gradients are reduced and added to this rank's share at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oomb_accel.hooks import without_hooks
from oomb_accel.integrations.attachment import Attachment, attachment_of
from oomb_accel.integrations.step import agreed_stream, build_recurrence, stream_embeds
from oomb_accel.integrations.stream import count_targets


class EngineGradients:
    """Each pass is a backward of the engine, which reduces and keeps what it needs.

    Args:
        engine: of DeepSpeed.
        boundary: whether the last pass completes an optimizer step.
    """

    leaves: Sequence[Tensor] = ()

    def __init__(self, engine: Any, *, boundary: bool) -> None:
        self._engine = engine
        self._boundary = boundary
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]

    def add(self, log_probs_N: Tensor, grad_N: Tensor, embeds_1TD: Tensor | None, *, last: bool) -> Tensor | None:
        self._engine.set_gradient_accumulation_boundary(last and self._boundary)
        with without_hooks(self._parameters):
            self._engine.backward((log_probs_N * grad_N).sum(), scale_wrt_gas=False)
        return None if embeds_1TD is None else embeds_1TD.grad

    def results(self) -> list[Tensor | None]:
        return []


def step(engine: Any, batches: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Tensor:
    """Forward, backward and ``engine.step()`` for the micro-batches of one optimizer step. Collective.

    Every target of the step, on whichever rank and in whichever micro-batch, has the same weight. The gradient memory
    of a rank is what its ZeRO stage promises. Costs one reduction per chunk instead of one per micro-batch.

    Args:
        engine: a DeepSpeed engine whose model is switched on.
        batches: as many micro-batches as the engine's ``gradient_accumulation_steps``; one may be passed bare.
            Arguments of the model's forward by name, with ``labels`` or ``shift_labels``, on the engine's device.

    Returns:
        0-d fp32: mean loss over all targets of the step on all ranks; the same on each.

    Raises:
        ValueError: a number of micro-batches that is not the engine's, an engine that cannot add up gradients of
            several backwards, or a batch that a chunked step refuses.
        RuntimeError: another rank has refused its batch.
    """
    micro_batches = [batches] if isinstance(batches, Mapping) else list(batches)
    state = attachment_of(engine.module)
    _check_engine(engine, len(micro_batches))
    engine.module.train()
    num_targets = _sum_over_ranks(sum(count_targets(batch) for batch in micro_batches), engine.device)
    weight = -float(dist.get_world_size()) / max(int(num_targets), 1)  # the engine takes the mean over ranks
    total = torch.zeros((), device=engine.device)
    with _boundaries_by_hand(engine):
        for index, batch in enumerate(micro_batches):
            boundary = index + 1 == len(micro_batches)
            total += _micro_step(engine, state, dict(batch), weight, boundary=boundary)
            engine.step()
    return -_sum_over_ranks(total, engine.device) / num_targets.clamp(min=1)


def _micro_step(engine: Any, state: Attachment, batch: dict[str, Any], weight: float, *, boundary: bool) -> Tensor:
    """Both sweeps over one micro-batch; returns the sum of its log-probabilities."""
    reduces_per_pass = engine.zero_optimization_partition_gradients()
    with torch.enable_grad():
        stream, num_passes = agreed_stream(state, batch, collective=reduces_per_pass)
        recurrence = build_recurrence(
            state,
            batch,
            stream,
            max(1, num_passes),
            call=engine,
            keep_last_graph=state.config.keep_last_graph and not reduces_per_pass,
        )
        embeds_1TD = stream_embeds(batch, stream)
        log_probs_N = recurrence.forward_sweep(embeds_1TD, train=True)
        recurrence.refuse_changes()
        gradients = EngineGradients(engine, boundary=boundary)
        recurrence.backward_sweep(torch.full_like(log_probs_N, weight), gradients, embeds_1TD)
    return log_probs_N.sum()


@contextmanager
def _boundaries_by_hand(engine: Any) -> Iterator[None]:
    """Inside, each pass says whether it completes a step; afterwards the engine counts micro-steps again."""
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(None)


def _check_engine(engine: Any, num_batches: int) -> None:
    accumulation = engine.gradient_accumulation_steps()
    if num_batches != accumulation:
        raise ValueError(
            "step() takes the micro-batches of one whole optimizer step.\n"
            f"  Got {num_batches}; gradient_accumulation_steps is {accumulation}.\n"
            f"  Pass a list of {accumulation} batches."
        )
    if not engine.managed_gradient_accumulation():
        raise ValueError(
            "step() needs DeepSpeed's own gradient accumulation.\n"
            "  Got managed_gradient_accumulation=false.\n  Remove it from the DeepSpeed config."
        )
    model_dtype, sum_dtype = engine.get_data_types()
    if torch.finfo(sum_dtype).bits < 32:
        raise ValueError(
            "Gradients of many chunks would be added up in low precision.\n"
            f"  The model is {model_dtype}, sums are {sum_dtype}; over 128 chunks that costs 1 % of the gradient.\n"
            '  Set "data_types": {"grad_accum_dtype": "fp32"} in the DeepSpeed config.'
        )


def _sum_over_ranks(value: int | Tensor, device: torch.device) -> Tensor:
    total = torch.as_tensor(value, device=device).clone()
    dist.all_reduce(total)
    return total
