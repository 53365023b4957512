"""Whole steps with all pages on the device, and with so few that most have to move, in one run.

    python -m benchmarks.run offload --lengths 262144 --timed 1 --sides offload-sparse-16 offload-sparse-16-budget-128

The small pool has a seventh of the pages and of their gradients. Random weights select random pages, which is the worst
case. Host memory is made before a step, and waited for: how long that takes is said beside the step, not counted in it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import oomb_accel
from benchmarks.floor import floor_seconds
from benchmarks.making import timed_making
from benchmarks.registry import GIB, Row, benchmark
from oomb_accel import OombConfig
from oomb_accel.bench.models import SHAPES, lora_model
from oomb_accel.bench.step import training_step
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.liger import use_liger
from oomb_accel.integrations.support import base_model_of
from oomb_accel.plan.shape import ModelShape, shape_of
from oomb_accel.plan.sizes import record_bytes
from oomb_accel.progress import host_bytes

SIDES: dict[str, dict[str, Any]] = {
    "offload-dense": {},
    "offload-dense-kept": {"keep_outputs": "auto"},
    **{f"offload-sparse-{top_k}": {"attention": "sparse", "top_k": top_k} for top_k in (16, 64)},
    **{
        f"offload-sparse-{top_k}-budget-{8 * top_k}": {"attention": "sparse", "top_k": top_k, "page_budget": 8 * top_k}
        for top_k in (16, 64)
    },
}
POOL_SHARE = 1 / 7


@benchmark("offload", SIDES, default_sides=("offload-dense", "offload-sparse-16"), default_lengths=(65536, 131072))
def offload(
    *, shape: str, lengths: list[int], sides: list[str], chunk_tokens: int, timed: int, device: torch.device
) -> Iterator[Row]:
    """Two rows per length and side: resident, and with the small pool."""
    model = lora_model(shape, device)
    liger = use_liger(model, device, fused_loss=True) is None
    sizes = shape_of(SHAPES[shape], shape)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)  # the same step again
    vocab = base_model_of(model).config.vocab_size
    for tokens in lengths:
        ids = torch.randint(0, vocab, (1, tokens), device=device, generator=torch.Generator(device).manual_seed(tokens))
        for side in sides:
            resident: Row | None = None
            for pool_gib in (None, POOL_SHARE * page_bytes(sizes, tokens) / GIB):
                config = config_of(side, chunk_tokens, pool_gib)
                row = Row("offload", side, tokens, note="" if liger else "without liger")
                row.floor_seconds = floor_seconds(sizes, tokens, config)
                row.details = {"shape": shape, "chunk_tokens": chunk_tokens, "timed_steps": timed}
                row.details["device_pages_gib"] = "all" if pool_gib is None else round(pool_gib, 6)
                oomb_accel.enable(model, config)
                try:
                    _measure(model, optimizer, ids, row, timed)
                except (torch.OutOfMemoryError, ValueError) as error:
                    row.note = str(error).splitlines()[0]
                finally:
                    oomb_accel.disable(model)
                    optimizer.zero_grad(set_to_none=True)
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                if resident is None:
                    resident = row
                elif row.seconds == row.seconds:  # it ran
                    row.details["against_resident"] = row.seconds / resident.seconds
                    row.details["same_loss"] = row.details["loss"] == resident.details.get("loss")
                    row.note = f"{row.details['against_resident']:.3f}x resident {row.note}".strip()
                yield row


def config_of(side: str, chunk_tokens: int, pool_gib: float | None) -> OombConfig:
    """Settings of a side of `SIDES`; None where all pages stay on the device."""
    pool: dict[str, Any] = {"offload": False} if pool_gib is None else {"device_pages_gib": pool_gib}
    common: dict[str, Any] = {"keep_outputs": False, "page_grad_dtype": "bfloat16", "progress": False}
    return OombConfig(chunk_tokens=chunk_tokens, **common | SIDES[side], **pool)


def page_bytes(shape: ModelShape, tokens: int) -> int:
    """K and V of so many tokens in all layers, in 16 bits, and gradients as large."""
    return 2 * shape.num_layers * shape.num_kv_heads * record_bytes(tokens, shape.head_dim, "bfloat16")


def _measure(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, row: Row, timed: int) -> None:
    on_gpu, spent = ids.device.type == "cuda", attachment_of(model).offload
    warm_up = min(ids.shape[1], 5 * row.details["chunk_tokens"])  # pages are selected and move from about there on
    training_step(model, optimizer, ids[:, :warm_up])
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    copied, waited, seconds, making = spent.copied_bytes(), spent.waited_seconds(), [], []
    for _ in range(timed):
        with timed_making() as made:
            start = time.perf_counter()
            row.details["loss"] = training_step(model, optimizer, ids)
            seconds.append(time.perf_counter() - start - made.seconds)
        making.append(made.seconds)
    row.seconds = statistics.median(seconds)
    now = spent.copied_bytes()
    row.details |= {
        "all_seconds": seconds,
        "host_memory_made_in": [round(one, 2) for one in making],
        "copied_gib": {way: round((now[way] - copied[way]) / timed / GIB, 1) for way in now},
        "waited_seconds": round((spent.waited_seconds() - waited) / timed, 2),
        "host_gib": round(host_bytes() / GIB, 1),
    }
    if on_gpu:
        row.peak_gib = torch.cuda.max_memory_allocated() / GIB
