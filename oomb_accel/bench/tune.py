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
from oomb_kernels.page_backward import launch_page_attention_dkv, launch_page_attention_dq, unit_blocks
from oomb_kernels.page_forward import launch_page_attention_forward
from oomb_kernels.page_index import build_page_index
from oomb_kernels.page_tiles import Kernel, Tiles, choose_tiles, shared_memory_of

_OPERATIONS: dict[Kernel, float] = {"forward": 1.0, "backward_q": 1.5, "backward_kv": 2.0}
"""Matrix products of each kernel over the two of the forward; both backward kernels compute the scores anew."""
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
    stages = (1, 2, 3) if kernel == "backward_kv" else (2, 3, 4)
    for block_m, block_n, num_warps, num_stages in itertools.product(rows, (32, 64, 128), (4, 8), stages):
        area = block_m * block_n
        feeds = area <= 64 * 128 if num_warps == 4 else area >= 64 * 64
        if block_tokens % block_m == 0 and page_tokens % block_n == 0 and feeds:
            yield Tiles(block_m, block_n, num_warps, num_stages)


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
        )
        tried = dict.fromkeys([chosen, *candidates(kernel, sizes.block_tokens, sizes.page_tokens)])
        found = [TuningResult(kernel, tiles, flops * _OPERATIONS[kernel], is_chosen=tiles == chosen) for tiles in tried]
        results += _measured(found, launch, measure)
    return results


def tuning_table(results: Sequence[TuningResult]) -> str:
    """A markdown table of the best of each kernel, and the library's choice where it is not among them."""
    lines = ["| kernel | block_m | block_n | warps | stages | ms | TFLOP/s | |", "|---" * 8 + "|"]
    for kernel in get_args(Kernel):
        of_kernel = [result for result in results if result.kernel == kernel]
        runs = [result for result in of_kernel if not result.problem]
        for result in runs[:_SHOWN] + [result for result in runs[_SHOWN:] if result.is_chosen]:
            t = result.tiles
            mark = "in use" if result.is_chosen else ""
            lines.append(
                f"| {kernel} | {t.block_m} | {t.block_n} | {t.num_warps} | {t.num_stages} | {result.ms:.3f} | "
                f"{result.tflops:.0f} | {mark} |"
            )
        lines.append(f"| {kernel} | {len(of_kernel) - len(runs)} of {len(of_kernel)} do not run ||||||||")
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
    sizes, pages = inputs.sizes, (inputs.pool, inputs.slots_GN)
    lists = inputs.lists("random", sizes.usual[0])
    q, dout, scale = inputs.q_HTD, inputs.dout_HTD, sizes.scale
    out, lse = page_attention_forward(q, *pages, lists, scale=scale, others=inputs.dense)
    _, delta = launch_page_attention_dq(dout, q, out, lse, *pages, lists, scale=scale)
    index = build_page_index(lists, unit_blocks(lists, inputs.pool[0].numel()))
    grads = (inputs.grad_pools[sizes.page_grad_dtypes[0]], inputs.slots_GN)
    return {
        "forward": lambda tiles: launch_page_attention_forward(
            q, *pages, lists, scale=scale, others=inputs.dense, tiles=tiles
        ),
        "backward_q": lambda tiles: launch_page_attention_dq(
            dout, q, out, lse, *pages, lists, scale=scale, tiles=tiles
        ),
        "backward_kv": lambda tiles: launch_page_attention_dkv(
            dout, q, lse, delta, *pages, *grads, lists, index, scale=scale, seed=0, tiles=tiles
        ),
    }
