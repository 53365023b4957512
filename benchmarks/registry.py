"""Benchmarks by name, and what every result row carries: what ran, where, with which versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import psutil
import torch

Measure: TypeAlias = "Callable[..., Iterator[Row]]"
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What can be asked of a benchmark."""

    measure: Measure
    sides: tuple[str, ...]
    """What it can measure."""
    default_sides: tuple[str, ...]
    default_lengths: tuple[int, ...]
    """Tokens."""
    least_chunks: int
    """Of a document: with fewer there is nothing to measure."""


BENCHMARKS: dict[str, Benchmark] = {}


@dataclass
class Row:
    """One measured configuration."""

    benchmark: str
    side: str
    """Who was measured, for instance ``oomb`` or ``peer``."""
    tokens: int
    seconds: float = float("nan")
    """Median of the timed steps."""
    peak_gib: float = float("nan")
    """Largest device memory that torch held at once."""
    floor_seconds: float = float("nan")
    """What the arithmetic alone would take, see floor.py."""
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    """A report of this row in Markdown: printed, not stored."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        stored = {name: value for name, value in asdict(self).items() if name != "text"}
        return stored | {"tokens_per_second": self.tokens_per_second}


def benchmark(
    name: str,
    sides: Iterable[str],
    *,
    default_sides: tuple[str, ...],
    default_lengths: tuple[int, ...],
    least_chunks: int = 1,
) -> Callable[[Measure], Measure]:
    """Register a function that yields rows of these sides."""

    def register(function: Measure) -> Measure:
        BENCHMARKS[name] = Benchmark(
            measure=function,
            sides=tuple(sides),
            default_sides=default_sides,
            default_lengths=default_lengths,
            least_chunks=least_chunks,
        )
        return function

    return register


def environment() -> dict[str, Any]:
    """Versions and hardware: printed above every table."""
    versions = {}
    for package in ("torch", "triton", "transformers", "accelerate", "peft", "deepspeed", "liger-kernel"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "gpu": f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" if gpu else "none",
        "host_gib": round(psutil.virtual_memory().total / GIB),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }


def table(rows: list[Row]) -> str:
    """Rows as a markdown table."""
    names = ("benchmark", "side", "tokens", "s/step", "floor, s", "tok/s", "peak GiB", "note")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for r in rows:
        numbers = f"{r.seconds:.2f} | {r.floor_seconds:.2f} | {r.tokens_per_second:,.0f} | {r.peak_gib:.1f}"
        lines.append(f"| {r.benchmark} | {r.side} | {r.tokens:,} | {numbers} | {r.note} |")
    return "\n".join(lines)
