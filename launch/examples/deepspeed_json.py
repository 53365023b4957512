"""A LoRA adapter on long documents with DeepSpeed by itself; settings stand in the "oomb" block of its JSON.

torchrun --standalone --nproc_per_node 1 launch/examples/deepspeed_json.py Qwen/Qwen2.5-7B-Instruct one.txt two.txt \
  --config launch/examples/deepspeed_json.json --output_dir out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import oomb_accel


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune on documents.")
    parser.add_argument("model", help="folder or hub id of a model")
    parser.add_argument("texts", nargs="+", help="text files, each of which is one document; at least one per process")
    parser.add_argument("--config", required=True, help="DeepSpeed's JSON file, with an oomb block")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--max_tokens", type=int, default=32768, help="the rest of a document is left out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    options = parser.parse_args(arguments)

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [Path(path).read_text(encoding="utf-8") for path in options.texts]
    rows = [tokenizer(text, return_tensors="pt").input_ids[:, : options.max_tokens] for text in texts]

    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)  # bf16 too: DeepSpeed keeps the fp32 copy
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
    engine, *_ = oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer, config=options.config)

    engine.train()
    for epoch in range(1, options.epochs + 1):
        for first in range(0, len(rows) // ranks * ranks, ranks):  # one document per process and step
            ids = rows[first + rank].to(engine.device)
            targets = torch.tensor(oomb_accel.count_targets({"input_ids": ids, "labels": ids}), device=engine.device)
            dist.all_reduce(targets)  # every target of a step weighs the same, whichever process has it
            loss = engine(input_ids=ids, labels=ids, num_targets=int(targets)).loss
            engine.backward(loss * ranks)  # undoes the mean over processes
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch}: loss {total.item():.4f}", flush=True)

    oomb_accel.deepspeed.save_adapter(engine, options.output_dir)
    if rank == 0:
        tokenizer.save_pretrained(options.output_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
