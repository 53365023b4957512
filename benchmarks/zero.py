"""Whole steps under DeepSpeed's ZeRO stages and plain, on one or several GPUs, in one run.

One GPU:      python -m benchmarks.run zero --sides plain zero2 --lengths 65536
Several GPUs: torchrun --nproc_per_node 2 -m benchmarks.run zero --sides plain zero2 --lengths 131072

``plain`` is no DeepSpeed (DDP on several GPUs). ``-offload`` keeps optimizer states on the host, ``-full`` trains all
weights, ``-step`` reduces gradients per chunk (`oomb_accel.deepspeed.step`), ``-unequal`` gives every other rank an
eighth of the tokens, ``-sparse`` attends to 16 selected pages, with bf16 page gradients, ``-divided`` makes a model
in parts that no GPU has room for (its weights are torch's own then, not the model's, so losses differ). ``-alst`` is
DeepSpeed's own way of dividing one document over all ranks, ``-alst-host`` the same with checkpoints in host memory
(`sequence_parallel`). Lengths are those of a document: each rank has one, but for the last two. Give each ZeRO 3 side
a process of its own where memory matters: DeepSpeed keeps a part of an engine's memory after its end.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

import oomb_accel
from benchmarks import sequence_parallel
from benchmarks.floor import floor_seconds, peer_config
from benchmarks.registry import GIB, Row, benchmark
from oomb_accel import OombConfig
from oomb_accel.bench.models import SHAPES, base_model, with_lora
from oomb_accel.integrations.agreement import num_ranks
from oomb_accel.integrations.liger import use_liger
from oomb_accel.integrations.support import base_model_of
from oomb_accel.plan.shape import shape_of

SIDES = (
    *("plain", "zero1", "zero2", "zero3", "zero1-offload", "zero2-offload", "zero3-offload"),
    *("plain-full", "zero1-full", "zero2-full", "zero3-full", "zero2-full-offload", "zero3-full-offload"),
    *("zero2-full-step", "zero3-full-step", "zero3-full-offload-step"),
    *("plain-unequal", "zero2-unequal", "zero3-unequal"),
    *("plain-sparse", "zero2-sparse", "zero3-sparse", "zero2-full-sparse", "zero3-full-sparse"),
    *("plain-sparse-unequal", "zero2-sparse-unequal", "zero3-sparse-unequal"),
    *("zero3-divided", "zero3-sparse-divided"),
    *("zero2-alst", "zero3-alst", "zero2-alst-host", "zero3-alst-host"),
)
_COUNTED = ("all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter_tensor", "all_reduce", "broadcast")

Step = Callable[[Tensor], float]
"""One optimizer step on a document ``[1, tokens]``; returns the loss."""


@benchmark("zero", SIDES, default_sides=("plain", "zero2"), default_lengths=(65536,))
def zero(
    *, shape: str, lengths: list[int], sides: list[str], chunk_tokens: int, timed: int, device: torch.device
) -> Iterator[Row]:
    """One row per side and length, from the first rank."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device.type, rank) if device.type == "cuda" else device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _start(device)
    for side in sides:
        model = _model(shape, side, device)
        use_liger(model, device, fused_loss=False)
        step, close = _prepare(model, side, chunk_tokens)
        vocab = base_model_of(model).config.vocab_size
        for tokens in lengths:
            own = tokens // 8 if "unequal" in side and rank % 2 else tokens
            together = num_ranks() if "alst" in side else 1
            seed = torch.Generator(device).manual_seed(rank // together)
            ids = torch.randint(0, vocab, (1, own), device=device, generator=seed)
            row = Row("zero", side, tokens // together)
            sizes = shape_of(SHAPES[shape], shape)
            settings = _settings(side, chunk_tokens) if together == 1 else peer_config(tokens)
            row.floor_seconds = floor_seconds(sizes, tokens, settings, trains_all="full" in side) / together
            row.details = {"shape": shape, "chunk_tokens": chunk_tokens, "ranks": num_ranks(), "timed_steps": timed}
            _measure(step, ids, row, timed, min(own, 2 * chunk_tokens))
            if rank == 0:
                yield row
        close()
        del model, step, close
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def _start(device: torch.device) -> None:
    import deepspeed

    from oomb_accel.integrations.engine import keep_shared_memory_clean

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    keep_shared_memory_clean()
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")


def _model(shape: str, side: str, device: torch.device) -> nn.Module:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=_config(side)) if "divided" in side else nullcontext():
        base = base_model(shape, device)
    return base if "full" in side else with_lora(base)


def _settings(side: str, chunk_tokens: int) -> OombConfig:
    sparse: dict[str, Any] = {"attention": "sparse", "top_k": 16, "page_grad_dtype": "bfloat16", "keep_outputs": False}
    return OombConfig(chunk_tokens=chunk_tokens, progress=False, **(sparse if "sparse" in side else {}))


def _prepare(model: nn.Module, side: str, chunk_tokens: int) -> tuple[Step, Callable[[], None]]:
    """The step of a side, and what takes it down again."""
    settings = _settings(side, chunk_tokens)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    if side.startswith("plain"):
        oomb_accel.enable(model, settings)
        return _plain_step(model, optimizer), lambda: oomb_accel.disable(model)
    if "alst" in side:
        return _peer(model, optimizer, side)
    engine, *_ = oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer, config=_config(side), oomb=settings)

    def step(ids: Tensor) -> float:
        if side.endswith("step"):
            return float(oomb_accel.deepspeed.step(engine, {"input_ids": ids, "labels": ids}))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, engine.destroy


def _peer(model: Any, optimizer: torch.optim.Optimizer, side: str) -> tuple[Step, Callable[[], None]]:
    import deepspeed

    stack = ExitStack()
    groups = stack.enter_context(sequence_parallel.divided(model, offload=side.endswith("host")))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(side), mpu=groups)
    stack.callback(engine.destroy)
    return sequence_parallel.step_of(engine), stack.close


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    parallel = nn.parallel.DistributedDataParallel(model) if num_ranks() > 1 else model

    def step(ids: Tensor) -> float:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = parallel(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _config(side: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"stage": int(side[4])}
    if "offload" in side:
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": settings,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if side.endswith("step"):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _measure(step: Step, ids: Tensor, row: Row, timed: int, warm_up_tokens: int) -> None:
    on_gpu = ids.device.type == "cuda"
    try:
        step(ids[:, :warm_up_tokens])  # compiles, plans, makes optimizer states
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            row.details["before_gib"] = round(torch.cuda.memory_allocated() / GIB, 2)
        seconds = []
        with _counted() as calls:
            for _ in range(timed):
                dist.barrier()
                start = time.perf_counter()
                row.details["loss"] = round(step(ids), 4)
                if on_gpu:
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
        row.seconds = statistics.median(seconds)
        row.details["collectives_per_step"] = {name: round(count / timed, 1) for name, count in calls.items()}
        row.details["host_gib"] = round(psutil.Process().memory_info().rss / GIB, 1)
        if on_gpu:
            row.peak_gib = torch.cuda.max_memory_allocated() / GIB
    except torch.OutOfMemoryError:
        row.note = "out of memory"


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count DeepSpeed's collectives."""
    import deepspeed.comm.comm as comm

    calls: Counter[str] = Counter()
    backend, names = comm.cdb, [name for name in _COUNTED if hasattr(comm.cdb, name)]
    plain = {name: getattr(backend, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return plain[name](*args, **kwargs)

        return call

    for name in names:
        setattr(backend, name, counting(name))
    try:
        yield calls
    finally:
        for name in names:
            setattr(backend, name, plain[name])
