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

from oomb_accel.integrations.agreement import agree_on_passes, num_ranks, refusing_together
from oomb_accel.integrations.attachment import Attachment, attachment_of
from oomb_accel.integrations.auto import choose_settings
from oomb_accel.integrations.engine import check_setup
from oomb_accel.integrations.float8_checks import prepare_float8_base
from oomb_accel.integrations.step import build_recurrence, checked_stream, stream_embeds
from oomb_accel.integrations.stream import Stream
from oomb_accel.integrations.transformers import announce
from oomb_accel.integrations.versions import check_versions


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

    def add(self, log_probs_N: Tensor, grad_N: Tensor, embeds_1TD: Tensor | None, *, last: bool) -> Tensor | None:
        self._engine.set_gradient_accumulation_boundary(last and self._boundary)
        self._engine.backward((log_probs_N * grad_N).sum(), scale_wrt_gas=False)
        return None

    def results(self) -> list[Tensor | None]:
        return []


def step(engine: Any, batches: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Tensor:
    """Forward, backward and ``engine.step()`` for the micro-batches of one optimizer step. Collective.

    Every target of the step, on whichever rank and in whichever micro-batch, has the same weight. The gradient memory
    of a rank is what its ZeRO stage promises. Costs one reduction per chunk instead of one per micro-batch.

    Args:
        engine: a DeepSpeed engine in training mode, whose model is switched on.
        batches: as many micro-batches as the engine's ``gradient_accumulation_steps``; one may be passed bare.
            Arguments of the model's forward by name, with ``labels`` or ``shift_labels``, on the engine's device.

    Returns:
        0-d fp32: mean loss over all targets of the step on all ranks; the same on each.

    Raises:
        ValueError: a number of micro-batches that is not the engine's, an engine that cannot add up gradients of
            several backwards, or a batch that a chunked step refuses. Nothing has been accumulated then.
        RuntimeError: another rank has refused its batch.
    """
    state = attachment_of(engine.module)
    with refusing_together(engine.device):
        micro_batches = [dict(batches)] if isinstance(batches, Mapping) else [dict(batch) for batch in batches]
        _check_engine(engine, len(micro_batches))
        prepare_float8_base(state)
        for batch in micro_batches:
            _check_batch(batch)
    with torch.enable_grad():  # whatever the caller's mode is, this is training
        choose_settings(state, *micro_batches)
        with refusing_together(engine.device):
            streams = [checked_stream(state, batch) for batch in micro_batches]
    agree_on_passes(0, engine.device)  # nobody has refused
    num_targets = _sum_over_ranks(sum(stream.num_targets for stream in streams), engine.device)
    weight = -float(num_ranks()) / max(int(num_targets), 1)  # the engine takes the mean over ranks
    total = torch.zeros((), device=engine.device)
    with _boundaries_by_hand(engine):
        for index, (batch, stream) in enumerate(zip(micro_batches, streams, strict=True)):
            boundary = index + 1 == len(micro_batches)
            total += _micro_step(engine, state, batch, stream, weight, boundary=boundary)
            engine.step()
    announce(state)
    return -_sum_over_ranks(total, engine.device) / num_targets.clamp(min=1)


def _micro_step(
    engine: Any, state: Attachment, batch: dict[str, Any], stream: Stream, weight: float, *, boundary: bool
) -> Tensor:
    """Both sweeps over one micro-batch; returns the sum of its log-probabilities."""
    reduces_per_pass = engine.zero_optimization_partition_gradients()
    num_passes = len(stream.schedule.chunks)
    if reduces_per_pass:
        num_passes = agree_on_passes(num_passes, engine.device)
    with torch.enable_grad():
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
    check_versions("deepspeed")
    check_setup(engine.config, engine.module)
    accumulation = engine.gradient_accumulation_steps()
    if num_batches != accumulation:
        raise ValueError(
            "step() takes the micro-batches of one whole optimizer step.\n"
            f"  Got {num_batches}; gradient_accumulation_steps is {accumulation}.\n"
            f"  Pass a list of {accumulation} batches."
        )
    if not engine.module.training:
        raise ValueError(
            "step() trains, and the model is in evaluation mode.\n  Got engine.training=False.\n"
            "  Call engine.train() first; for an evaluation call engine(**batch) under torch.no_grad()."
        )
    if not engine.managed_gradient_accumulation():
        raise ValueError(
            "step() needs DeepSpeed's own gradient accumulation.\n"
            "  Got managed_gradient_accumulation=false.\n  Remove it from the DeepSpeed config."
        )
    hooked = [name for name, p in engine.module.named_parameters() if p._backward_hooks]
    if hooked:
        raise ValueError(
            "step() reduces each chunk's gradients at once, so gradient hooks would see parts, not sums.\n"
            f"  Got hooks on {', '.join(hooked[:3])}{' and others' if len(hooked) > 3 else ''}.\n"
            "  Remove them, or use engine.backward on the loss."
        )
    _check_sums(engine)


def _check_sums(engine: Any) -> None:
    model_dtype, sum_dtype = engine.get_data_types()
    if torch.finfo(sum_dtype).bits >= 32:
        return
    remedy = 'Set "data_types": {"grad_accum_dtype": "fp32"} in the DeepSpeed config.'
    if engine.zero_optimization_stage() == 0:
        remedy = 'Set "zero_optimization": {"stage": 1} or higher, and "data_types": {"grad_accum_dtype": "fp32"}.'
    raise ValueError(
        "Gradients of many chunks would be added up in low precision.\n"
        f"  The model is {model_dtype}, sums are {sum_dtype}; over 128 chunks that costs 1 % of the gradient.\n"
        f"  {remedy}"
    )


def _check_batch(batch: Mapping[str, Any]) -> None:
    for name in ("num_targets", "num_items_in_batch"):
        if batch.get(name) is not None:
            raise ValueError(
                f"step() counts the targets of the step itself, and the batch has {name}.\n  Got {batch[name]}.\n"
                f"  Remove {name} from the batch."
            )
    embeds = batch.get("inputs_embeds")
    if embeds is not None and embeds.requires_grad:
        raise ValueError(
            "step() runs the backward itself, so what made inputs_embeds would get no gradient.\n"
            f"  Got inputs_embeds of shape {tuple(embeds.shape)} that require one.\n"
            "  Pass input_ids or inputs_embeds.detach(), or use engine.backward on the loss."
        )


def _sum_over_ranks(value: int | Tensor, device: torch.device) -> Tensor:
    total = torch.as_tensor(value, device=device).clone()
    if num_ranks() > 1:
        dist.all_reduce(total)
    return total
