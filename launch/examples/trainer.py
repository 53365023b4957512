"""A LoRA adapter on long documents with transformers' Trainer.

python launch/examples/trainer.py Qwen/Qwen2.5-7B-Instruct one.txt two.txt --output_dir out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from oomb_accel import OombCallback, OombConfig


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune on documents.")
    parser.add_argument("model", help="folder or hub id of a model")
    parser.add_argument("texts", nargs="+", help="text files, each of which is one document")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--max_tokens", type=int, default=32768, help="the rest of a document is left out")
    parser.add_argument("--chunk_tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [Path(path).read_text(encoding="utf-8") for path in options.texts]
    rows = [tokenizer(text, truncation=True, max_length=options.max_tokens)["input_ids"] for text in texts]

    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16 if on_gpu else torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Trainer(
        model=get_peft_model(base, lora),
        args=TrainingArguments(
            output_dir=options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            bf16=on_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        callbacks=[OombCallback(OombConfig(chunk_tokens=options.chunk_tokens))],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
