"""Whole training step against plain transformers, LoRA under bf16 autocast, batch 1, both sides in one run.

The peer is what users run today: transformers with Liger (norm, RoPE, SwiGLU, fused loss) and gradient
checkpointing, optionally with the checkpoints offloaded to host memory.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

import oomb_accel
from benchmarks.floor import floor_seconds, peer_config
from benchmarks.making import timed_making
from benchmarks.registry import GIB, Row, benchmark
from oomb_accel import OombConfig
from oomb_accel.bench.models import SHAPES, lora_model
from oomb_accel.bench.step import training_step
from oomb_accel.host import host_limits
from oomb_accel.integrations.attachment import STATE
from oomb_accel.integrations.liger import use_liger
from oomb_accel.integrations.support import base_model_of
from oomb_accel.plan.shape import shape_of

_MOST_HOST_GIB = host_limits().available_bytes * 7 / 8 / GIB
"""For kept outputs where they may have most of the host's memory."""

SIDES: dict[str, dict[str, Any]] = {
    "oomb": dict(keep_outputs="auto"),
    "oomb-device": dict(offload=False),
    "oomb-no-kept": dict(keep_outputs=False),
    "oomb-bf16-grads": dict(keep_outputs="auto", page_grad_dtype="bfloat16"),
    "oomb-bf16-grads-no-kept": dict(keep_outputs=False, page_grad_dtype="bfloat16"),
    **{
        f"oomb-sparse-{top_k}{base}{suffix}": dict(
            attention="sparse", top_k=top_k, page_grad_dtype="bfloat16", base_dtype=base[1:] or "model", **settings
        )
        for top_k in (16, 32, 64)
        for base in ("", "-float8")
        for suffix, settings in (
            ("", dict(keep_outputs="auto")),
            ("-no-kept", dict(keep_outputs=False)),
            ("-device", dict(offload=False)),
            ("-host", dict(host_memory_gib=_MOST_HOST_GIB)),
        )
    },
    "peer": {},
    "peer-offload": {},
    "peer-offload-no-autocast": {},
}


@benchmark("whole_step", SIDES, default_sides=("oomb", "oomb-no-kept", "peer"), default_lengths=(8192, 32768))
def whole_step(
    *, shape: str, lengths: list[int], sides: list[str], chunk_tokens: int, timed: int, device: torch.device
) -> Iterator[Row]:
    """One row per length and side."""
    model = lora_model(shape, device)
    liger = use_liger(model, device, fused_loss=True) is None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    vocab = base_model_of(model).config.vocab_size
    for tokens in lengths:
        ids = torch.randint(0, vocab, (1, tokens), device=device, generator=torch.Generator(device).manual_seed(tokens))
        for side in sides:
            row = Row("whole_step", side, tokens, note="" if liger else "without liger")
            config = config_of(side, tokens, chunk_tokens)
            row.floor_seconds = floor_seconds(shape_of(SHAPES[shape], shape), tokens, config)
            row.details = {"shape": shape, "chunk_tokens": chunk_tokens, "timed_steps": timed}
            undo = switch_on(model, side, chunk_tokens)
            try:
                _measure(model, optimizer, ids, row, chunk_tokens, timed, "no-autocast" not in side)
            except torch.OutOfMemoryError:
                row.note = "out of memory"
            finally:
                undo()
                optimizer.zero_grad(set_to_none=True)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            yield row


def config_of(side: str, tokens: int, chunk_tokens: int) -> OombConfig:
    """Settings whose arithmetic a side has."""
    if not side.startswith("oomb"):
        return peer_config(tokens)
    return OombConfig(chunk_tokens=chunk_tokens, progress=False, **SIDES[side])


def switch_on(model: PeftModel, side: str, chunk_tokens: int) -> Callable[[], None]:
    """Prepare the model for a side of `SIDES`; returns what undoes it."""
    if side.startswith("oomb"):
        oomb_accel.enable(model, OombConfig(chunk_tokens=chunk_tokens, progress=False, **SIDES[side]))
        return lambda: oomb_accel.disable(model)
    options = {"use_reentrant": False} | ({"offload": True} if "offload" in side else {})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.enable_input_require_grads()

    def undo() -> None:
        model.gradient_checkpointing_disable()
        base_model_of(model).disable_input_require_grads()

    return undo


def _measure(
    model: PeftModel,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    row: Row,
    chunk_tokens: int,
    timed: int,
    autocast: bool,
) -> None:
    on_gpu = ids.device.type == "cuda"
    training_step(model, optimizer, ids[:, : 2 * chunk_tokens], autocast=autocast)  # warm-up: compiles, plans
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    seconds, copied, making = list[float](), list[dict[str, float]](), list[float]()
    state = getattr(model, STATE, None)
    for _ in range(timed):
        before = {} if state is None else state.offload.copied_bytes()
        with timed_making() as made:
            start = time.perf_counter()
            row.details["loss"] = training_step(model, optimizer, ids, autocast=autocast)
            seconds.append(time.perf_counter() - start - made.seconds)
        making.append(made.seconds)
        if state is not None:
            now = state.offload.copied_bytes()
            copied.append({way: round((size - before[way]) / GIB, 1) for way, size in now.items()})
    row.seconds = statistics.median(seconds)
    row.details["all_seconds"] = seconds
    if state is not None:
        row.details["copied_gib"] = copied
        row.details["host_memory_made_in"] = [round(one, 2) for one in making]
        row.details["waited_seconds"] = round(state.offload.waited_seconds(), 2)
        row.details["host_gib"] = round(state.offload.host_bytes()["page_memory"] / GIB, 1)
    if on_gpu:
        row.peak_gib = torch.cuda.max_memory_allocated() / GIB
