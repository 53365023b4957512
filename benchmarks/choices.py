"""What the command line asks of a benchmark: its options, and whether it can do that."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import depths, offload, profile_step, whole_step, zero  # noqa: F401  registers
from benchmarks.registry import BENCHMARKS
from oomb_accel import OombConfig
from oomb_accel.bench.models import SHAPES, TINY
from oomb_accel.cli.devices import what_torch_sees
from oomb_accel.cli.options import Parser, num_tokens
from oomb_accel.cli.report_file import check_writable
from oomb_accel.config import unknown_message

_AS_WHOLE_STEP = ("depths", "profile_step")
"""Benchmarks with sides of this one."""


def asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the benchmark's own sides and lengths where none were named.

    Args:
        arguments: those of the process when None.

    Raises:
        ValueError: the benchmark has no such side, there is no such model, or a value is not allowed.
    """
    options = _parser().parse_args(arguments)
    chosen = BENCHMARKS[options.benchmark]
    options.sides = options.sides or list(chosen.default_sides)
    options.lengths = options.lengths or list(chosen.default_lengths)
    for side in options.sides:
        if side not in chosen.sides:
            raise ValueError(unknown_message("side", side, list(chosen.sides), f"of {options.benchmark}"))
    if options.shape not in SHAPES:
        raise ValueError(unknown_message("shape", options.shape, list(SHAPES), "on the command line"))
    OombConfig(chunk_tokens=options.chunk_tokens)  # refuses chunks without a whole page
    _check_least("timed", options.timed, 1)
    least = max(2, (chosen.least_chunks - 1) * options.chunk_tokens + 1)
    for tokens in options.lengths:
        _check_least("lengths", tokens, least)
    check_writable(options.out, "--out")
    return options


def check_machine(options: argparse.Namespace) -> None:
    """Refuse a real model on a machine without a GPU.

    Raises:
        RuntimeError: with a command that works there.
    """
    if options.shape != TINY and not torch.cuda.is_available():
        raise RuntimeError(
            f"benchmarks.run {options.benchmark} needs a CUDA device for the shape {options.shape}.\n"
            f"  {what_torch_sees()}\n"
            f"  Run it on a machine with one, or try it with --shape {TINY} --lengths 900 --chunk-tokens 128."
        )


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"--{name} is too small.\n  Got {value:,}.\n  Use {least:,} or more.")


def _parser() -> Parser:
    parser = Parser(prog="benchmarks.run", description="Run a benchmark and print its table.")
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    parser.add_argument("--shape", default="qwen2.5-7b", help="a known model, or tiny, which runs on the CPU too")
    lengths = "; ".join(f"{name}: {' '.join(map(str, of.default_lengths))}" for name, of in BENCHMARKS.items())
    sides = "; ".join(f"{name}: {' '.join(of.default_sides)}" for name, of in BENCHMARKS.items())
    parser.add_argument(
        "--lengths", type=num_tokens, nargs="+", help=f"tokens of the documents, such as 8192 or 8K; default {lengths}"
    )
    known = "; ".join(f"{name}: {', '.join(of.sides)}" for name, of in BENCHMARKS.items() if name not in _AS_WHOLE_STEP)
    parser.add_argument(
        "--sides",
        nargs="+",
        metavar="SIDE",
        help=f"what is measured; default {sides}. There are, for {known}; {' and '.join(_AS_WHOLE_STEP)}: those of "
        "whole_step",
    )
    parser.add_argument("--chunk-tokens", type=num_tokens, default=8192)
    parser.add_argument("--timed", type=int, default=3, help="steps timed after the warm-up; the median counts")
    parser.add_argument("--out", type=Path, help="also append one JSON object per row to this file")
    return parser
