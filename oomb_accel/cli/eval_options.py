"""The options of ``oomb eval``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomb_accel.cli.options import Parser, add_trust_option, num_tokens, tokens_of
from oomb_accel.cli.report_file import add_json_option
from oomb_accel.cli.sparse_options import add_sparse_options, joined
from oomb_accel.config import unknown_message
from oomb_accel.evaluation.windows import WHOLE
from oomb_accel.reading import shown

PARTS = ("context", "facts", "position")
DEPTHS = "5,15,25,35,45,55,65,75,85,95"
_LEAST = {
    **{"tokens": 2, "max_documents": 1, "last_tokens": 2, "facts_per_depth": 1, "questions_per_pass": 1},
    **{"first_bucket": 1, "chunk_tokens": 1, "page_tokens": 1},
}
"""Options that are whole numbers, and their least values."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with lists and numbers in their own types.

    Raises:
        ValueError: a value that has no meaning.
    """
    options = _parser().parse_args(joined(arguments))
    options.parts = _parts(options.parts)
    options.contexts = None if options.contexts is None else _contexts(options.contexts)
    options.depths = _depths(options.depths)
    for name, least in _LEAST.items():
        setattr(options, name, _number(name, getattr(options, name), least))
    return options


def _parser() -> Parser:
    parser = Parser(
        prog="oomb eval",
        description="What a model makes of long documents, read in chunks, without full logits. With --adapter every "
        "figure is given with the adapter off and on. Attention is dense, as a model is served.",
    )

    def add(name: str, default: object = None, **settings: Any) -> None:
        parser.add_argument(*dict.fromkeys([name, f"--{name[2:].replace('_', '-')}"]), default=default, **settings)

    parser.add_argument("model", help="folder or hub id")
    add("--adapter", type=Path, help="folder of an adapter: output_dir of oomb train, or a checkpoint")
    add("--data", nargs="+", required=True, metavar="PATH", help="held-out text files, folders or .jsonl files")
    add(
        "--parts",
        ",".join(PARTS),
        help="some of context (loss on the same last tokens with more and more before them), facts (planted at known "
        "depths, asked at the end), position (loss by position), separated by commas; all if left out",
    )
    add_json_option(parser)
    add("--plot", type=Path, metavar="FOLDER", help="also draw eval_*.png into this folder, which is made if need be")
    add("--tokens", help="length of the documents, of which the beginning is used; the whole ones if left out")
    add("--max_documents", help="use the first so many documents; all if left out")
    add(
        "--contexts",
        help="context lengths, such as 0,4K,all; if left out 0, 512, four times as many, and so on to the whole",
    )
    add("--last_tokens", "512", help="context: tokens that are scored (512)")
    add("--depths", DEPTHS, help=f"facts: where they stand, in percent of the document ({DEPTHS.replace('%', '%%')})")
    add("--facts_per_depth", "1", help="facts: how many at each depth (1)")
    add(
        "--questions_per_pass",
        "1",
        help="facts: how many questions stand one behind the other; 1, each alone, is the cleanest, more are faster",
    )
    add("--first_bucket", "512", help="position: tokens of the first bucket (512)")
    add("--text_field", "text", help="name of the text in the rows of a .jsonl file (text)")
    add(
        "--folder_as",
        "auto",
        choices=["auto", "document", "files"],
        help="what a folder is: one document, or its files one by one; auto is files where all are .jsonl and the like",
    )
    add("--seed", 0, type=int, help="of facts, order of questions and bootstrap (0)")
    add(
        "--dtype",
        "auto",
        choices=["auto", "float32", "bfloat16", "float64"],
        help="of the weights; auto is the checkpoint's own on a GPU, float32 on the CPU",
    )
    add("--device", help="default: the GPU when there is one")
    add("--chunk_tokens", help="default 8192 on a GPU, 1024 on the CPU")
    add("--page_tokens", help="default 128 on a GPU, 32 on the CPU")
    add("--backend", "auto", choices=["auto", "cudnn", "flash", "torch"])
    add(
        "--rope_parameters",
        help="RoPE scaling for documents beyond the model's range, as in a recipe; if left out, what the adapter was "
        "trained with",
    )
    add("--beyond_trained_length", False, action="store_true", help="go beyond the range of the model as it is")
    add_trust_option(parser)
    add_sparse_options(parser)
    return parser


def _parts(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in PARTS:
            raise ValueError(unknown_message("part", word, list(PARTS), f"in --parts {text}"))
    if not found:
        raise ValueError(f"--parts names nothing.\n  Got {text!r}.\n  Use some of {','.join(PARTS)}.")
    return [part for part in PARTS if part in found]


def _contexts(text: str) -> tuple[int, ...]:
    """Ascending, the whole document last."""
    words = [word.strip() for word in text.split(",")]
    try:
        numbers = sorted({num_tokens(word) for word in words if word != "all"})
    except argparse.ArgumentTypeError:
        numbers = [-1]
    if numbers and numbers[0] < 0:
        raise ValueError(
            f"--contexts has a value that is not allowed.\n  Got {text!r}.\n"
            "  Use numbers of tokens and all, such as --contexts 0,4096,all"
        )
    return (*numbers, *([WHOLE] if "all" in words else []))


def _depths(text: str) -> tuple[float, ...]:
    try:
        percents = [float(word) for word in text.split(",")]
    except ValueError:
        percents = [-1.0]
    if not all(0 <= percent <= 100 for percent in percents):
        raise ValueError(
            f"--depths has a value that is not allowed.\n  Got {text!r}.\n"
            "  Use percentages from 0 to 100, such as --depths 5,50,95"
        )
    return tuple(sorted({percent / 100 for percent in percents}))


def _number(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    value = tokens_of(text)
    if value is None or value < least:
        raise ValueError(
            f"--{name} has a value that is not allowed.\n  Got {shown(text)}.\n  Use a whole number from {least} on."
        )
    return value
