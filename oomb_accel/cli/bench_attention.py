"""``oomb bench attention``: the kernel table of docs/benchmarks.md on this machine's GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from oomb_accel.bench.attention import AttentionSizes, bench_attention
from oomb_accel.bench.figures import FLOOR_FLOPS_PER_SECOND, AttentionRow, attention_table
from oomb_accel.bench.timing import device_times
from oomb_accel.bench.tune import tune, tuning_table
from oomb_accel.cli import env
from oomb_accel.cli.devices import has_nvidia_gpu, what_torch_sees
from oomb_accel.cli.options import Parser, num_tokens
from oomb_accel.cli.report_file import add_json_option, check_writable, tables_beside, write_json
from oomb_accel.plan.limits import check_page_kernels
from oomb_accel.plan.sizes import parts_of
from oomb_accel.setting_text import dtype_name

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PAGE_GRAD_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_QUICK: dict[str, Any] = {"chunk_tokens": 1024, "span_tokens": 4096, "top_k": [4], "past": [8192], "repeats": 3}
_FULL: dict[str, Any] = {
    "chunk_tokens": 8192,
    "span_tokens": 32768,
    "top_k": [16, 32, 64],
    "past": [131072, 262144, 524288, 1048576],
    "repeats": 20,
}


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table.

    Raises:
        ValueError: sizes that do not fit together.
        RuntimeError: no GPU, or kernels that compute something wrong.
    """
    options = _parser().parse_args(arguments)
    if not has_nvidia_gpu():
        raise RuntimeError(
            f"oomb bench attention needs an NVIDIA GPU.\n  {what_torch_sees()}\n"
            "  Run it on a machine with one; oomb env says what torch sees there."
        )
    preset = _QUICK if options.quick else _FULL
    chosen = {
        name: value if getattr(options, name) is None else getattr(options, name) for name, value in preset.items()
    }
    sizes = AttentionSizes(
        head_dim=options.head_dim,
        num_groups=options.kv_heads,
        group=options.group,
        chunk_tokens=chosen["chunk_tokens"],
        page_tokens=options.page_tokens,
        block_tokens=options.q_block,
        top_k=tuple(chosen["top_k"]),
        past=tuple(chosen["past"]),
        dtype=_DTYPES[options.dtype],
        span_tokens=chosen["span_tokens"],
        page_grad_dtypes=tuple(_PAGE_GRAD_DTYPES[name] for name in dict.fromkeys(options.page_grad_dtype)),
        float8=options.page_dtype == "float8",
        seed=options.seed,
    )
    pages = "float8" if sizes.float8 else dtype_name(sizes.dtype)
    check_page_kernels(pages, sizes.head_dim, sizes.page_tokens, sizes.block_tokens)
    check_writable(options.json)
    with tables_beside(options.json):
        report = _measured(options, sizes, chosen["repeats"])
    write_json(report, options.json)
    return 0


def _measured(options: argparse.Namespace, sizes: AttentionSizes, repeats: int) -> dict[str, Any]:
    """Measure and print; returns the report for JSON."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = env.collect()
    print(_describe(sizes, found, repeats, device), flush=True)
    measure = device_times(device, repeats)
    report: dict[str, Any] = {"environment": found, "sizes": _plain(sizes), "repeats": repeats}
    if options.tune:
        results = tune(sizes, measure, device, on_kernel=lambda name: print(f"trying {name}", file=sys.stderr))
        print(tuning_table(results))
        report["tuning"] = [result.as_dict() for result in results]
        return report
    rows: list[AttentionRow] = []
    flex = not (options.quick or sizes.float8) if options.flex is None else options.flex
    for row in bench_attention(sizes, measure, device, flex=flex):
        rows.append(row)
        print(f"{len(rows)} of {sizes.num_rows}: {row.lists}, top-k {row.top_k}, past {row.past:,}", file=sys.stderr)
    print(attention_table(rows))
    report["rows"] = [row.as_dict() for row in rows]
    return report


def _parser() -> Parser:
    parser = Parser(
        prog="oomb bench attention",
        description="Measure the kernels of sparse attention on this GPU beside dense library attention and "
        "FlexAttention on the same lists: milliseconds and TFLOP/s per visited key, all in one run. The kernels are "
        "checked first; wrong ones are not timed.",
    )
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--group", type=int, default=7, help="query heads of a KV head")
    parser.add_argument("--chunk-tokens", type=num_tokens, help="queries; default 8192")
    parser.add_argument("--page-tokens", type=num_tokens, default=128)
    parser.add_argument("--q-block", type=int, default=128, choices=[64, 128])
    parser.add_argument("--top-k", type=int, nargs="+", help="pages of a list; default 16 32 64")
    parser.add_argument("--past", type=num_tokens, nargs="+", help="tokens to choose from; default 131072 ... 1048576")
    parser.add_argument("--span-tokens", type=num_tokens, help="keys of the dense call; default 32768")
    parser.add_argument("--dtype", default="bfloat16", choices=list(_DTYPES))
    parser.add_argument(
        "--page-dtype",
        default="model",
        choices=["model", "float8"],
        help="storage of K and V; float8 leaves FlexAttention out, which cannot read it",
    )
    parser.add_argument(
        "--page-grad-dtype",
        nargs="+",
        default=["float32"],
        choices=list(_PAGE_GRAD_DTYPES),
        help="of the page gradients that the backward adds to, a row each; default float32",
    )
    parser.add_argument("--repeats", type=int, help="timed turns, of which the median counts; default 20")
    parser.add_argument("--seed", type=int, default=0, help="of the lists and tensors")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats, no FlexAttention")
    parser.add_argument(
        "--flex", action=argparse.BooleanOptionalAction, help="measure FlexAttention too, which takes a compilation"
    )
    parser.add_argument("--tune", action="store_true", help="try launch configurations instead and print the best")
    add_json_option(parser)
    return parser


def _describe(sizes: AttentionSizes, environment: dict[str, dict[str, Any]], repeats: int, device: torch.device) -> str:
    versions = environment["versions"]
    return (
        f"{environment['devices'][str(device)]}; torch {versions['torch']}, triton {versions['triton']}\n"
        f"{sizes.chunk_tokens:,} queries in blocks of {sizes.block_tokens}, {sizes.num_heads} heads over "
        f"{sizes.num_groups} KV heads of {sizes.head_dim}, pages of {sizes.page_tokens} tokens, {sizes.dtype}"
        f"{', pages in float8' if sizes.float8 else ''}; "
        f"medians of {repeats}\n"
        "Rates count what is visited: 4 x heads x queries x keys x head_dim forward, 2.5 times that backward. The "
        "forward goes on from attention over other keys and is merged with it, as in training; alone it has none. "
        "The backward is that of training and has the index in it. Choosing pages comes on top: pooling queries, "
        f"scoring {parts_of(sizes.page_tokens)} mean keys of each page, taking the best. "
        f"Floors are at {FLOOR_FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s.\n"
    )


def _plain(sizes: AttentionSizes) -> dict[str, Any]:
    values = {name: getattr(sizes, name) for name in sizes.__slots__}
    return values | {"dtype": str(sizes.dtype), "page_grad_dtypes": [str(dtype) for dtype in sizes.page_grad_dtypes]}
