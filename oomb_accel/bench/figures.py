"""What the kernel table says: operations, rates, and how they are written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FLOOR_FLOPS_PER_SECOND = 700e12
"""Matrix products in bf16 on an H200: what the floors are computed with, whatever GPU runs."""
BACKWARD = 2.5
"""Operations of the backward over those of the forward: five matrix products instead of two."""


def forward_flops(num_heads: int, num_queries: int, num_keys: int, head_dim: int) -> float:
    """Operations of attention where each query visits ``num_keys`` keys: two matrix products."""
    return 4.0 * num_heads * num_queries * num_keys * head_dim


@dataclass(frozen=True, slots=True)
class Timed:
    """One direction of one side."""

    ms: float
    flops: float

    @property
    def tflops(self) -> float:
        """10^12 operations per second; nan when it was not measured."""
        return self.flops / self.ms / 1e9

    @property
    def floor_ms(self) -> float:
        return self.flops / FLOOR_FLOPS_PER_SECOND * 1e3


NOT_MEASURED = Timed(math.nan, 0.0)


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One configuration: own kernels, the dense library and FlexAttention, measured in turns."""

    lists: str
    top_k: int
    past: int
    """Tokens of the candidate pages."""
    page_grads: str = "float32"
    """Dtype of the page gradients that the backward adds to."""
    forward: Timed = NOT_MEASURED
    """Attention over the listed pages, merged with attention over other keys, as in training."""
    alone_ms: float = math.nan
    """Of the listed pages without other keys. It may take longer: with the others' LSE as reference the kernel needs no
    row maximum."""
    backward: Timed = NOT_MEASURED
    """dQ, dK, dV and the index that they need, of the merged attention."""
    index_ms: float = math.nan
    """The index alone, which is part of the backward as well."""
    selection_ms: float = math.nan
    """Pooling queries, scoring the mean keys of all pages, taking the heaviest pages; part of neither direction."""
    dense_forward: Timed = NOT_MEASURED
    dense_backward: Timed = NOT_MEASURED
    flex_forward: Timed = NOT_MEASURED
    flex_backward: Timed = NOT_MEASURED
    notes: tuple[str, ...] = field(default=())

    @property
    def forward_ratio(self) -> float:
        """Own rate over the dense library's."""
        return self.forward.tflops / self.dense_forward.tflops

    @property
    def backward_ratio(self) -> float:
        return self.backward.tflops / self.dense_backward.tflops

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, rates included; what was not measured is None."""
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            timed = getattr(self, name)
            if isinstance(timed, Timed):
                found |= {f"{name}_ms": timed.ms, f"{name}_tflops": timed.tflops, f"{name}_floor_ms": timed.floor_ms}
            else:
                found[name] = value
        found |= {"forward_ratio": self.forward_ratio, "backward_ratio": self.backward_ratio}
        return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in found.items()}


_COLUMNS = (
    *("lists", "top-k", "past", "forward ms", "floor", "TFLOP/s", "of dense", "flex", "alone ms"),
    *("page grads", "backward ms", "floor", "TFLOP/s", "of dense", "flex"),
    *("index ms", "pool + score + top ms", "dense TFLOP/s"),
)


def attention_table(rows: Sequence[AttentionRow]) -> str:
    """A markdown table; notes below it, each once."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join([*lines, *(f"- {note}" for note in dict.fromkeys(n for row in rows for n in row.notes))])


def _cells(row: AttentionRow) -> list[str]:
    cells = [row.lists, str(row.top_k), f"{row.past:,}"]
    cells += _direction(row.forward, row.forward_ratio, row.flex_forward)
    cells += [_number(row.alone_ms, ".2f"), row.page_grads]
    cells += _direction(row.backward, row.backward_ratio, row.flex_backward)
    dense = f"{_number(row.dense_forward.tflops, '.0f')} / {_number(row.dense_backward.tflops, '.0f')}"
    return [*cells, _number(row.index_ms, ".3f"), _number(row.selection_ms, ".3f"), dense]


def _direction(own: Timed, ratio: float, flex: Timed) -> list[str]:
    return [
        _number(own.ms, ".2f"),
        "-" if math.isnan(own.ms) else f"{own.floor_ms:.2f}",
        _number(own.tflops, ".0f"),
        _number(ratio, ".2f") + ("" if math.isnan(ratio) else "x"),
        _number(flex.tflops, ".0f"),
    ]


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
