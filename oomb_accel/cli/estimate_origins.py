"""What ``oomb estimate`` takes from the environment, a run or another GPU, and says so."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from pathlib import Path

from oomb_accel.config import OombConfig, plain_value
from oomb_accel.plan import Job, gpu_named
from oomb_accel.plan.sizes import GIB
from oomb_accel.sources import surroundings


def around() -> dict[str, str]:
    """Settings of the environment, and the place of each: a variable, or the preset that ``OOMB_CONFIG`` names."""
    sources = reversed(surroundings(os.environ))  # a variable counts more than the preset
    return {name: source.place_of(name) for source in sources for name in source.values}


def from_around(config: OombConfig, typed: Collection[str]) -> tuple[str, ...]:
    """Settings that hold because the environment has them.

    Args:
        typed: names of options, which count more.
    """
    return tuple(
        f"{name}={plain_value(getattr(config, name))} ({place})"
        for name, place in around().items()
        if name not in typed
    )


def distinct_share(text: str | None) -> tuple[str | None, float | None]:
    """The run that was named, and the share of distinct pages: a number, or the mean over the steps of that run.

    Raises:
        ValueError: there is no such run, or it did not select pages.
    """
    if text is None:
        return None, None
    try:
        return None, float(text)
    except ValueError:
        pass
    from oomb_accel.cli.report_data import METRICS, read_run

    steps = read_run(Path(text)).metrics
    shares = [float(row["distinct_share"]) for row in steps if "distinct_share" in row]
    if not shares:
        raise ValueError(
            f"The run in {text!r} does not say how many distinct pages its lists named.\n"
            f"  {METRICS} has {len(steps)} step(s), none of them with distinct_share.\n"
            "  Give a run with sparse attention on documents longer than its lists reach, or a number such as 0.25."
        )
    return text, sum(shares) / len(shares)


def where_distinct_is_from(options: argparse.Namespace) -> tuple[str, ...]:
    """That it is a run's."""
    return () if options.distinct_run is None else (f"distinct={options.distinct:.3g}, as in {options.distinct_run}",)


def as_of_another_gpu(options: argparse.Namespace, job: Job) -> tuple[str, ...]:
    """What was not said of a GPU that is not in the list."""
    base, asked = gpu_named(options.gpu).name, {"gpu_gib": options.gpu_gib, "tflops": options.tflops}
    if all(value is None for value in asked.values()):
        return ()
    taken = {"gpu_gib": job.gpu.memory_bytes / GIB, "tflops": job.gpu.flops_per_second / 1e12}
    same = [
        f"{name}={taken[name]:,.4g} as of the {base}: give --{name} for this GPU's own"
        for name in asked
        if asked[name] is None
    ]
    if "float8" in (job.page_dtype, job.base_dtype):
        same.append(f"8-bit floats as of the {base}: GPUs older than Ada have none, and refuse them")
    return tuple(same)
