"""The report of ``oomb estimate`` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oomb_accel.columns import folded
from oomb_accel.plan import Estimate, Job, Suggestion
from oomb_accel.plan.fit import estimate_that_fits
from oomb_accel.plan.gpus import H200
from oomb_accel.plan.sizes import GIB

_WIDTH = 34
_DISTINCT_OF_TEXT = 0.15
"""Of the documents that docs/benchmarks.md was measured with, 0.06 to 0.29."""


def estimate_report(
    found: Estimate,
    longest: int | None,
    changes: Sequence[Suggestion],
    price: float | None,
    reasons: Sequence[str] = (),
    changed: Suggestion | None = None,
    near: str = "",
) -> str:
    """Memory, traffic, time, cost, and what to change. Of a step that does not fit: what it would take in memory.

    Args:
        longest: tokens of the longest document that fits; None where it was not looked for.
        changes: that make the job fit.
        price: of one GPU for an hour.
        reasons: for settings that were chosen.
        changed: the longest document that fits on this machine with other settings; None where it was not looked for,
            or there is none.
        near: what comes nearest where nothing makes the job fit.
    """
    job, memory = found.job, found.needed()
    process = "the process" if job.num_gpus == 1 else "each process"
    on_gpu, on_host = "GPU memory", f"Host memory of {process}"
    if not found.fits:
        on_gpu, on_host = "GPU memory that it would take", f"Host memory that {process} would take"
    shows_most = found.fits and memory.plan.offloads
    lines = [
        *_head(job),
        *([] if found.fits else [f"does not fit: {found.refusal.splitlines()[0]}"]),
        *(f"chosen: {reason}" for reason in reasons),
        "",
        f"{on_gpu}, GiB of {job.gpu.memory_bytes / GIB:,.1f}",
        *_table(memory.device, GIB),
        _row("all", memory.device_bytes / GIB),
        _row("of that torch counts", memory.peak_bytes / GIB),
        "",
        f"{on_host}, GiB",
        *_table({f"{name}, pinned": size for name, size in memory.pinned.items()} | memory.pageable, GIB),
        _row("all", memory.host_bytes / GIB),
        *([_row("and up to, where there is room", memory.host_most_bytes / GIB)] if shows_most else []),
        "",
        *(_time(found, price) if found.fits else ["Time of a step: does not fit"]),
        "",
        *_verdict(found, longest, changes, changed, near),
        "",
        *_notes(found, longest),
    ]
    return folded("\n".join(lines))


def _time(found: Estimate, price: float | None) -> list[str]:
    time = found.time
    lines = [
        "Time of a step, s",
        *_table(time.parts, 1),
        _row("all", time.seconds),
        _row("tokens per second and GPU", found.tokens_per_second),
        _row("over PCIe, GB to the GPU", time.up_bytes / 1e9),
        _row("over PCIe, GB to the host", time.down_bytes / 1e9),
    ]
    if price is not None:
        lines.append(f"  {'cost of a million tokens':<{_WIDTH}}{found.cost_per_million_tokens(price):>11,.3f}")
    return lines


def _head(job: Job) -> list[str]:
    model = job.model
    trained = f"LoRA r={job.lora_r}" if job.lora_r else "all weights"
    attention = f"sparse attention (top_k {job.top_k})" if job.attention == "sparse" else "dense attention"
    zero = f", ZeRO {job.zero_stage}" if job.zero_stage else ""
    return [
        f"{model.name}: {model.num_parameters / 1e9:,.2f}B parameters, {trained} ({job.trainable / 1e6:,.1f}M trained)",
        f"{job.tokens:,} tokens, {attention}, chunks of {job.chunk_tokens:,}; "
        f"pages {job.pages.value_dtype}, their gradients {job.page_grad_dtype}"
        f"{', base weights in float8' if job.base_dtype == 'float8' else ''}",
        f"{job.num_gpus} x {job.gpu.name}{zero}, {job.host_bytes / GIB:,.0f} GiB of host memory",
    ]


def _table(parts: Mapping[str, float], unit: float) -> list[str]:
    """The parts that are more than nothing."""
    return [_row(name, size / unit) for name, size in parts.items() if size / unit >= 0.005]


def _row(name: str, value: float) -> str:
    digits = 0 if value >= 10_000 else 2 if value < 100 else 1
    return f"  {name:<{_WIDTH}}{value:>11,.{digits}f}"


def _verdict(
    found: Estimate, longest: int | None, changes: Sequence[Suggestion], changed: Suggestion | None, near: str
) -> list[str]:
    lines = ["It fits." if found.fits else f"It does not fit. {found.refusal}"]
    if changes:
        lines += ["", "Any line of these makes it fit:"]
        lines += [line for suggestion in changes for line in _change(suggestion)]
    elif not found.fits:
        lines += ["No change of these settings makes it fit.", *([near] if near else [])]
    if longest is None:
        return lines
    what = f"The longest document that fits with these settings: {longest:,} tokens."
    lines.append(what if longest else "With these settings no document fits, however short.")
    if changed is not None and changed.change:
        lines.append(
            "With the same attention and K and V this machine takes "
            f"{changed.estimate.job.tokens:,} tokens: {changed.change}."
        )
    return lines


def _change(suggestion: Suggestion) -> list[str]:
    """Its figures stand beside it, or below where it is long."""
    memory, seconds = suggestion.estimate.memory, suggestion.estimate.time.seconds
    figures = (
        f"{memory.device_bytes / GIB:>7,.1f} GiB on the GPU, {memory.host_bytes / GIB:,.1f} GiB on the host, "
        f"{seconds:,.{0 if seconds >= 1000 else 1}f} s a step"
    )
    beside = len(suggestion.change) <= _WIDTH
    return [f"  {suggestion.change:<{_WIDTH}} {figures}"] if beside else [f"  {suggestion.change}", f"{'':37}{figures}"]


def _rates(found: Estimate) -> str:
    if not found.is_scaled:
        return "Rates were measured on H200s (docs/benchmarks.md), with Liger's kernels."
    gpu = found.job.gpu
    same = replace(gpu, name=H200.name, memory_bytes=H200.memory_bytes, compute_capability=H200.compute_capability)
    rates = "those of an H200" if same == H200 else "scaled from an H200's by the makers' peaks"
    return f"Rates are {rates}: not measured on the {gpu.name}."


def _notes(found: Estimate, longest: int | None) -> list[str]:
    job = found.job
    notes = [_rates(found)]
    if job.attention == "sparse" and job.distinct is None and found.memory.plan.offloads:
        on_text = estimate_that_fits(replace(job, distinct=_DISTINCT_OF_TEXT))
        takes = "does not fit either" if on_text is None else f"takes {on_text.time.seconds:,.0f} s"
        notes.append(
            "Page lists are taken as random, which is the worst case. Where they concentrate as on source code "
            f"(--distinct {_DISTINCT_OF_TEXT}), a step {takes}. A run on your text logs its own share: "
            "--distinct OUTPUT_DIR."
        )
    if job.lora_r and not job.adapters.plain:
        notes.append(
            "Adapters with dropout or DoRA are estimated as plain LoRA that PEFT runs: what dropout's masks and DoRA's "
            "norms take on top, in memory and time, was not measured and is left out."
        )
    trained = job.model.trained_tokens
    if trained is not None and max(job.tokens, longest or 0) > trained:
        notes.append(
            f"The positions of {job.model.name} are made for {trained:,} tokens by its config "
            "(max_position_embeddings, RoPE): set rope_parameters for more."
        )
    return notes
