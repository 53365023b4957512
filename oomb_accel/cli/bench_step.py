"""``oomb bench step``: a training step beside the ceiling of its arithmetic on this GPU, held against a reference."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from oomb_accel.bench.models import LORA_RANK, SHAPES, TINY
from oomb_accel.bench.reference import (
    SHIPPED,
    Reference,
    matching,
    read_references,
    reference_of,
    regression,
    save_reference,
)
from oomb_accel.bench.step import StepResult, StepSizes, bench_step
from oomb_accel.bench.timing import device_times, host_times
from oomb_accel.cli import env
from oomb_accel.cli.devices import has_nvidia_gpu, what_torch_sees
from oomb_accel.cli.options import Parser, num_tokens
from oomb_accel.cli.report_file import add_json_option, check_writable, tables_beside, write_json
from oomb_accel.config import unknown_message
from oomb_accel.reading import shown

_DEFAULTS: dict[str, int] = {"tokens": 65536, "chunk_tokens": 8192, "top_k": 16}
_TINY_DEFAULTS: dict[str, int] = {"tokens": 2048, "chunk_tokens": 512, "top_k": 4}
_REPEATS = 10
"""Timed turns of the ceiling's calls, of which the median counts."""


def main(arguments: Sequence[str]) -> int:
    """Measure, print, save and compare.

    Raises:
        ValueError: options that do not fit together, or a file of references that cannot be read.
        RuntimeError: no GPU, a step that does not fit, or one that is slower than its reference.
    """
    options = _parser().parse_args(arguments)
    if options.shape not in SHAPES:
        raise ValueError(unknown_message("shape", options.shape, list(SHAPES), "on the command line"))
    if options.shape != TINY and not has_nvidia_gpu():
        raise RuntimeError(
            f"oomb bench step needs an NVIDIA GPU for the shape {options.shape}.\n  {what_torch_sees()}\n"
            f"  Run it on a machine with one, or try it on the CPU with --shape {TINY}."
        )
    defaults = _TINY_DEFAULTS if options.shape == TINY else _DEFAULTS
    chosen = {name: defaults[name] if getattr(options, name) is None else getattr(options, name) for name in defaults}
    if options.attention == "dense":
        chosen["top_k"] = options.top_k
    sizes = StepSizes(
        shape=options.shape,
        attention=options.attention,
        steps=options.steps,
        base_dtype=options.base_dtype,
        **chosen,
    )
    references = read_references(options.reference or SHIPPED)
    check_writable(options.json)
    check_writable(options.save, "--save")
    with tables_beside(options.json):
        report, slower = _measured(options, sizes, references)
    write_json(report, options.json)
    if slower is not None:
        raise RuntimeError(slower)
    return 0


def _measured(
    options: argparse.Namespace, sizes: StepSizes, references: list[Reference]
) -> tuple[dict[str, Any], str | None]:
    """Measure and print; returns the report for JSON, and what to say where the step is slower than its reference."""
    found = env.collect()
    on_gpu = has_nvidia_gpu()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    gpu = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    versions = found["versions"]
    print(f"{gpu}; torch {versions['torch']}, triton {versions['triton']}\n{_describe(sizes)}", flush=True)
    measure = device_times(device, _REPEATS) if on_gpu else host_times(_REPEATS)
    result = bench_step(sizes, measure, device, on_stage=lambda stage: print(stage, file=sys.stderr))
    print(_table(result))
    if not on_gpu:
        print("On a CPU this ratio means nothing: the ceiling is of GPUs. A run here only shows that everything works.")
    measured = reference_of(result, gpu, versions)
    known = matching(references, measured)
    slower = None if known is None else regression(measured, known)
    print(_compared(measured, known))
    if options.save is not None:
        save_reference(options.save, measured)
        print(f"saved in {options.save}")
    return {
        "environment": found,
        "result": result.as_dict(),
        "measured": dataclasses.asdict(measured),
        "reference": None if known is None else dataclasses.asdict(known),
        "slower": slower is not None,
    }, slower


def _parser() -> Parser:
    parser = Parser(
        prog="oomb bench step",
        description="Time whole training steps (LoRA on all linear layers, random weights, one document) and, in the "
        "same run, what their matrix products and their attention take as plain library calls: the ceiling. Ceiling "
        "over step says how much of the GPU a step uses, and is held against a reference for this GPU and these "
        "settings: more than 5 % below it is exit code 1.",
    )
    parser.add_argument("--shape", default="qwen2.5-7b", help=f"sizes of the model: {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=num_tokens, help="of the document; default 65536")
    parser.add_argument("--chunk_tokens", type=num_tokens, help="default 8192")
    parser.add_argument("--attention", default="sparse", choices=["sparse", "dense"])
    parser.add_argument("--top_k", type=int, help="selected pages of sparse attention; default 16")
    parser.add_argument(
        "--base_dtype", default="model", choices=["model", "float8"], help="of products with frozen weights"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps, of which the median counts; default 3")
    parser.add_argument("--save", type=Path, metavar="FILE", help="add the result to a file of references of your own")
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="compare with this file instead of the package's references"
    )
    add_json_option(parser)
    return parser


def _describe(sizes: StepSizes) -> str:
    pages = "" if sizes.top_k is None else f", {sizes.top_k} selected pages"
    return (
        f"{sizes.shape}, LoRA r={LORA_RANK}, {sizes.tokens:,} tokens in chunks of {sizes.chunk_tokens:,}, "
        f"{sizes.attention} attention{pages}{_base(sizes.base_dtype)}; median of {sizes.steps}"
    )


def _base(base_dtype: str) -> str:
    return "" if base_dtype == "model" else f", base weights in {base_dtype}"


def _liger(used: bool) -> str:
    return "with Liger's kernels" if used else "without Liger's kernels"


def _table(result: StepResult) -> str:
    """Markdown: the parts of the ceiling, and the step."""
    tokens = result.sizes.tokens

    def row(name: str, seconds: float, flops: float | None = None) -> str:
        rate = "" if flops is None else f"{flops / seconds / 1e12:.3g}"
        return f"| {name} | {seconds:.3f} | {seconds / tokens * 1e6:.2f} | {rate} |"

    flops = sum(part.flops for part in result.parts)
    rows = [row(part.name, part.seconds, part.flops) for part in result.parts]
    rows += [row("ceiling", result.ceiling_seconds, flops), row("step", result.step_seconds, flops)]
    memory = "" if math.isnan(result.peak_gib) else f", {result.peak_gib:.1f} GiB"
    table = "\n".join(["", "| part | seconds | us a token | TFLOP/s |", "|---|---|---|---|", *rows])
    speed = f"{result.tokens_per_second:,.0f} tokens/s{memory}, {_liger(result.liger)}"
    return f"{table}\n\n{speed}; ceiling / step {result.ratio:.3f}"


def _compared(measured: Reference, known: Reference | None) -> str:
    if known is None:
        of = f"{shown(measured.gpu)} with these settings, {_liger(measured.liger)}"
        return f"no reference for {of}: --save FILE makes one"
    share = measured.ratio / known.ratio
    return f"{share:.1%} of the reference ratio {known.ratio:.3f} ({known.origin()})"
