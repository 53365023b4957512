"""Runs parts of the study as parallel processes on one device and collects their rows.

    python -m benchmarks.sparsity.run first --source .whl/smol --work build/study --out results --minutes 7

A small model does not fill a large GPU, so several processes share it. Rows are collected while the jobs run: a call
that is ended early leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.sparsity.job import add_options, job_named, prepare
from benchmarks.sparsity.running import setup_row

QUALITY = ["adapt", "mass", "long_grid", "gradients", "settings", "division", "native_grid"]
SELECTION = ["adapt", "variants_native", "variants_long"]
CURVES = [f"curve:{run}:{seed}" for seed in (0, 1) for run in ("dense", "top16", "top8", "top16-causal")]
FACTS = [f"facts:{run}:{seed}" for seed in (0, 1) for run in ("dense", "top16", "top8")]
AFTER = ["after:dense:1", "after:top16:1"]
GROUPS = {
    "quality": QUALITY,
    "selection": SELECTION,
    "curves": CURVES,
    "facts": ["adapt", *FACTS],
    # Two calls of eight minutes on one H200.
    "first": [*QUALITY, *CURVES[:2], CURVES[3], *FACTS[:2]],
    "second": ["adapt", *CURVES[4:], CURVES[2], *SELECTION[1:], *AFTER, "division", FACTS[2], FACTS[4]],
    "all": [*QUALITY, *SELECTION[1:], *CURVES[4:], *AFTER, *FACTS[:2]],
}
TINY_NAMES = {"top16": "top4", "top8": "top2"}
GRACE_SECONDS = 20
"""Between the deadline, at which trainings stop by themselves, and the end of processes that go on."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=_group_or_job, help=f"groups ({', '.join(GROUPS)}) or jobs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the collected rows and the adapter")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--parallel", type=int, default=14, help="processes at once")
    add_options(parser)
    options = parser.parse_args()
    options.deadline = time.time() + 60 * options.minutes - GRACE_SECONDS
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [job for name in options.jobs for job in GROUPS.get(name, [name])]
    if options.size == "tiny":
        jobs = [_tiny_name(job) for job in jobs]
    if (options.work / "adapter").is_dir():
        jobs = [job for job in jobs if job != "adapt"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shutil.rmtree(options.work / "rows", ignore_errors=True)
    bench = prepare(options, "setup", device)
    bench.results.add("setup", size=options.size, jobs=jobs, **setup_row(bench))
    bench.say(f"{len(jobs)} jobs: {' '.join(jobs)}")
    failed = _run(jobs, options)
    _collect(options)
    bench.say(f"failed: {', '.join(failed)}" if failed else "all jobs ended well")
    return 1 if failed else 0


def _run(jobs: list[str], options: argparse.Namespace) -> list[str]:
    """Start the jobs in order, at most so many at once. Returns those that failed or did not end in time."""
    waiting, failed = list(jobs), []
    running: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < options.parallel:
            job = waiting.pop(0)
            running[job] = _start(job, options)
        time.sleep(1)
        for job, process in list(running.items()):
            if time.time() > options.deadline + GRACE_SECONDS and process.poll() is None:
                process.kill()
                process.wait()
            if process.poll() is not None:
                del running[job]
                if process.returncode:
                    failed.append(job)
        if time.time() > options.deadline + GRACE_SECONDS:
            failed += waiting
            waiting = []
        _collect(options)
    return failed


def _start(job: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.sparsity.job", job, "--source", options.source, "--size", options.size]
    command += ["--work", str(options.work), "--deadline", str(options.deadline), "--started", str(options.started)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})


def _collect(options: argparse.Namespace) -> None:
    """Put the rows of all jobs into one file, and the adapter beside it."""
    name = "-".join(word.replace(":", "-") for word in options.jobs)[:60]
    lines = []
    for path in sorted((options.work / "rows").glob("*.jsonl")):
        whole_rows, _, _ = path.read_text().rpartition("\n")
        lines += [json.dumps({"job": path.stem} | json.loads(line)) for line in whole_rows.splitlines()]
    target = options.out / f"{name}.jsonl"
    target.with_suffix(".part").write_text("\n".join(lines) + "\n")
    target.with_suffix(".part").replace(target)
    adapter = options.work / "adapter"
    for path in adapter.glob("adapter_*") if (adapter / "adapter_config.json").is_file() else ():  # written last
        if not (options.out / path.name).is_file():
            shutil.copy(path, options.out / path.name)


def _group_or_job(text: str) -> str:
    """The type of an argument that is one or the other."""
    return text if text in GROUPS else job_named(text)


def _tiny_name(job: str) -> str:
    for long, short in TINY_NAMES.items():
        job = job.replace(long, short)
    return job


if __name__ == "__main__":
    sys.exit(main())
