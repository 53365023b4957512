"""A model folder and a document for `oomb train`, where no hub can be reached: real shapes, seeded random weights, and
the words of real source files as tokens.

    python -m benchmarks.long_document long --shape qwen2.5-7b --tokens 1048576
    oomb train --model_name_or_path long/model --data_path long/document-1048576.jsonl --output_dir long/out \\
      --max_steps 2 --oomb.attention sparse --oomb.top_k 64 --oomb.page_grad_dtype bfloat16

Speed and memory do not depend on the weights, but for which pages they select; words repeat as they do in source code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from oomb_accel.bench.models import SHAPES, base_model
from oomb_accel.cli import MISUSED, OK
from oomb_accel.cli.options import Parser, num_tokens

_WORD = re.compile(r"\w+|[^\w\s]|\n\s*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write them; returns the exit code.

    Args:
        arguments: those of the process when None.
    """
    parser = Parser(
        prog="benchmarks.long_document", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--tokens", type=num_tokens, nargs="+", default=[1_048_576], help="a document of each length")
    try:
        _write(parser.parse_args(arguments))
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return MISUSED
    return OK


def _write(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    _write_model(options.shape, options.folder / "model")
    for tokens in options.tokens:
        _write_document(tokens, SHAPES[options.shape]["vocab_size"], options.folder / f"document-{tokens}.jsonl")


def _write_model(shape: str, folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = base_model(shape, device)
    _write_tokenizer(folder)
    model.save_pretrained(folder, max_shard_size="4GB")


def _write_tokenizer(folder: Path) -> None:
    """One that knows nothing: documents come as numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)


def _write_document(tokens: int, vocabulary: int, path: Path) -> None:
    ids: list[int] = []
    for word in _words():
        ids.append(2 + zlib.crc32(word.encode()) % (vocabulary - 2))
        if len(ids) == tokens:
            path.write_text(json.dumps({"input_ids": ids}) + "\n")
            return
    raise ValueError(
        f"The installed packages have {len(ids):,} words only.\n  Got --tokens {tokens:,}.\n  Use {len(ids):,} or less."
    )


def _words() -> Iterator[str]:
    """Of the standard library's and the installed packages' source files, in the order of their paths."""
    folders = [Path(sysconfig.get_path("stdlib")), *(Path(name) for name in sys.path[1:] if Path(name).is_dir())]
    for folder in dict.fromkeys(folders):
        for path in sorted(folder.rglob("*.py")):
            yield from _WORD.findall(path.read_text(encoding="utf-8", errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
