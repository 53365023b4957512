"""A LoRA adapter on one long document, in a loop of plain PyTorch.

python launch/examples/plain_pytorch.py Qwen/Qwen2.5-7B-Instruct book.txt --output_dir out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import oomb_accel
from oomb_accel import OombConfig


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune on one document.")
    parser.add_argument("model", help="folder or hub id of a model")
    parser.add_argument("text", help="a text file, which is one document")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--max_tokens", type=int, default=32768, help="the rest of the document is left out")
    parser.add_argument("--chunk_tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    options = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = Path(options.text).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.max_tokens].to(device)

    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).to(device)
    model.train()
    oomb_accel.enable(model, OombConfig(chunk_tokens=options.chunk_tokens))

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
    for step in range(1, options.steps + 1):
        # The adapter is fp32 and the base bf16: autocast makes their products bf16.
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
