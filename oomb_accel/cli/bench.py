"""``oomb bench BENCHMARK``: measurements on this machine's GPU. Each benchmark is a module ``bench_BENCHMARK`` beside
this one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from oomb_accel.columns import aligned
from oomb_accel.config import unknown_message
from oomb_accel.reading import shown

_BENCHMARKS = {
    "attention": "the kernels of sparse attention beside library attention on the same lists",
    "step": "whole training steps beside a ceiling of the same arithmetic, held against a reference",
}


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark.

    Raises:
        ValueError: there is no such benchmark, or its options are wrong.
        RuntimeError: there is no GPU, a kernel computes something wrong, or a step is slower than its reference.
    """
    if list(arguments) in (["-h"], ["--help"]):
        print(_usage())
        return 0
    name = arguments[0] if arguments else ""
    if not name or name.startswith("-"):
        raise ValueError(
            f"oomb bench takes the name of a benchmark first.\n  Got {shown(name)}.\n"
            f"  Use oomb bench {' or oomb bench '.join(_BENCHMARKS)}; oomb bench --help says more."
        )
    if name not in _BENCHMARKS:
        raise ValueError(unknown_message("benchmark", name, list(_BENCHMARKS), "on the command line"))
    return int(importlib.import_module(f"oomb_accel.cli.bench_{name}").main(arguments[1:]))


def _usage() -> str:
    benchmarks = aligned([(f"  {name}", what) for name, what in _BENCHMARKS.items()], left=(0, 1))
    return f"usage: oomb bench BENCHMARK ...\n\nbenchmarks:\n{benchmarks}\n\noomb bench BENCHMARK --help says more."
