"""A LoRA adapter on long documents, in a loop of Accelerate: one process, DDP or ZeRO, by the launch command.

python launch/examples/accelerate_loop.py Qwen/Qwen2.5-7B-Instruct one.txt two.txt --output_dir out
accelerate launch --config_file configs/accelerate/zero2.yaml --num_processes 8 \
  launch/examples/accelerate_loop.py Qwen/Qwen2.5-7B-Instruct *.txt --output_dir out
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import oomb_accel
from oomb_accel import OombConfig


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune on documents.")
    parser.add_argument("model", help="folder or hub id of a model")
    parser.add_argument("texts", nargs="+", help="text files, each of which is one document")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--max_tokens", type=int, default=32768, help="the rest of a document is left out")
    parser.add_argument("--chunk_tokens", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    options = parser.parse_args(arguments)

    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    set_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [Path(path).read_text(encoding="utf-8") for path in options.texts]
    rows = [tokenizer(text, truncation=True, max_length=options.max_tokens)["input_ids"] for text in texts]
    documents: Any = [{"input_ids": ids, "labels": ids} for ids in rows]
    loader = DataLoader(documents, batch_size=1, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer))

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
    config = OombConfig(chunk_tokens=options.chunk_tokens)
    model, optimizer, loader = oomb_accel.prepare(accelerator, model, optimizer, loader, config=config)

    model.train()
    for epoch in range(1, options.epochs + 1):
        for batch in loader:
            # Every target of a step weighs the same, whichever process has it: divide by their number over all
            # processes, and undo the mean over processes that DDP and ZeRO take.
            targets = torch.tensor(oomb_accel.count_targets(batch), device=accelerator.device)
            targets = accelerator.reduce(targets, "sum")
            loss = model(**batch, num_targets=int(targets)).loss
            accelerator.backward(loss * accelerator.num_processes)
            accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'sum').item():.4f}", flush=True)

    oomb_accel.deepspeed.save_adapter(model, options.output_dir)  # under DDP and without DeepSpeed too
    if accelerator.is_main_process:
        tokenizer.save_pretrained(options.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
