"""The settings that are "auto" and decide how a step is cut and stored: chosen once, at the first training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from oomb_accel.host import host_limits
from oomb_accel.integrations.agreement import (
    agree_on_least,
    is_partitioned,
    num_ranks,
    ranks_on_host,
    refusing_together,
)
from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.banner import say
from oomb_accel.integrations.support import compute_dtype, gathered_bytes, whole_numel
from oomb_accel.keep import free_bytes
from oomb_accel.plan import Choice, Found, Job, ModelShape, choose, settings_of
from oomb_accel.plan.gpus import H200
from oomb_accel.plan.limits import host_share
from oomb_accel.plan.sizes import DTYPE_BYTES, GIB

_AUTO = ("chunk_tokens", "page_grad_dtype")


def choose_settings(state: Attachment, *batches: Mapping[str, Any]) -> None:
    """Choose what is "auto", unless that is done. Evaluation chooses nothing. Collective where several ranks train, all
    of which come here with their first batches: they take the smallest chunk that one of them has chosen. One that
    cannot choose is no loss to the others: all of them raise.

    Args:
        batches: of the step.

    Raises:
        ValueError: the model's config does not say how large it is.
        RuntimeError: another rank has refused its batch.
    """
    auto = {name: getattr(state.config, name) == "auto" for name in _AUTO}
    if state.chosen is not None or not any(auto.values()) or not torch.is_grad_enabled():
        return
    device = next(state.model.parameters()).device
    with refusing_together(device):
        tokens = state.stream_tokens or max(map(_num_tokens, batches))
        choice = choose(_job(state, tokens, device), **auto)
    chunk, grad_bytes = agree_on_least(choice.chunk_tokens, DTYPE_BYTES[choice.page_grad_dtype], device)
    storage = choice.page_grad_dtype if grad_bytes == DTYPE_BYTES[choice.page_grad_dtype] else "bfloat16"
    agreed = Choice(chunk, storage, choice.reasons)
    if agreed != choice:
        decided = ", ".join(f"{name}={getattr(agreed, name)}" for name in _AUTO if auto[name])
        agreed = replace(agreed, reasons=(f"{decided}: the least of {num_ranks()} ranks",))
    state.chosen = agreed
    lines = [f"chosen     {reason}" for reason in agreed.reasons]
    state.notes.extend(lines)
    if state.announced:
        say(state, "\n".join(f"oomb_accel: {line}" for line in lines))


def _num_tokens(batch: Mapping[str, Any]) -> int:
    """Tokens of a batch without its padding; one of a batch that says nothing, which is refused later."""
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return max(1, int(mask.sum()))
    tokens = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    return max(1, tokens.shape[:2].numel()) if isinstance(tokens, torch.Tensor) else 1


def _job(state: Attachment, tokens: int, device: torch.device) -> Job:
    """The step as the planner sees it, with the memory that is free now."""
    config, model = state.config, _shape(state)
    trained = sum(whole_numel(p) for p in state.model.parameters() if p.requires_grad)
    total = sum(whole_numel(p) for p in state.model.parameters())
    return Job(
        model=model,
        tokens=tokens,
        # Whatever is trained counts as adapters of as many numbers.
        lora_r=0 if trained == total else max(1, round(trained / model.lora_parameters(1))),
        compute_dtype="float32" if compute_dtype(state.base, device).itemsize > 2 else "bfloat16",
        **settings_of(config),
        gpu=H200,  # chunks are compared with each other, not with a clock
        num_gpus=num_ranks(),
        zero_stage=3 if is_partitioned(state.model) else None,
        found=_found(state, device),
    )


def _shape(state: Attachment) -> ModelShape:
    try:
        return state.model_shape()
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f'"auto" cannot be chosen for this model.\n  {reason}\n'
            "  Set chunk_tokens=8192 and page_grad_dtype='float32' (the defaults), or other values."
        ) from None


def _found(state: Attachment, device: torch.device) -> Found:
    trained = [p for p in state.model.parameters() if p.requires_grad]
    moments = 0 if state.optimizer_stands else sum(2 * p.element_size() * whole_numel(p) for p in trained)
    limits, limit = host_limits(), state.config.host_memory_gib
    host = host_share(limits.available_bytes, limits.margin_bytes, ranks_on_host())
    return Found(
        device_bytes=free_bytes(device) - moments - gathered_bytes(state.model),
        host_bytes=host if limit == "auto" else min(host, int(limit * GIB)),
        graph_bytes_per_token=state.meter.bytes_per_token,
    )
