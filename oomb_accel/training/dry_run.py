"""What a recipe would do: its data, its steps, and what they would take. No weights are loaded, nothing is written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate.utils import DeepSpeedPlugin

from oomb_accel.config import OombConfig
from oomb_accel.host import host_budget, host_limits
from oomb_accel.integrations.agreement import ranks_on_host
from oomb_accel.integrations.rope import check_length
from oomb_accel.plan import (
    Estimate,
    Gpu,
    Job,
    Suggestion,
    check_base_dtype,
    check_settings,
    choose,
    dtypes_of,
    estimate,
    gpu_named,
    gpu_of_device,
    largest_tokens,
    read_shape,
    settings_of,
    suggestions,
)
from oomb_accel.plan.fit import CHUNKS
from oomb_accel.plan.gpus import H200
from oomb_accel.plan.limits import check_device_pages
from oomb_accel.plan.sizes import GIB
from oomb_accel.sampler import LengthBalancedSampler, Step, tokens_of
from oomb_accel.sources import gather, resolve
from oomb_accel.training.data import check_vocabulary, load_corpus
from oomb_accel.training.folder import RunFolder
from oomb_accel.training.identity import check_same_function
from oomb_accel.training.launch import asked_precision, deepspeed_plugin, launched_processes, on_gpu
from oomb_accel.training.model import load_config, load_tokenizer
from oomb_accel.training.progress_file import read_progress
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.trackers import check_trackers

HOST_BYTES = 128 * GIB
"""Assumed for a machine that is not this one."""
_LENGTHS = 24
"""Documents of at most so many lengths are estimated; between them the time is interpolated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the run is estimated for."""

    gpu: Gpu
    host_bytes: int
    num_gpus: int
    precision: str
    """``mixed_precision``; "auto" is bf16."""
    zero_stage: int | None
    """None without DeepSpeed."""
    zero_offload: bool
    on_gpu: bool
    """Whether the run is on a GPU; otherwise it is on this CPU, and only sizes and times are those of one."""
    note: str
    """Where this comes from, for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of the steps of a run."""

    estimate: Estimate
    """Of the longest stream."""
    longest: int | None
    """Tokens of the longest document that would fit; None where chunks are too short to look for it."""
    changes: list[Suggestion]
    reasons: tuple[str, ...]
    """For settings that are "auto"."""
    step_seconds: float
    """Of the mean step, all documents counted by their own lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """What a recipe would do."""

    recipe: Recipe
    machine: Machine
    lengths: list[int]
    """Tokens of each document."""
    num_targets: int
    """Of all documents."""
    notes: list[str]
    """About how data was read."""
    num_steps: int
    steps_done: int
    """By the checkpoint that the run would go on from."""
    steps_per_epoch: int
    documents_per_step: int
    step_tokens: list[int]
    """Of the steps of the first epoch, all devices together."""
    cost: Cost | None
    """None where chunk recurrence is off."""

    @property
    def steps_left(self) -> int:
        return self.num_steps - self.steps_done

    @property
    def seconds(self) -> float | None:
        """Of the steps that are left; None where there is no estimate, or the longest of them does not fit."""
        return None if self.cost is None or not self.fits else self.cost.step_seconds * self.steps_left

    @property
    def fits(self) -> bool:
        return self.cost is None or self.cost.estimate.fits

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; bytes and seconds."""
        plan: dict[str, Any] = {
            "fits": self.fits,
            "documents": len(self.lengths),
            "tokens": sum(self.lengths),
            "trained_tokens": self.num_targets,
            "shortest": min(self.lengths),
            "longest": max(self.lengths),
            "steps": self.num_steps,
            "steps_done": self.steps_done,
            "steps_per_epoch": self.steps_per_epoch,
            "documents_per_step": self.documents_per_step,
            "tokens_per_step": statistics.fmean(self.step_tokens),
            "gpus": self.machine.num_gpus,
            "seconds": self.seconds,
            "notes": [self.machine.note, *self.notes],
            "config": self.recipe.to_dict(),
        }
        if self.cost is not None:
            plan["chosen"] = list(self.cost.reasons)
            plan["largest_tokens"] = self.cost.longest
            plan["estimate"] = self.cost.estimate.as_dict()
            plan["suggestions"] = [{"change": s.change} | s.estimate.as_dict() for s in self.cost.changes]
        return plan


def plan_training(recipe: Recipe, *, gpu: str | None = None, num_gpus: int | None = None) -> TrainingPlan:
    """Read data and the model's config, and count.

    Args:
        gpu: name of the GPU to estimate for; this machine's, or an H200, if left out.
        num_gpus: those of the launch if left out.

    Raises:
        ValueError: whatever of recipe, data and model would be refused before weights are loaded.
    """
    check_trackers(recipe)
    folder = RunFolder(recipe, dry_run=True)
    ranks = num_gpus or launched_processes()
    plugin = deepspeed_plugin(recipe, ranks)
    precision = asked_precision(recipe, plugin)
    if precision == "auto" and gpu is None and not on_gpu():
        precision = "no"  # as the run on this CPU has it
    machine = find_machine(gpu, ranks, plugin, precision=precision)
    resolved = resolve(*gather(None if plugin is None else plugin.deepspeed_config, *recipe.oomb_sources()))
    recipe.oomb = resolved.config
    if recipe.oomb.enabled:
        check_base_dtype(recipe.oomb.base_dtype, lora_r=recipe.lora_r, zero_stage=machine.zero_stage)
    if folder.resume is not None:
        check_same_function(recipe, folder.resume, read_progress(folder.resume)["recipe"])
    config = load_config(recipe)
    job = _job(recipe, config, machine) if recipe.oomb.enabled else None
    if job is not None:
        check_settings(job)
        check_device_pages(job.device_pages_bytes, job.gpu.name, job.gpu.memory_bytes)
        if machine.on_gpu and gpu is None:
            _check_this_host(recipe.oomb, num_gpus)
    corpus = load_corpus(recipe, load_tokenizer(recipe))
    check_vocabulary(corpus.documents, config.get_text_config().vocab_size)
    lengths = corpus.documents.num_tokens()
    if recipe.oomb.enabled and recipe.oomb.beyond_trained_length == "error":
        check_length(config, corpus.documents.longest())
    sampler = LengthBalancedSampler(
        lengths,
        num_ranks=machine.num_gpus,
        batch_size=recipe.per_device_train_batch_size,
        accumulation=recipe.gradient_accumulation_steps,
        seed=recipe.seed,
    )
    steps = sampler.steps(0)
    num_steps = recipe.max_steps or sampler.steps_per_epoch * (recipe.num_train_epochs or 1)
    return TrainingPlan(
        recipe=recipe,
        machine=machine,
        lengths=lengths,
        num_targets=sum(corpus.documents.num_targets()),
        notes=[*corpus.notes, *_note_of(folder), *_note_of_gpus(job), *_note_of_host(job, recipe.oomb, num_gpus)],
        num_steps=num_steps,
        steps_done=min(num_steps, read_progress(folder.resume)["step"] if folder.resume is not None else 0),
        steps_per_epoch=sampler.steps_per_epoch,
        documents_per_step=sampler.documents_per_step,
        step_tokens=[tokens_of(step, lengths) for step in steps],
        cost=None if job is None else _cost(job, recipe.oomb, steps, lengths),
    )


def _note_of(folder: RunFolder) -> list[str]:
    """That a run would be refused for what is in its folder, on one line."""
    if folder.refusal is None:
        return []
    return [f"a run would be refused: {_on_a_line(folder.refusal)}"]


def _note_of_gpus(job: Job | None) -> list[str]:
    """That a GPU would refuse a run for which this CPU is enough."""
    if job is None or job.on_gpu:
        return []
    try:
        check_settings(replace(job, on_gpu=True, compute_dtype="bfloat16"))
    except ValueError as error:
        return [f"a run on a GPU would be refused: {_on_a_line(str(error))}"]
    return []


def _note_of_host(job: Job | None, oomb: OombConfig, num_gpus: int | None) -> list[str]:
    """That this machine would refuse a run which is estimated for another one, as it has no GPU."""
    if job is None or job.on_gpu:
        return []
    try:
        _check_this_host(oomb, num_gpus)
    except ValueError as error:
        return [f"a run on this machine would be refused: {_on_a_line(str(error))}"]
    return []


def _check_this_host(oomb: OombConfig, num_gpus: int | None) -> None:
    """Refuse host memory that this machine does not have, as the engine does.

    Args:
        num_gpus: those asked for; else those of the launch on this machine.

    Raises:
        ValueError: it is more.
    """
    host_budget(oomb.host_memory_gib, host_limits(), ranks_on_host=num_gpus or ranks_on_host())


def _on_a_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines())


def find_machine(gpu: str | None, num_gpus: int, plugin: DeepSpeedPlugin | None, *, precision: str) -> Machine:
    """The machine to estimate for, as the launch and this host say."""
    zero: dict[str, Any] | None = None if plugin is None else plugin.deepspeed_config["zero_optimization"]
    offload = zero is not None and (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    host = HOST_BYTES
    if gpu is not None:
        found, note = gpu_named(gpu), f"estimated for {num_gpus} x {gpu_named(gpu).name}, as asked for"
    elif on_gpu():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        known = gpu_of_device(properties.name)
        capability = (properties.major, properties.minor)
        found = known or replace(H200, name=properties.name)
        found = replace(found, memory_bytes=properties.total_memory, compute_capability=capability)
        note = f"estimated for this machine's {properties.name}"
        note += "" if known else ", whose rates are not known: times are those of an H200"
        host = host_limits().available_bytes
    else:
        found, note = H200, "there is no GPU here: estimated for an H200 and 128 GiB of host memory (--gpu NAME), "
        note += "in the dtypes of a run on this CPU"
    return Machine(
        gpu=found,
        host_bytes=host,
        num_gpus=num_gpus,
        precision=precision,
        zero_stage=None if zero is None else int(zero.get("stage", 0)),
        zero_offload=offload,
        on_gpu=gpu is not None or on_gpu(),
        note=note,
    )


def _job(recipe: Recipe, config: Any, machine: Machine) -> Job:
    """One step on a document whose length is still to be said."""
    shape = replace(read_shape(config), name=recipe.model_name_or_path)
    return Job(
        model=shape,
        tokens=recipe.oomb.page_tokens,
        lora_r=recipe.lora_r,
        adapters=recipe.adapters,
        **dtypes_of(
            recipe.torch_dtype,
            lora_r=recipe.lora_r,
            zero_stage=machine.zero_stage,
            mixed_precision=machine.precision,
            stored_dtype=shape.stored_dtype,
        ),
        **settings_of(recipe.oomb),
        gpu=machine.gpu,
        on_gpu=machine.on_gpu,
        num_gpus=machine.num_gpus,
        zero_stage=machine.zero_stage,
        zero_offload=machine.zero_offload,
        host_bytes=machine.host_bytes,
    )


def _cost(job: Job, oomb: OombConfig, steps: Sequence[Step], lengths: Sequence[int]) -> Cost:
    longest = max(
        sum(lengths[index] for index in documents) for step in steps for micro in step for documents in micro
    )  # of a stream
    job = replace(job, tokens=max(longest, 2))
    reasons: tuple[str, ...] = ()
    auto = {name: getattr(oomb, name) == "auto" for name in ("chunk_tokens", "page_grad_dtype")}
    if any(auto.values()):
        choice = choose(job, **auto)
        job = replace(job, chunk_tokens=choice.chunk_tokens, page_grad_dtype=choice.page_grad_dtype)
        reasons = choice.reasons
    found = estimate(job)
    return Cost(
        estimate=found,
        longest=largest_tokens(job) if job.chunk_tokens >= min(CHUNKS) else None,
        changes=[] if found.fits else suggestions(job),
        reasons=reasons,
        step_seconds=_step_seconds(job, steps, lengths),
    )


def _step_seconds(job: Job, steps: Sequence[Step], lengths: Sequence[int]) -> float:
    """Mean over the steps; in each micro-step everybody waits for the rank with most to do."""
    some = np.unique(np.quantile(np.asarray(lengths), np.linspace(0, 1, _LENGTHS), method="nearest"))
    found = [estimate(replace(job, tokens=max(int(tokens), 2))).time for tokens in some]
    update = found[-1].parts["optimizer"]
    seconds = np.interp(lengths, some, [time.seconds - time.parts["optimizer"] for time in found])
    of_steps = [
        sum(max(sum(seconds[index] for index in documents) for documents in micro) for micro in step) for step in steps
    ]
    return float(statistics.fmean(of_steps)) + update


def spread(lengths: Sequence[int]) -> str:
    """Shortest, median and longest in words, and how many documents there are between powers of two."""
    if min(lengths) == max(lengths):
        return f"{lengths[0]:,} tokens each" if len(lengths) > 1 else f"{lengths[0]:,} tokens"
    edges = [1 << power for power in range(max(lengths).bit_length() + 1)]
    counts = [(start, sum(start <= length < end for length in lengths)) for start, end in pairwise(edges)]
    parts = ", ".join(f"{count} from {start:,}" for start, count in counts if count)
    middle = statistics.median(lengths)
    return f"shortest {min(lengths):,}, median {middle:,.0f}, longest {max(lengths):,} tokens ({parts})"
