"""Launch configurations of the page kernels, measured one beside the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch

from oomb_accel.bench.attention import AttentionInputs, AttentionSizes, first_line
from oomb_accel.bench.figures import forward_flops
from oomb_accel.bench.timing import Measure, Task
from oomb_kernels import page_attention_forward
from oomb_kernels.page_backward import allocate_ds, launch_row_stats, unit_blocks
from oomb_kernels.page_dkv import launch_page_dkv
from oomb_kernels.page_dq import launch_page_dq, launch_page_dq_sum
from oomb_kernels.page_forward import launch_page_attention_forward
from oomb_kernels.page_index import build_page_index
from oomb_kernels.page_tiles import Kernel, Tiles, choose_tiles, shared_memory_of

_OPERATIONS: dict[Kernel, float] = {"forward": 1.0, "backward_q": 1.5, "backward_kv": 2.0, "backward_sum": 0.5}
"""Matrix products of each kernel over the two of the forward. The backward is ``backward_kv`` and ``backward_sum``;
``backward_q`` runs in place of the latter where there is no room for dS."""
_SHOWN = 5
Launch = Callable[[Tiles], object]


@dataclass(frozen=True, slots=True)
class TuningResult:
    """One kernel with one launch configuration."""

    kernel: Kernel
    tiles: Tiles
    flops: float
    ms: float = math.nan
    is_chosen: bool = False
    """Whether the library launches with it."""
    problem: str = ""
    """Why it does not run."""

    @property
    def tflops(self) -> float:
        return self.flops / self.ms / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what was not measured is None."""
        found = asdict(self) | {"tflops": self.tflops}
        return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in found.items()}


def candidates(kernel: Kernel, block_tokens: int, page_tokens: int) -> Iterator[Tiles]:
    """Configurations worth a try: tiles that divide blocks and pages, with as many warps as they can feed."""
    rows = (32, 64, 128) if kernel == "backward_kv" else (64, 128)
    stages = (1, 2, 3, 4) if kernel == "backward_kv" else (2, 3, 4)
    heads = (1, 2) if kernel == "backward_sum" else (1,)
    for block_m, block_n, num_warps, num_stages, num_heads in itertools.product(
        rows, (32, 64, 128), (4, 8), stages, heads
    ):
        area = block_m * block_n
        feeds = area <= 64 * 128 if num_warps == 4 else area >= 64 * 64
        if block_tokens % block_m == 0 and page_tokens % block_n == 0 and feeds:
            yield Tiles(block_m, block_n, num_warps, num_stages, num_heads)


def tune(
    sizes: AttentionSizes,
    measure: Measure,
    device: torch.device,
    *,
    launches: Callable[[AttentionInputs], dict[Kernel, Launch]] | None = None,
    on_kernel: Callable[[str], None] = lambda name: None,
) -> list[TuningResult]:
    """Measure all candidates on random lists of the first past and the middle ``top_k``.

    Args:
        launches: how each kernel is run with given tiles; by default the library's launch functions.
        on_kernel: told the name of each kernel before it is tried.

    Returns: all results, by kernel, fastest first; those that do not run come last.
    """
    top_k, past = sizes.usual
    inputs = AttentionInputs(sizes, past, device)
    flops = forward_flops(sizes.num_heads, sizes.chunk_tokens, top_k * sizes.page_tokens, sizes.head_dim)
    results: list[TuningResult] = []
    for kernel, launch in (launches or _launches)(inputs).items():
        on_kernel(kernel)
        chosen = choose_tiles(
            kernel,
            sizes.head_dim,
            sizes.page_tokens,
            sizes.block_tokens,
            sizes.dtype.itemsize,
            shared_memory_of(device),
            float8=sizes.float8,
        )
        tried = dict.fromkeys([chosen, *candidates(kernel, sizes.block_tokens, sizes.page_tokens)])
        found = [TuningResult(kernel, tiles, flops * _OPERATIONS[kernel], is_chosen=tiles == chosen) for tiles in tried]
        results += _measured(found, launch, measure)
    return results


