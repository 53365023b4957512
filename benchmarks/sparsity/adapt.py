"""Adaptation of the model to four times its length: YaRN, then a short dense LoRA training on long documents.

The adapter (10 MB in bf16) is what is stored; `Bench.model` merges it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.sparsity.running import Bench, dense_settings, means, switched_on, token_losses, train
from benchmarks.sparsity.texts import code_document, held_out_documents

RANK = 16


def adapt(bench: Bench) -> None:
    """Train the adapter and store it, with the losses on held-out documents before and after."""
    sizes = bench.sizes
    base = bench.model(long=True)
    torch.manual_seed(0)
    model: Any = get_peft_model(
        base,
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,  # the trainer has fp32 weights of its own
    )
    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, min(3, sizes.long_documents))

    def evaluate(when: str) -> None:
        losses = [token_losses(model, ids, sparse=False) for ids in documents]
        by_part = torch.stack([part.mean() for part in torch.cat([x[None] for x in losses]).tensor_split(8, dim=1)])
        row = {"loss": [means(x)[0] for x in losses], "loss_by_eighth": [round(float(x), 4) for x in by_part]}
        bench.results.add("adapt", when=when, tokens=sizes.long_tokens, **row)
        bench.say(f"adapt, {when}: held-out loss by eighth of the document {row['loss_by_eighth']}")

    def batches() -> Iterator[dict[str, Any]]:
        for step in range(sizes.adapt_steps):
            yield {"ids": code_document(bench.texts.training, sizes.long_tokens, [1, step])}

    def on_step(step: int, loss: float, norm: float) -> None:
        bench.results.add("adapt_step", step=step, loss=loss, norm=norm)
        if step % 10 == 0:
            bench.say(f"adapt step {step}: loss {loss:.4f}")

    with switched_on(model, dense_settings(sizes.long_tokens // 4, sizes.page), training=True):
        evaluate("before")
        train(bench, model, batches(), learning_rate=1e-3, steps=sizes.adapt_steps, on_step=on_step)
        evaluate("after")
    bench.adapter.parent.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(bench.adapter)
    bench.say(f"adapter stored in {bench.adapter}")
