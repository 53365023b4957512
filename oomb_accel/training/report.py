"""What a run says about itself: before, after each step, at the end."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch

import oomb_accel
from oomb_accel.integrations.support import whole_numel
from oomb_accel.plan.sizes import size_text
from oomb_accel.progress import GIB
from oomb_accel.training.launch import strategy, zero_stage
from oomb_accel.training.run import Run


def measure_memory(run: Run) -> None:
    """Take a sample behind the update of a step, and update the peaks in the summary."""
    if run.memory is not None:
        run.memory.updated()
    keep_peaks(run)


def keep_peaks(run: Run) -> None:
    """Update the peaks in the summary."""
    summary = run.summary
    summary.peak_host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    peak = torch.cuda.max_memory_allocated(run.accelerator.device) if run.accelerator.device.type == "cuda" else 0
    if run.memory is not None:
        summary.memory_peaks = run.memory.peaks_as_dict()
        if "allocated" in run.memory.peaks:  # torch's own figure starts anew at every chunk
            peak = max(peak, run.memory.peaks["allocated"].num_bytes)
    if run.accelerator.device.type == "cuda":
        summary.peak_gpu_gib = peak / GIB


def header(run: Run) -> str:
    """What is about to run."""
    lengths, ranks = run.sampler.lengths, run.accelerator.num_processes
    documents = "1 document" if len(lengths) == 1 else f"{len(lengths)} documents"
    model = run.bare_model
    lines = [
        oomb_accel.banner(model) if run.recipe.oomb.enabled else _off(model),
        f"device {run.accelerator.device}, weights {next(model.parameters()).dtype}, "
        f"mixed precision {run.accelerator.mixed_precision}",
        f"data: {documents}, {sum(lengths):,} tokens, longest {max(lengths):,}",
        *(f"  {note}" for note in run.corpus.notes),
        f"steps: {run.num_steps} of {run.recipe.per_device_train_batch_size} x "
        f"{run.recipe.gradient_accumulation_steps} documents on {ranks} device(s)",
    ]
    in_bf16 = next(model.parameters()).dtype == torch.bfloat16 and zero_stage(run.accelerator) is None
    if in_bf16 and run.accelerator.device.type == "cpu":
        lines.append("hint: a CPU without bf16 units is very slow at this; torch_dtype: float32 is faster there")
    if ranks > 1:
        lines.append(
            f"ranks: {ranks}, {strategy(run.accelerator)}; documents of like length side by side, "
            f"{run.sampler.waiting(0):.1%} of the time is waiting for longer ones"
        )
        if not run.recipe.save_steps:
            lines.append("warning: save_steps is 0, so nothing is kept if the run stops early; set save_steps, e.g. 20")
    if run.folder.resume is not None:
        lines.append(f"goes on from {run.folder.resume}, behind step {run.summary.steps}")
    elif run.recipe.resume_from_checkpoint is not None:
        lines.append(f"there is no checkpoint in {run.folder.path} yet: begins with step 1")
    if not sys.stderr.isatty() and run.recipe.oomb.progress == "auto":
        lines.append("no progress inside a step, as this is no terminal; --oomb.progress true shows it")
    return "\n".join(lines)


def step_line(row: dict[str, Any], num_steps: int) -> str:
    gpu = "" if row["peak_gpu_gib"] is None else f" | GPU peak {size_text(round(row['peak_gpu_gib'] * GIB))}"
    mfu = "" if row.get("mfu") is None else f" | {row['mfu']:.1%} MFU"
    return (
        f"step {row['step']}/{num_steps} | loss {row['loss']:.4f} | lr {row['learning_rate']:.2e} | "
        f"grad norm {row['grad_norm']:.3f} | {row['tokens_per_second']:,.0f} tok/s{mfu} | "
        f"{row['trained_tokens']:,} trained tokens | {row['seconds']:.1f} s{gpu}"
    )


def already_done(run: Run) -> str:
    """Why nothing is trained, and what to change if something should be."""
    go_on = f"set more steps to go on from {run.folder.resume}, or " if run.folder.resume else ""
    return (
        f"the run in {run.folder.path} is done: {run.summary.steps} of {run.num_steps} steps, and its result is there\n"
        f"  to train again, {go_on}set --overwrite_output_dir and leave resume_from_checkpoint out"
    )


def closing(run: Run) -> str:
    """The summary in words, and how to load the result."""
    summary, recipe = run.summary, run.recipe
    folder = json.dumps(str(run.folder.path))
    lines = [
        f"done: {summary.steps} steps, {summary.tokens:,} tokens ({summary.trained_tokens:,} trained) in "
        f"{summary.seconds:.1f} s, {summary.tokens_per_second:,.0f} tok/s",
        f"loss: {summary.first_loss:.4f} -> {summary.last_loss:.4f}",
    ]
    if summary.last_tokens_loss_before is not None and summary.last_tokens_loss_after is not None:
        lines.append(
            f"loss on the last {recipe.eval_last_tokens} tokens: "
            f"{summary.last_tokens_loss_before:.4f} -> {summary.last_tokens_loss_after:.4f}"
        )
    gpu = "" if summary.peak_gpu_gib is None else f"GPU {size_text(round(summary.peak_gpu_gib * GIB))}, "
    lines.append(f"peak memory: {gpu}host {summary.peak_host_gib:.2f} GiB since the start, loading included")
    if run.memory is not None:
        lines += [f"  {row}" for row in run.memory.table().splitlines()]
    if run.accelerator.num_processes > 1:
        lines.append(f"waiting for longer documents on other devices: {summary.waiting:.1%} of the time")
    if recipe.lora_r == 0:
        lines.append(f"model: AutoModelForCausalLM.from_pretrained({folder})")
    else:
        base = json.dumps(recipe.model_name_or_path)
        dtype = next(p.dtype for p in run.model.parameters() if not p.requires_grad)
        load = f"AutoModelForCausalLM.from_pretrained({base}, dtype={dtype})"
        lines.append(f"adapter: PeftModel.from_pretrained({load}, {folder})")
        if recipe.rope_parameters is not None:
            lines.append("  load the base with the same rope_parameters as in this recipe")
    return "\n".join(lines)


def _off(model: Any) -> str:
    sizes = [(whole_numel(p), p.requires_grad) for p in model.parameters()]
    trained, total = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
    return f"oomb_accel off (oomb.enabled: false), {trained:,} of {total:,} parameters trainable"
