"""Run a benchmark and print its table: ``python -m benchmarks.run whole_step --lengths 8192 32768``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks import depths, offload, profile_step, whole_step, zero  # noqa: F401  registers
from benchmarks.registry import BENCHMARKS, Row, environment, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    sides = sorted({*whole_step.SIDES, *zero.SIDES, *offload.SIDES})
    parser.add_argument("--sides", nargs="+", choices=sides, default=["oomb", "oomb-no-kept", "peer"])
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--timed", type=int, default=3, help="steps timed after the warm-up; the median counts")
    parser.add_argument("--out", type=Path, help="also append one JSON object per row to this file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(environment()), flush=True)
    rows: list[Row] = []
    for row in BENCHMARKS[options.benchmark](
        shape=options.shape,
        lengths=options.lengths,
        sides=options.sides,
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
