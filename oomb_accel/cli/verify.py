"""``oomb verify``: chunk recurrence against full attention, on the user's own model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oomb_accel.cli import verify_sparse, verify_storage
from oomb_accel.cli.devices import device_named
from oomb_accel.cli.options import WITHOUT_RECIPE, Parser, add_trust_option, num_tokens
from oomb_accel.cli.report_file import add_json_option, check_writable, tables_beside, write_json
from oomb_accel.cli.sparse_options import add_sparse_options, joined, sparse_settings
from oomb_accel.cli.verify_inputs import documents_of, load, trained
from oomb_accel.cli.verify_tables import parity_rows, parity_table
from oomb_accel.config import OombConfig
from oomb_accel.integrations.parity import check_parity, check_parity_low_precision
from oomb_accel.integrations.support import base_model_of, model_facts, refusals
from oomb_accel.reading import refusal
from oomb_accel.spelling import settings_called

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_DENSE: dict[str, Any] = {
    **{"layers": 2, "tokens": 600, "chunk_tokens": 128, "page_tokens": 16, "span_tokens": 256, "dtype": "float64"}
}


@settings_called({**WITHOUT_RECIPE, "data_path": "--text", "model_name_or_path": "MODEL", "text_field": ""})
def main(arguments: Sequence[str]) -> int:
    """Check one model; prints a table.

    Returns: 0 when everything is within its limit, 1 when not.
    """
    options = _parser().parse_args(joined(arguments))
    device = device_named(options.device)
    is_sparse = options.attention == "sparse"
    for name, value in (verify_sparse.defaults(device) if is_sparse else _DENSE).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    config = _config(options)  # contradictions come out before anything is loaded
    check_writable(options.json)
    if options.tokens < 8:
        raise ValueError(f"Too few tokens to cut into chunks.\n  Got --tokens {options.tokens}.\n  Use --tokens 600.")
    torch.manual_seed(options.seed)
    model = load(options.model, options.layers, options.random_weights, trust_remote_code=options.trust_remote_code)
    reasons = refusals(model, base_model_of(model))
    if reasons:
        raise ValueError(refusal("This model is not supported", reasons))
    documents = documents_of(options, model, device)
    with tables_beside(options.json):
        run = verify_sparse.run if is_sparse else _run_dense
        passed, report = run(options, verify_storage.exact(config), model, documents, device)
        if config != verify_storage.exact(config):
            del model
            torch.manual_seed(options.seed)
            model = load(options.model, options.layers, options.random_weights)
            report["storage"] = verify_storage.run(options, config, model, documents, device)
    write_json(report, options.json)
    return 0 if passed else 1


def _run_dense(
    options: argparse.Namespace,
    config: OombConfig,
    model: PreTrainedModel,
    documents: list[Tensor],
    device: torch.device,
) -> tuple[bool, dict[str, Any]]:
    """Check and print. Returns whether it passed, and the report for JSON."""
    dtype = _DTYPES[options.dtype]
    checked = trained(model, options, torch.float64, device)
    if dtype == torch.float64:
        report = check_parity(checked, config, documents)
    else:
        report = check_parity_low_precision(checked, config, documents, dtype)
    print(_describe(options, model, documents, device))
    print(parity_table(report, show_all=options.all))
    return report.passed, {"settings": config.to_dict(), "exactness": parity_rows(report)}


def _parser() -> Parser:
    parser = Parser(
        prog="oomb verify",
        description="Compare loss, per-token loss, every trainable gradient and the input-embedding gradient of "
        "chunk recurrence with full attention, on your model. With --attention sparse: what the sparsity costs in loss "
        "and gradient on your model and text, and the same comparison with attention masked to the selected pages. "
        "Exit code 1 when one is off.",
    )
    parser.add_argument("model", help="folder, hub id, or a config.json (then with random weights)")
    parser.add_argument(
        "--layers",
        type=int,
        help="cut the model to its first layers; 0 keeps all. Default 2; sparse: 4 on the CPU, all on a GPU",
    )
    parser.add_argument("--random-weights", action="store_true", help="use the config only, with random weights")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        help="a text file, folder or .jsonl (of which the longest row counts), once or more; default: random tokens",
    )
    parser.add_argument(
        "--tokens", type=num_tokens, help="longest document. Default 600; sparse: 4096 on the CPU, 32768 on a GPU"
    )
    parser.add_argument(
        "--chunk-tokens", "--chunk_tokens", type=num_tokens, help="default 128; sparse: 512 on the CPU, 4096 on a GPU"
    )
    parser.add_argument(
        "--page-tokens", "--page_tokens", type=num_tokens, help="default 16; sparse: 32 on the CPU, 128 on a GPU"
    )
    parser.add_argument("--span-tokens", "--span_tokens", type=num_tokens, help="earlier tokens of a dense call")
    parser.add_argument("--backend", default="auto", choices=["auto", "cudnn", "flash", "torch"])
    parser.add_argument(
        "--dtype",
        choices=list(_DTYPES),
        help="float64, the default, shows equality; float32 and bfloat16 allow twice the rounding error of plain "
        "training. Sparse: what the cost is measured in, float32 on the CPU, bfloat16 on a GPU",
    )
    for name, values in verify_storage.OPTIONS.items():
        dashed = "--" + name.replace("_", "-")
        text = "also measure what storage so costs in loss and gradient; default %(default)s"
        parser.add_argument(dashed, f"--{name}", choices=values, default=values[0], help=text)
    parser.add_argument("--lora", action="store_true", help="train LoRA on all linears instead of every parameter")
    parser.add_argument("--device", help="default: the GPU when there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="print every gradient, not only the worst ten")
    add_trust_option(parser)
    add_json_option(parser)
    add_sparse_options(parser, "; but without a --top_k it is 16 on the CPU, of small pages")
    return parser


def _config(options: argparse.Namespace) -> OombConfig:
    """The settings under test.

    Raises:
        ValueError: settings that contradict each other, or have no meaning.
    """
    if options.base_dtype == "float8" and not options.lora:
        raise ValueError(
            "Weights that are trained are not stored in 8 bits.\n"
            "  Got --base-dtype float8 without --lora.\n  Add --lora, which freezes them."
        )
    return OombConfig(
        attention=options.attention,
        chunk_tokens=options.chunk_tokens,
        page_tokens=options.page_tokens,
        span_tokens=options.span_tokens,
        backend=options.backend,
        **{name: getattr(options, name) for name in verify_storage.OPTIONS},
        progress=False,
        **sparse_settings(options),
    )


def _describe(
    options: argparse.Namespace, model: PreTrainedModel, documents: list[Tensor], device: torch.device
) -> str:
    lengths = ", ".join(str(len(ids)) for ids in documents)
    rule = "equal" if options.dtype == "float64" else f"at most twice the rounding error of plain {options.dtype}"
    return (
        f"{type(model).__name__}, {model_facts(model).num_layers} layers, {options.dtype} on {device}; "
        f"documents of {lengths} tokens in chunks of {options.chunk_tokens}, pages of {options.page_tokens}; {rule}"
    )
