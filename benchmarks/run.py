"""Run a benchmark and print its table: ``python -m benchmarks.run whole_step --lengths 8192 32768``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks import depths, offload, profile_step, whole_step, zero  # noqa: F401  registers
from benchmarks.registry import BENCHMARKS, SIDES_OF, Row, environment, table
from oomb_accel.bench.models import SHAPES, TINY
from oomb_accel.cli.devices import what_torch_sees
from oomb_accel.config import unknown_message

_DEFAULT_SIDES = ["oomb", "oomb-no-kept", "peer"]
_AS_WHOLE_STEP = ("depths", "profile_step")
"""Benchmarks with sides of this one."""


def _checked(name: str, shape: str, sides: list[str]) -> list[str]:
    """The sides, once this machine can measure them.

    Raises:
        SystemExit: the benchmark has no such side, there is no such model, or no GPU for it.
    """
    for side in sides:
        if side not in SIDES_OF[name]:
            raise SystemExit(unknown_message("side", side, list(SIDES_OF[name]), f"of {name}"))
    if shape not in SHAPES:
        raise SystemExit(unknown_message("shape", shape, list(SHAPES), "on the command line"))
    if shape != TINY and not torch.cuda.is_available():
        raise SystemExit(
            f"benchmarks.run {name} needs a CUDA device for the shape {shape}.\n  {what_torch_sees()}\n"
            f"  Run it on a machine with one, or try it with --shape {TINY} --lengths 300 --chunk-tokens 128."
        )
    return sides


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    parser.add_argument("--shape", default="qwen2.5-7b", help="a known model, or tiny, which runs on the CPU too")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    known = "; ".join(f"{name}: {', '.join(sides)}" for name, sides in SIDES_OF.items() if name not in _AS_WHOLE_STEP)
    parser.add_argument(
        "--sides",
        nargs="+",
        metavar="SIDE",
        help=f"what is measured; default {' '.join(_DEFAULT_SIDES)} where there are such. {known}; "
        f"{' and '.join(_AS_WHOLE_STEP)}: as whole_step",
    )
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--timed", type=int, default=3, help="steps timed after the warm-up; the median counts")
    parser.add_argument("--out", type=Path, help="also append one JSON object per row to this file")
    options = parser.parse_args()
    sides = _checked(options.benchmark, options.shape, options.sides or _DEFAULT_SIDES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(environment()), flush=True)
    rows: list[Row] = []
    for row in BENCHMARKS[options.benchmark](
        shape=options.shape,
        lengths=options.lengths,
        sides=sides,
        chunk_tokens=options.chunk_tokens,
        timed=options.timed,
        device=device,
    ):
        rows.append(row)
        report = f"\n\n{row.text}\n" if row.text else f" {json.dumps(row.details)}"
        print(table([row]).splitlines()[-1] + report, flush=True)
        if options.out:
            with options.out.open("a") as out:
                out.write(json.dumps(row.as_dict() | environment()) + "\n")
    print("\n" + table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
