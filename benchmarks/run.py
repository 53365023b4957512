"""Run a benchmark and print its table: ``python -m benchmarks.run whole_step --lengths 8192 32768``.

Exit codes are those of ``oomb``: 0 done, 1 failed, 2 wrongly called.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from benchmarks.choices import asked, check_machine
from benchmarks.registry import BENCHMARKS, Row, environment, table
from oomb_accel.cli import FAILED, MISUSED, OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code.

    Args:
        arguments: those of the process when None.
    """
    try:
        options = asked(arguments)
        check_machine(options)
    except (ValueError, RuntimeError) as error:
        print(f"benchmarks.run: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, ValueError) else FAILED
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(environment()), flush=True)
    rows: list[Row] = []
    for row in BENCHMARKS[options.benchmark].measure(
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
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as out:
                out.write(json.dumps(row.as_dict() | environment()) + "\n")
    print("\n" + table(rows))
    return OK


if __name__ == "__main__":
    sys.exit(main())
