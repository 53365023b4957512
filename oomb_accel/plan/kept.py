"""Attention outputs of the forward sweep that are kept for the backward sweep, by estimated memory."""

from __future__ import annotations

from oomb_accel.plan.job import Job
from oomb_accel.plan.sizes import output_bytes
from oomb_accel.schedule import ChunkSchedule


def kept_bytes_per_token(job: Job) -> int:
    model = job.model
    return model.num_layers * output_bytes(model.num_heads, model.head_dim, 2)


def kept_chunks(job: Job, schedule: ChunkSchedule, budget_bytes: float) -> range:
    """Indices of the chunks whose outputs are kept: the latest that fit, which save the most.

    Args:
        budget_bytes: device memory that nothing else needs; may be negative.
    """
    end = len(schedule.chunks) - (1 if job.keep_last_graph else 0)  # the last one's graph holds its outputs
    if job.keep_outputs is False:
        return range(end, end)
    if job.keep_outputs is True:
        return range(end)
    first = end
    while first > 0:
        budget_bytes -= schedule.chunks[first - 1].num_tokens * kept_bytes_per_token(job)
        if budget_bytes < 0:
            break
        first -= 1
    return range(first, end)
