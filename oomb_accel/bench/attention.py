"""The kernel table: own page kernels, dense library attention and FlexAttention, measured in turns.

Legend: H query heads, G KV heads, T tokens, D head_dim, S slots, P tokens of a page, N candidate pages, B query blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from oomb_accel.bench.check import CheckSize, check_kernels
from oomb_accel.bench.figures import BACKWARD, NOT_MEASURED, AttentionRow, Timed, forward_flops
from oomb_accel.bench.flex import compiled_flex, flex_tasks
from oomb_accel.bench.lists import Kind, draw_lists
from oomb_accel.bench.timing import Measure, Task
from oomb_accel.plan.sizes import parts_of
from oomb_accel.selection import POOLED_TOKENS
from oomb_accel.setting_text import dtype_name
from oomb_kernels import (
    AttentionCall,
    PageLists,
    choose_backend,
    dense_attention_backward,
    dense_attention_forward,
    page_attention_backward,
    page_attention_forward,
    page_mass,
    pool_queries,
    quantize_pages,
    top_pages,
)
from oomb_kernels.page_backward import unit_blocks
from oomb_kernels.page_index import build_page_index


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What is measured: the shape of one layer, and the configurations.

    Raises:
        ValueError: sizes that do not fit together.
    """

    head_dim: int
    num_groups: int
    """KV heads."""
    group: int
    """Query heads of a KV head."""
    chunk_tokens: int
    page_tokens: int
    block_tokens: int
    top_k: tuple[int, ...]
    past: tuple[int, ...]
    """Tokens of the candidate pages."""
    dtype: torch.dtype
    span_tokens: int
    """Keys of the dense library's call."""
    page_grad_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """Of the page gradients that the backward adds to: a row each, measured in the same turns."""
    float8: bool = False
    """Pages in e4m3 with scales."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("head_dim", "num_groups", "group", "chunk_tokens", "page_tokens", "span_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive.\n  Got {getattr(self, name)}.\n  Use 1 or more.")
        if min(self.top_k) < 1:
            raise ValueError(f"A list must have a page.\n  Got --top-k {min(self.top_k)}.\n  Use --top-k 16.")
        for past in self.past:
            if past < self.page_tokens or past % self.page_tokens:
                raise ValueError(
                    f"The past must be whole pages.\n  Got --past {past} with --page-tokens {self.page_tokens}.\n"
                    f"  Use --past {max(1, past // self.page_tokens) * self.page_tokens}."
                )
            if past // self.page_tokens < max(self.top_k):
                raise ValueError(
                    "A list cannot have more pages than there are.\n"
                    f"  Got --top-k {max(self.top_k)}; --past {past} has {past // self.page_tokens} pages.\n"
                    f"  Use --top-k {past // self.page_tokens} or less, or a longer past."
                )

    @property
    def num_heads(self) -> int:
        return self.num_groups * self.group

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def usual(self) -> tuple[int, int]:
        """Middle top_k and first past: where lists and launch configurations are compared."""
        return self.top_k[len(self.top_k) // 2], self.past[0]

    @property
    def num_rows(self) -> int:
        return len(self.configurations()) * len(self.page_grad_dtypes)

    def configurations(self) -> list[tuple[Kind, int, int]]:
        """Kind of lists, top_k and past of what is measured together, those of one past one after another."""
        rows: list[tuple[Kind, int, int]] = []
        for past in self.past:
            rows += [("random", top_k, past) for top_k in self.top_k]
            if past == self.past[0]:
                rows += [("zipf", *self.usual), ("hot page", *self.usual)]
        return rows


class AttentionInputs:
    """Tensors of one past: random queries and pages, and gradients of pages."""

    def __init__(self, sizes: AttentionSizes, past: int, device: torch.device) -> None:
        self.sizes, self.past, self.device = sizes, past, device
        generator = torch.Generator(device=device).manual_seed(sizes.seed)
        as_tensor: dict[str, Any] = {"dtype": sizes.dtype, "device": device, "generator": generator}
        by_token = (sizes.chunk_tokens, sizes.num_heads, sizes.head_dim)
        self.q_HTD = torch.randn(by_token, **as_tensor).transpose(0, 1)
        self.dout_HTD = torch.randn(by_token, **as_tensor).transpose(0, 1)
        self.num_pages = past // sizes.page_tokens
        record = (2, sizes.page_tokens, sizes.head_dim)
        self.pool = torch.randn(sizes.num_groups * self.num_pages, *record, **as_tensor)
        self.grad_pools = {dtype: torch.zeros_like(self.pool, dtype=dtype) for dtype in sizes.page_grad_dtypes}
        order = torch.randperm(len(self.pool), device=device, generator=generator)
        self.slots_GN = order.view(sizes.num_groups, self.num_pages).int()
        self.scales_GN2: Tensor | None = None
        if sizes.float8:
            self.pool, scales_S2 = quantize_pages(self.pool)
            self.scales_GN2 = scales_S2[self.slots_GN.long()]
        self.parts = parts_of(sizes.page_tokens)
        self.centroids_GCD = torch.randn(sizes.num_groups, self.num_pages * self.parts, sizes.head_dim, **as_tensor)
        self.span_k, self.span_v = torch.randn(2, sizes.num_groups, sizes.span_tokens, sizes.head_dim, **as_tensor)
        call = AttentionCall(scale=sizes.scale)
        self.dense_call = call
        self.backend = choose_backend(
            "auto",
            device=device,
            dtype=sizes.dtype,
            head_dim=sizes.head_dim,
            call=call,
            num_q=sizes.chunk_tokens,
            num_k=sizes.span_tokens,
        )

    @cached_property
    def dense(self) -> tuple[Tensor, Tensor]:
        """Output and LSE of the dense call: also what the page kernels merge with."""
        return dense_attention_forward(self.q_HTD, self.span_k, self.span_v, self.dense_call, self.backend)

    def lists(self, kind: Kind, top_k: int) -> PageLists:
        sizes = self.sizes
        return draw_lists(
            kind,
            num_groups=sizes.num_groups,
            num_blocks=-(-sizes.chunk_tokens // sizes.block_tokens),
            num_pages=self.num_pages,
            top_k=top_k,
            block_tokens=sizes.block_tokens,
            device=self.device,
            seed=sizes.seed + 1,
        )


def bench_attention(
    sizes: AttentionSizes,
    measure: Measure,
    device: torch.device,
    *,
    flex: bool,
    compile_flex: Callable[[], Callable[..., Any]] = compiled_flex,
) -> Iterator[AttentionRow]:
    """Check the kernels, then measure every configuration.

    Yields: one row per configuration and dtype of page gradients, as soon as it is measured. A configuration that does
        not fit into memory has a note instead of figures.

    Raises:
        RuntimeError: the kernels are wrong; nothing is measured then.
    """
    size = CheckSize(sizes.head_dim, sizes.num_groups, sizes.group, sizes.page_tokens, sizes.block_tokens)
    check_kernels(size, sizes.dtype, device, sizes.page_grad_dtypes, float8=sizes.float8)
    inputs: AttentionInputs | None = None
    compiled: Callable[..., Any] | None = None
    for kind, top_k, past in sizes.configurations():
        rows = [AttentionRow(kind, top_k, past, dtype_name(dtype)) for dtype in sizes.page_grad_dtypes]
        try:
            if inputs is None or inputs.past != past:
                inputs = None  # the old one's memory, before the new one's
                inputs, compiled = AttentionInputs(sizes, past, device), compile_flex() if flex else None
            rows = _measured(rows, inputs, measure, compiled)
        except torch.OutOfMemoryError as error:
            inputs = None
            rows = [replace(row, notes=(f"past {past:,} is left out: {first_line(error)}",)) for row in rows]
        yield from rows


def own_tasks(inputs: AttentionInputs, lists: PageLists, out_HTD: Tensor, lse_HT: Tensor) -> dict[str, Task]:
    """The page kernels as training calls them: the forward goes on from attention over other keys, with which it is
    merged, and the backward gets the merged output and LSE, and adds to a dQ and to page gradients. And the forward
    over the pages alone.
    """
    sizes, slots_GN, top_k = inputs.sizes, inputs.slots_GN, lists.pages_GBK.shape[-1]
    scales_GN2 = inputs.scales_GN2

    def forward(others: tuple[Tensor, Tensor] | None) -> object:
        return page_attention_forward(
            inputs.q_HTD, inputs.pool, slots_GN, lists, scale=sizes.scale, others=others, scales_GN2=scales_GN2
        )

    def backward(grad_pool: Tensor) -> object:
        return page_attention_backward(
            inputs.dout_HTD,
            inputs.q_HTD,
            out_HTD,
            lse_HT,
            inputs.pool,
            slots_GN,
            grad_pool,
            slots_GN,
            lists,
            scale=sizes.scale,
            seed=0,
            dq_HTD=inputs.dense[0],
            scales_GN2=scales_GN2,
        )

    def select(_: Any) -> object:
        pooled = pool_queries(inputs.q_HTD, POOLED_TOKENS)
        mass = page_mass(
            pooled,
            inputs.centroids_GCD,
            parts=inputs.parts,
            scale=sizes.scale,
            block_rows=sizes.block_tokens // POOLED_TOKENS,
        )
        return top_pages(mass, top_k)

    backwards = {
        f"backward {dtype_name(dtype)}": Task(backward, prepare=_constant(pool))
        for dtype, pool in inputs.grad_pools.items()
    }
    return {
        "forward": Task(lambda _: forward(inputs.dense)),
        "forward alone": Task(lambda _: forward(None)),
        **backwards,
        "index": Task(lambda _: build_page_index(lists, unit_blocks(lists, inputs.pool[0].numel()))),
        "selection": Task(select),
    }


def _measured(
    rows: list[AttentionRow], inputs: AttentionInputs, measure: Measure, compiled: Callable[..., Any] | None
) -> list[AttentionRow]:
    """Rows of one configuration, which differ in the dtype of page gradients."""
    sizes, row = inputs.sizes, rows[0]
    lists = inputs.lists(row.lists, row.top_k)  # type: ignore[arg-type]
    merged = page_attention_forward(
        inputs.q_HTD,
        inputs.pool,
        inputs.slots_GN,
        lists,
        scale=sizes.scale,
        others=inputs.dense,
        scales_GN2=inputs.scales_GN2,
    )
    span = (inputs.span_k, inputs.span_v)
    tasks = own_tasks(inputs, lists, *merged)
    tasks["dense forward"] = Task(
        lambda _: dense_attention_forward(inputs.q_HTD, *span, inputs.dense_call, inputs.backend)
    )
    tasks["dense backward"] = Task(
        lambda _: dense_attention_backward(
            inputs.dout_HTD, inputs.q_HTD, *span, *inputs.dense, inputs.dense_call, inputs.backend
        )
    )
    notes = [f"dense is {inputs.backend} over {sizes.span_tokens:,} keys"]
    if compiled is not None:
        try:
            pages_only, _ = page_attention_forward(inputs.q_HTD, inputs.pool, inputs.slots_GN, lists, scale=sizes.scale)
            tasks |= flex_tasks(
                inputs.q_HTD,
                inputs.dout_HTD,
                inputs.pool,
                inputs.slots_GN,
                lists,
                scale=sizes.scale,
                expected_HTD=pages_only,
                compiled=compiled,
            )
        except Exception as error:  # a compiler has many ways to fail, and none of them is ours
            notes.append(f"no FlexAttention at past {row.past:,}: {type(error).__name__}: {first_line(error)}")
    ms = measure(tasks)
    visited = forward_flops(sizes.num_heads, sizes.chunk_tokens, row.top_k * sizes.page_tokens, sizes.head_dim)
    dense = forward_flops(sizes.num_heads, sizes.chunk_tokens, sizes.span_tokens, sizes.head_dim)

    def timed(task: str, flops: float) -> Timed:
        return Timed(ms[task], flops) if task in ms else NOT_MEASURED

    return [
        replace(
            row,
            forward=timed("forward", visited),
            alone_ms=ms["forward alone"],
            backward=timed(f"backward {row.page_grads}", BACKWARD * visited),
            index_ms=ms["index"],
            selection_ms=ms["selection"],
            dense_forward=timed("dense forward", dense),
            dense_backward=timed("dense backward", BACKWARD * dense),
            flex_forward=timed("flex forward", visited),
            flex_backward=timed("flex backward", BACKWARD * visited),
            notes=tuple(notes),
        )
        for row in rows
    ]


def _constant(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


def first_line(error: Exception) -> str:
    """What an error says first."""
    return (str(error).splitlines() or ["no message"])[0]
