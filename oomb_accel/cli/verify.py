"""``oomb verify``: chunk recurrence against full attention, on the user's own model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from oomb_accel.config import OombConfig
from oomb_accel.integrations.parity import ParityReport, check_parity, check_parity_low_precision
from oomb_accel.integrations.support import base_model_of, model_facts, refusals
from oomb_accel.training.model import check_folder, load_error

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str]) -> int:
    """Check one model; prints a table.

    Returns: 0 when everything is within its limit, 1 when not.
    """
    options = _parser().parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("There is no CUDA device here.\n  Got --device cuda.\n  Use --device cpu.")
    dtype = _DTYPES[options.dtype]
    torch.manual_seed(options.seed)
    model = _load(options.model, options.layers, options.random_weights)
    reasons = refusals(model, base_model_of(model))
    if reasons:
        raise ValueError("This model is not supported:\n  - " + "\n  - ".join(reasons))
    checked: nn.Module = nn.Module.to(model, device=device, dtype=torch.float64)
    if options.lora:
        checked = _with_lora(model)
    config = OombConfig(
        chunk_tokens=options.chunk_tokens,
        page_tokens=options.page_tokens,
        span_tokens=options.span_tokens,
        backend=options.backend,
        progress=False,
    )
    documents = _documents(options.tokens, base_model_of(checked).config.get_text_config().vocab_size, device)
    if dtype == torch.float64:
        report = check_parity(checked, config, documents)
    else:
        report = check_parity_low_precision(checked, config, documents, dtype)
    print(_describe(options, model, documents, device))
    print(_table(report, show_all=options.all))
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oomb verify",
        description="Compare loss, per-token loss, every trainable gradient and the input-embedding gradient of "
        "chunk recurrence with full attention, on your model. Exit code 1 when one is off.",
    )
    parser.add_argument("model", help="folder, hub id, or a config.json (then with random weights)")
    parser.add_argument("--layers", type=int, default=2, help="cut the model to its first layers; 0 keeps all")
    parser.add_argument("--random-weights", action="store_true", help="use the config only, with random weights")
    parser.add_argument("--tokens", type=int, default=600, help="length of the longest of three documents")
    parser.add_argument("--chunk-tokens", "--chunk_tokens", type=int, default=128)
    parser.add_argument("--page-tokens", "--page_tokens", type=int, default=16)
    parser.add_argument("--span-tokens", "--span_tokens", type=int, default=256)
    parser.add_argument("--backend", default="auto", choices=["auto", "cudnn", "flash", "torch"])
    parser.add_argument(
        "--dtype",
        default="float64",
        choices=list(_DTYPES),
        help="float64 shows equality; float32 and bfloat16 allow twice the rounding error of plain training",
    )
    parser.add_argument("--lora", action="store_true", help="train LoRA on all linears instead of every parameter")
    parser.add_argument("--device", help="default: the GPU when there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="print every gradient, not only the worst ten")
    return parser


def _load(name: str, layers: int, random_weights: bool) -> PreTrainedModel:
    path = Path(name)
    if path.suffix == ".json" and not path.is_file():
        raise ValueError(f"There is no file {name}.\n  Pass a folder, a hub id or an existing config.json.")
    if layers < 0:
        raise ValueError(f"A model cannot be cut to {layers} layers.\n  Use --layers 2, or 0 to keep all.")
    random_weights = random_weights or path.suffix == ".json"
    source = str(path.parent) if path.suffix == ".json" else name
    check_folder(source)
    try:
        return _build(source, layers, random_weights)
    except (OSError, ValueError) as error:
        raise load_error(name, error) from error


def _build(source: str, layers: int, random_weights: bool) -> PreTrainedModel:
    logging.set_verbosity_error()  # weights of layers that are cut off are no news
    config = AutoConfig.from_pretrained(source)
    text = config.get_text_config()
    if layers:
        text.num_hidden_layers = min(layers, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
    if random_weights:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model


def _with_lora(model: PreTrainedModel) -> nn.Module:
    """LoRA with random B: with its usual zeros, A would get no gradient to compare."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


def _documents(tokens: int, vocab_size: int, device: torch.device) -> list[Tensor]:
    if tokens < 8:
        raise ValueError(f"Too few tokens to cut into chunks.\n  Got --tokens {tokens}.\n  Use --tokens 600.")
    lengths = (tokens, tokens * 2 // 3 + 1, max(tokens // 7, 2))
    return [torch.randint(0, vocab_size, (length,), device=device) for length in lengths]


def _describe(
    options: argparse.Namespace, model: PreTrainedModel, documents: list[Tensor], device: torch.device
) -> str:
    lengths = ", ".join(str(len(ids)) for ids in documents)
    rule = "equal" if options.dtype == "float64" else f"at most twice the rounding error of plain {options.dtype}"
    return (
        f"{type(model).__name__}, {model_facts(model).num_layers} layers, {options.dtype} on {device}; "
        f"documents of {lengths} tokens in chunks of {options.chunk_tokens}, pages of {options.page_tokens}; {rule}"
    )


def _table(report: ParityReport, *, show_all: bool) -> str:
    first, gradients = list(report.rows[:3]), sorted(report.rows[3:], key=lambda row: row.error, reverse=True)
    shown = first + (gradients if show_all else gradients[:10])
    shown += [row for row in gradients if not row.passed and row not in shown]
    width = max(len(row.name) for row in shown)
    lines = [f"{'compared':<{width}}  {'error':>9}  {'limit':>9}"]
    lines += [
        f"{row.name:<{width}}  {row.error:9.2e}  {row.limit:9.2e}  {'ok' if row.passed else 'FAILED'}" for row in shown
    ]
    hidden = len(report.rows) - len(shown)
    if hidden:
        lines.append(f"... and {hidden} more gradients with smaller errors, all ok (--all shows them)")
    failed = sum(not row.passed for row in report.rows)
    lines.append(f"{len(report.rows)} compared, {failed} failed: {'FAILED' if failed else 'PASSED'}")
    return "\n".join(lines)
