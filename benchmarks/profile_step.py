"""Where the time of a step goes: kernels by group, and the share of the step in which the device was busy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.autograd import DeviceType

from benchmarks.registry import Row, benchmark
from benchmarks.whole_step import switch_on
from oomb_accel.bench.models import lora_model, use_liger
from oomb_accel.bench.step import training_step
from oomb_accel.integrations.support import base_model_of

GROUPS = {
    "selected pages": ("page_forward", "page_owner", "page_dq", "page_reduce", "row_stats"),
    "selection": ("index_mark", "index_gather", "index_unit", "mass_kernel", "partial_lse", "top_pages"),
    "attention": ("cudnn", "flash", "fmha", "sdpa"),
    "gemm": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    "pages": ("store_pages", "load_pages", "accumulate", "merge", "page"),
    "loss": ("log_prob", "token_"),
    "norm/rope/activation": ("rms", "rope", "swiglu"),
    "copy/cast": ("copy", "memcpy", "memset", "cat"),
}


@benchmark("profile_step")
def profile_step(
    *, shape: str, lengths: list[int], sides: list[str], chunk_tokens: int, timed: int, device: torch.device
) -> Iterator[Row]:
    """One row per length and side; ``details`` holds milliseconds per group and the busy share."""
    model = lora_model(shape, device)
    use_liger(model, fused_loss=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    vocab = base_model_of(model).config.vocab_size
    for tokens in lengths:
        ids = torch.randint(0, vocab, (1, tokens), device=device)
        for side in sides:
            undo = switch_on(model, side, chunk_tokens)
            training_step(model, optimizer, ids)
            row = Row("profile_step", side, tokens)
            start = time.perf_counter()
            training_step(model, optimizer, ids)
            row.seconds = time.perf_counter() - start
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                training_step(model, optimizer, ids)
            kernels = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
            groups: dict[str, float] = defaultdict(float)
            names: dict[str, float] = defaultdict(float)
            for event in kernels:
                milliseconds = (event.time_range.end - event.time_range.start) / 1e3
                groups[_group(event.name)] += milliseconds
                names[event.name[:90]] += milliseconds
            busy = sum(groups.values()) / 1e3
            row.note = f"device busy {busy / row.seconds:.1%}"
            row.details = {
                "groups_ms": {k: round(v, 1) for k, v in sorted(groups.items(), key=lambda kv: -kv[1])},
                "top_ms": dict(sorted(((k, round(v, 1)) for k, v in names.items()), key=lambda kv: -kv[1])[:25]),
            }
            undo()
            yield row


def _group(name: str) -> str:
    low = name.lower()
    return next((group for group, words in GROUPS.items() if any(word in low for word in words)), "elementwise/other")
