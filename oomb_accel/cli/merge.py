"""``oomb merge ADAPTER --output_dir OUT``: a model with its adapter merged in, as plain transformers loads it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from oomb_accel.cli.devices import device_named
from oomb_accel.cli.options import WITHOUT_RECIPE, Parser, add_trust_option
from oomb_accel.cli.report_file import add_json_option, check_writable, tables_beside, write_json
from oomb_accel.evaluation.adapter import put_on, rope_of_run
from oomb_accel.evaluation.merging import (
    Verdict,
    check_output,
    compare,
    merge,
    num_bytes,
    probe_ids,
    probe_logits,
    save,
)
from oomb_accel.evaluation.subject import recipe_of
from oomb_accel.integrations.saving import read_config
from oomb_accel.setting_text import dtype_name
from oomb_accel.spelling import settings_called
from oomb_accel.training.model import load_model, load_tokenizer

ROUNDING_SHARE = 0.2
"""Of the adapter's effect; if the difference is more, rounding is worth a word."""


@settings_called({**WITHOUT_RECIPE, "model_name_or_path": "--model"})
def main(arguments: Sequence[str]) -> int:
    """Merge, save, load again and compare.

    Returns: 0; 1 when the saved model does not do what the adapter does.

    Raises:
        ValueError: no adapter, not its model, an adapter that cannot be merged, or no place for the result.
    """
    options = _parser().parse_args(arguments)
    device = device_named(options.device)
    check_writable(options.json)
    name = options.model or _named(options.adapter)
    check_output(options.output_dir)
    recipe = recipe_of(name, rope_of_run(options.adapter), trust_remote_code=options.trust_remote_code)
    tokenizer = load_tokenizer(recipe)
    base: Any = load_model(recipe)
    loaded = base.dtype
    dtype = loaded if options.dtype == "auto" else getattr(torch, options.dtype)
    size = num_bytes(base, dtype)
    check_output(options.output_dir, size)
    adapted = put_on(base, options.adapter).to(device)
    ids = probe_ids(tokenizer, base.config.get_text_config().vocab_size)
    with_adapter = probe_logits(adapted, ids)
    with adapted.disable_adapter():
        without = probe_logits(adapted, ids)
    _say(f"merging {options.adapter} into {name}, {dtype_name(loaded)} -> {dtype_name(dtype)}, {size / 1e9:.2f} GB")
    save(merge(adapted, dtype), tokenizer, options.output_dir)
    del adapted, base
    _say("loading it again to compare")
    again = load_model(recipe_of(str(options.output_dir), trust_remote_code=options.trust_remote_code)).to(device)
    verdict = compare(probe_logits(again, ids), with_adapter, without, (loaded, dtype))
    with tables_beside(options.json):
        print(_text(verdict, options.output_dir))
        if dtype != torch.float32 and verdict.passed and verdict.error > ROUNDING_SHARE * verdict.effect > 0:
            share = verdict.error / verdict.effect
            print(
                f"note: rounding to {dtype_name(dtype)} is {share:.0%} of the adapter's effect; "
                "--dtype float32 keeps more of it, or serve the adapter beside its model"
            )
    report = {"adapter": str(options.adapter), "model": name, "output_dir": str(options.output_dir)}
    write_json(report | {"dtype": dtype_name(dtype), **verdict.as_dict()}, options.json)
    return 0 if verdict.passed else 1


def _named(adapter: Path) -> str:
    """The model that an adapter says it belongs to."""
    name = read_config(adapter).get("base_model_name_or_path")
    if not name:
        raise ValueError(
            f"The adapter in {str(adapter)!r} does not say which model it belongs to.\n"
            "  base_model_name_or_path in its config is empty.\n  Use --model FOLDER."
        )
    return str(name)


def _text(verdict: Verdict, output: Path) -> str:
    end = "PASSED" if verdict.passed else "FAILED: do not use it"
    return (
        f"written {output}\n"
        f"logits of {verdict.num_tokens} tokens, relative difference to the model with its adapter:\n"
        f"  merged, loaded again  {verdict.error:.2e}  (limit {verdict.limit:.0e})\n"
        f"  without the adapter   {verdict.effect:.2e}\n"
        f"same likeliest token behind {verdict.same_choice:.0%} of them: {end}"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="oomb merge",
        description="Write a model with its adapter merged in: safetensors, config and tokenizer, as transformers and "
        "inference servers load it. Sums are made in fp32 and rounded once. The result is loaded again and its logits "
        "are compared; exit code 1 when they are off.",
    )
    parser.add_argument("adapter", type=Path, help="folder of an adapter: output_dir of oomb train, or a checkpoint")
    parser.add_argument("--output_dir", "--output-dir", type=Path, required=True, help="a folder without a model")
    parser.add_argument("--model", help="folder or hub id of the model; what the adapter names if left out")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="of the result; auto is that of the model",
    )
    parser.add_argument("--device", default="cpu", help="where sums are made; cpu if left out")
    add_trust_option(parser)
    add_json_option(parser)
    return parser


def _say(what: str) -> None:
    print(f"oomb merge: {what}", file=sys.stderr, flush=True)