def tuning_table(results: Sequence[TuningResult]) -> str:
    """A markdown table of the best of each kernel, and the library's choice where it is not among them."""
    lines = ["| kernel | block_m | block_n | warps | stages | heads | ms | TFLOP/s | |", "|---" * 9 + "|"]
    for kernel in get_args(Kernel):
        of_kernel = [result for result in results if result.kernel == kernel]
        runs = [result for result in of_kernel if not result.problem]
        for result in runs[:_SHOWN] + [result for result in runs[_SHOWN:] if result.is_chosen]:
            t = result.tiles
            mark = "in use" if result.is_chosen else ""
            lines.append(
                f"| {kernel} | {t.block_m} | {t.block_n} | {t.num_warps} | {t.num_stages} | {t.num_heads} | "
                f"{result.ms:.3f} | {result.tflops:.0f} | {mark} |"
            )
        lines.append(f"| {kernel} | {len(of_kernel) - len(runs)} of {len(of_kernel)} do not run |||||||||")
    return "\n".join(lines)


def _measured(found: list[TuningResult], launch: Launch, measure: Measure) -> list[TuningResult]:
    tasks: dict[str, Task] = {}
    results = {repr(result.tiles): result for result in found}
    for name, result in results.items():
        try:
            launch(result.tiles)
        except Exception as error:  # too much shared memory, and whatever else a compiler says
            results[name] = replace(result, problem=first_line(error))
        else:
            tasks[name] = _task(launch, result.tiles)
    for name, ms in measure(tasks).items():
        results[name] = replace(results[name], ms=ms)
    return sorted(results.values(), key=lambda result: math.inf if result.problem else result.ms)


def _task(launch: Launch, tiles: Tiles) -> Task:
    return Task(lambda _: launch(tiles))


def _launches(inputs: AttentionInputs) -> dict[Kernel, Launch]:
    """The kernels on the same lists; those of the backward with dS of as many KV heads at a time as in training."""
    sizes, pages = inputs.sizes, (inputs.pool, inputs.slots_GN)
    lists = inputs.lists("random", sizes.usual[0])
    q, dout, scale, scales = inputs.q_HTD, inputs.dout_HTD, sizes.scale, inputs.scales_GN2
    out, lse = page_attention_forward(q, *pages, lists, scale=scale, others=inputs.dense, scales_GN2=scales)
    rows = (dout, q, launch_row_stats(dout, out, lse, sizes.block_tokens))
    index = build_page_index(lists, unit_blocks(lists, inputs.pool[0].numel()))
    grads = (inputs.grad_pools[sizes.page_grad_dtypes[0]], inputs.slots_GN)
    dq = torch.empty_like(out)
    turns, ds = allocate_ds(q, lists, sizes.page_tokens)

    def dkv(tiles: Tiles | None) -> None:
        for groups in turns:
            launch_page_dkv(
                *rows, *pages, *grads, lists, index, groups, ds, scale=scale, seed=0, scales_GN2=scales, tiles=tiles
            )

    found: dict[Kernel, Launch] = {
        "forward": lambda tiles: launch_page_attention_forward(
            q, *pages, lists, scale=scale, others=inputs.dense, scales_GN2=scales, tiles=tiles
        ),
        "backward_q": lambda tiles: launch_page_dq(
            *rows, *pages, lists, dq, scale=scale, dq_HTD=inputs.dense[0], scales_GN2=scales, tiles=tiles
        ),
        "backward_kv": dkv,
    }
    if ds is None:
        return found
    dkv(None)  # the sum gets real numbers: its speed depends on them, a little
    room = ds

    def dq_sum(tiles: Tiles) -> None:
        for groups in turns:
            launch_page_dq_sum(
                room, *pages, lists, groups, dq,
                scale=scale, dq_HTD=inputs.dense[0], scales_GN2=scales, tiles=tiles,
            )  # fmt: skip

    return found | {"backward_sum": dq_sum}
