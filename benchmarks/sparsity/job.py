"""One part of the study in a process of its own: ``python -m benchmarks.sparsity.job long_grid --source ...``."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.sparsity import adapt, curves, facts, gradients, losses, mass
from benchmarks.sparsity.material import load_material
from benchmarks.sparsity.running import Bench, Results
from benchmarks.sparsity.sizes import SIZES, Sizes
from benchmarks.sparsity.texts import load_texts

PLAIN: dict[str, Callable[[Bench], None]] = {
    "adapt": adapt.adapt,
    "native_grid": losses.native_grid,
    "long_grid": losses.long_grid,
    "settings": losses.settings_one_by_one,
    "division": losses.division_over_layers,
    "variants_long": losses.variants_long,
    "variants_native": losses.variants_native,
    "gradients": gradients.gradients,
    "mass": mass.mass,
}
RUNS: dict[str, Callable[[Bench, str, int], None]] = {
    "curve": curves.curve,
    "after": gradients.gradients_after_training,
    "facts": facts.facts,
}
"""Followed by the run and the seed: ``curve:top16-causal:1``."""
_KINDS = ", ".join([*PLAIN, *(f"{kind}:RUN:SEED" for kind in RUNS)])
WITHOUT_ADAPTER = ("adapt", "native_grid", "variants_native", "curve", "after")


def job_named(text: str) -> str:
    """The type of an argument that is a job."""
    if text not in PLAIN and re.fullmatch(rf"({'|'.join(RUNS)}):[\w-]+:\d+", text) is None:
        raise argparse.ArgumentTypeError(f"must be one of {_KINDS}, got {text!r}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "job", type=job_named, help=f"one of {', '.join(PLAIN)}, or curve:RUN:SEED, after:RUN:SEED, facts:RUN:SEED"
    )
    add_options(parser)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    bench = prepare(options, options.job, device)
    kind, *which = options.job.split(":")
    if kind not in WITHOUT_ADAPTER:
        _wait_for(bench.adapter / "adapter_config.json", options.deadline)
    if kind == "after":
        _wait_for(curves.trained_file(bench, which[0], int(which[1])), options.deadline)
    if kind in PLAIN:
        PLAIN[kind](bench)
    else:
        RUNS[kind](bench, which[0], int(which[1]))
    bench.say("done")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that the driver hands on to its jobs."""
    parser.add_argument("--source", required=True, help="folder with the packed model, or 'tiny'")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--work", type=Path, required=True, help="rows, adapter and encoded texts")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="time.time() at which trainings end early")
    parser.add_argument("--started", type=float, default=time.time(), help="time.time() that progress lines count from")


def prepare(options: argparse.Namespace, name: str, device: torch.device) -> Bench:
    """Model, texts and places."""
    sizes: Sizes = SIZES[options.size]
    options.work.mkdir(parents=True, exist_ok=True)
    material = load_material(options.source)
    texts = load_texts(material.encode, max_files=sizes.max_files, cache=options.work / f"texts-{options.size}.npz")
    return Bench(
        material=material,
        texts=texts,
        sizes=sizes,
        device=device,
        results=Results(options.work / "rows" / f"{name.replace(':', '-')}.jsonl"),
        adapter=options.work / "adapter",
        deadline=options.deadline,
        started=options.started,
        name=name,
    )


def _wait_for(file: Path, deadline: float) -> None:
    """Everything else is ready by the time another job has made it."""
    while not file.is_file():
        if time.time() > deadline:
            raise RuntimeError(f"{file} did not come in time.\n  Run the job that makes it, in the same --work folder.")
        time.sleep(0.5)
    time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
