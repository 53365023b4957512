"""The plan of ``oomb train --dry_run`` as text."""

from __future__ import annotations

import statistics

from oomb_accel.cli.estimate_tables import estimate_report
from oomb_accel.columns import folded
from oomb_accel.progress import format_seconds
from oomb_accel.training.dry_run import TrainingPlan, spread


def plan_text(plan: TrainingPlan) -> str:
    """Data, steps, memory and time."""
    recipe, tokens = plan.recipe, plan.step_tokens
    several = len(plan.lengths) > 1
    lines = [
        "dry run: no weights were loaded, nothing was written",
        *([] if plan.cost is None else [plan.machine.note]),
        f"data    {len(plan.lengths):,} document{'s' if several else ''}, {sum(plan.lengths):,} tokens, "
        f"{plan.num_targets:,} of them trained; {spread(plan.lengths)}",
        *(f"        {note}" for note in plan.notes),
        f"steps   {plan.num_steps:,} of {plan.documents_per_step} document{'s' if plan.documents_per_step > 1 else ''}"
        f" ({recipe.per_device_train_batch_size} x {recipe.gradient_accumulation_steps} on {plan.machine.num_gpus} "
        f"device(s)), {plan.num_steps / plan.steps_per_epoch:,.3g} epoch(s)",
        f"        tokens of a step: {min(tokens):,} to {max(tokens):,}, mean {statistics.fmean(tokens):,.0f}",
        f"output  {recipe.output_dir}, {_saves(plan)}",
    ]
    if plan.steps_done:
        lines.append(f"        goes on behind step {plan.steps_done}: {plan.steps_left} steps are left")
    if plan.cost is None:
        return "\n".join([*lines, "", "There is no estimate: chunk recurrence is off (oomb.enabled: false)."])
    cost = plan.cost
    lines += [
        "time    none: a step with the longest stream does not fit"
        if plan.seconds is None
        else f"time    about {_time(plan.seconds)} ({_time(cost.step_seconds)} for the mean step), "
        "without loading and saving",
        "",
        "A step with the longest stream:",
        estimate_report(cost.estimate, cost.longest, cost.changes, None, cost.reasons),
    ]
    if cost.changes:
        lines.append("Settings such as chunk_tokens belong into the oomb block: --oomb.chunk_tokens 4096.")
    return folded("\n".join(lines))


def _time(seconds: float) -> str:
    """Short times with two digits, so that none reads 0."""
    return f"{seconds:.2g} s" if seconds < 10 else format_seconds(seconds)


def _saves(plan: TrainingPlan) -> str:
    every = plan.recipe.save_steps
    return (
        f"a checkpoint every {every} steps and at the end" if every else "no checkpoints before the end (save_steps: 0)"
    )
