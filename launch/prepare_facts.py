"""Make the data of the worked example (docs/worked_example.md): documents with planted facts, from a real text.

    python launch/prepare_facts.py demo/facts --model demo/model --text demo/document.txt --tokens 1024

cuts the text into documents of as many tokens, plants facts in each, and writes ``training.jsonl`` (questions at the
end of each document, of which the answers alone are targets) and ``held_out.txt`` and so on (plain pieces of the text
that are not trained on, in which ``oomb eval`` plants facts of its own).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from oomb_accel.cli.options import num_tokens
from oomb_accel.evaluation.planting import plant, training_row
from oomb_accel.evaluation.subject import load_texts

DEPTHS = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)
"""None in the last quarter: a document cut to its end has none of the facts."""


def main() -> int:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts, _ = load_texts(options.model, [options.text], tokenizer)
    ids = [token for text in texts for token in text.ids.tolist()]
    pieces = [ids[start : start + options.tokens] for start in range(0, len(ids), options.tokens)]
    wanted = options.documents + options.held_out
    if len(pieces) < wanted or len(pieces[wanted - 1]) < options.tokens:
        sys.exit(
            f"The text is too short.\n  {len(ids):,} tokens, {wanted} documents of {options.tokens:,} wanted.\n"
            f"  Use --tokens {len(ids) // wanted}, fewer documents or a longer text."
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, piece in enumerate(pieces[: options.held_out]):
        (options.folder / f"held_out_{number}.txt").write_text(tokenizer.decode(piece), encoding="utf-8")
    with (options.folder / "training.jsonl").open("w", encoding="utf-8") as file:
        for number, piece in enumerate(pieces[options.held_out : wanted]):
            planted = plant(
                piece,
                str(tokenizer.decode(piece)),
                lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
                num_tokens=options.tokens,
                depths=DEPTHS,
                per_depth=options.facts_per_depth,
                seed=[options.seed, 1, number],  # oomb eval plants with two numbers
            )
            order = np.random.default_rng([options.seed, number]).permutation(len(planted.facts))[: options.questions]
            file.write(json.dumps(training_row(planted, order.tolist())) + "\n")
    print(f"{options.folder}: {options.documents} documents of {options.tokens:,} tokens, {options.held_out} held out")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="demo/model", help="whose tokenizer is used")
    parser.add_argument("--text", default="demo/document.txt", help="a text file or a folder")
    parser.add_argument("--tokens", type=num_tokens, default=1024, help="of each document; 64K is 65536")
    parser.add_argument("--documents", type=int, default=8, help="for training")
    parser.add_argument("--held_out", type=int, default=2, help="documents")
    parser.add_argument("--facts_per_depth", type=int, default=1, help=f"at each of {len(DEPTHS)} depths")
    parser.add_argument("--questions", type=int, default=4, help="at the end of each document")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
