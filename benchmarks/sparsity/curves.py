"""Training from the model that does not know long documents yet: dense, sparse, and causal selection (parts e and f).

All weights are trained. For a seed every run sees the same documents in the same order. Held-out documents are
evaluated with dense attention, as a model is served; the loss under the run's own sparse attention is kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.sparsity.running import (
    Bench,
    Settings,
    dense_settings,
    means,
    plain,
    sparse_settings,
    switched_on,
    token_losses,
    train,
)
from benchmarks.sparsity.texts import code_document, held_out_documents

LEARNING_RATE = 3e-4


def run_settings(bench: Bench, name: str) -> Settings:
    """Settings of a run: ``dense``, ``top16``, or ``top16-causal`` and the like."""
    sizes = bench.sizes
    if name == "dense":
        return dense_settings(sizes.trained_chunk, sizes.page)
    top, *others = name.split("-")
    named: dict[str, Settings] = {
        "causal": {"causal_selection": True},
        "first2": {"dense_layers": (0, 1)},
        "q64": {"q_block": 64},
    }
    extra: Settings = {}
    for other in others:
        extra |= named[other]
    return sparse_settings(sizes, sizes.trained_chunk, top_k=int(top[3:]), page_tokens=sizes.page, **extra)


def curve(bench: Bench, name: str, seed: int) -> None:
    """One training run: a row per step, rows of held-out losses, one for longer documents at the end."""
    sizes = bench.sizes
    model = bench.model(long=True)
    settings = run_settings(bench, name)
    labels: dict[str, Any] = {"run": name, "seed": seed}
    documents = held_out_documents(bench.texts, "code", sizes.trained_tokens, sizes.evaluated_documents)

    def evaluate(step: int) -> None:
        for sparse in (False, True) if name != "dense" and step else (False,):
            values = [means(token_losses(model, ids, sparse=sparse)) for ids in documents]
            attention = "sparse" if sparse else "dense"
            row = {"loss": [round(x[0], 7) for x in values], "second_half": [round(x[1], 7) for x in values]}
            bench.results.add("curve_evaluation", **labels, step=step, evaluated=attention, **row)
            bench.say(
                f"curve {name} seed {seed} step {step}: held-out {sum(row['loss']) / len(values):.5f} ({attention})"
            )

    def batches() -> Iterator[dict[str, Any]]:
        for step in range(sizes.curve_steps):
            yield {"ids": code_document(bench.texts.training, sizes.trained_tokens, [2, seed, step])}

    def on_step(step: int, loss: float, norm: float) -> None:
        bench.results.add("curve_step", **labels, step=step, loss=round(loss, 7), norm=round(norm, 5))
        if step % sizes.evaluate_every == 0:
            evaluate(step)

    with switched_on(model, settings, training=True):
        evaluate(0)
        steps = sizes.curve_steps
        done = train(bench, model, batches(), learning_rate=LEARNING_RATE, steps=steps, on_step=on_step)
        if done % sizes.evaluate_every:
            evaluate(done)
    _store(bench, model, name, seed)
    longer = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.variant_documents)
    with switched_on(model, dense_settings(sizes.long_chunk, sizes.page)):
        values = [means(token_losses(model, ids, sparse=False)) for ids in longer]
    bench.results.add(
        "curve_end",
        **labels,
        steps=done,
        learning_rate=LEARNING_RATE,
        tokens=sizes.trained_tokens,
        evaluated_tokens=sizes.long_tokens,
        loss=[round(x[0], 7) for x in values],
        second_half=[round(x[1], 7) for x in values],
        settings=plain(settings),
    )


def trained_file(bench: Bench, name: str, seed: int) -> Path:
    """Where a run leaves its weights, for jobs on the same machine."""
    return bench.adapter.parent / "models" / f"{name}-{seed}.pt"


def _store(bench: Bench, model: nn.Module, name: str, seed: int) -> None:
    file = trained_file(bench, name, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)
