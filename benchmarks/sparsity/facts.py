"""Planted facts: can a model that was trained sparsely find them with dense attention (part d)?

Random codes stand at random depths of a real text; questions at its end ask for some of them. The model is trained on
the answers only, then asked on held-out texts: loss of the answers and exact match, teacher-forced. Asked with dense
attention, as a model is served; figures under sparse attention are marked so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sparsity.curves import run_settings
from benchmarks.sparsity.running import Bench, switched_on, token_losses, train
from benchmarks.sparsity.texts import FactDocument, fact_document

LEARNING_RATE = 1e-4


def facts(bench: Bench, name: str, seed: int) -> None:
    """One training run; a row of answers before and one after, for each way of asking."""
    sizes = bench.sizes
    model = bench.model(long=True, adapted=True)
    settings = run_settings(bench, name)
    labels: dict[str, Any] = {"run": name, "seed": seed, "tokens": sizes.trained_tokens}

    def document(number: int, *, held_out: bool) -> FactDocument:
        return fact_document(
            bench.texts, bench.material.encode, sizes.trained_tokens, [int(held_out), seed, number],
            facts=sizes.facts, questions=sizes.questions, held_out=held_out,
        )  # fmt: skip

    asked = [document(number, held_out=True) for number in range(sizes.fact_documents)]

    def ask(step: int) -> None:
        for sparse in (False, True) if name != "dense" else (False,):
            rows = [answers(model, one, sparse=sparse) for one in asked]
            row = {key: [value for x in rows for value in x[key]] for key in ("answers", "exact", "depth")}
            attention = "sparse" if sparse else "dense"
            bench.results.add("facts", **labels, step=step, evaluated=attention, **row)
            exact, loss = (sum(row[key]) / len(row[key]) for key in ("exact", "answers"))
            bench.say(f"facts {name} seed {seed} step {step}: exact {exact:.3f}, loss {loss:.4f} ({attention})")

    def batches() -> Iterator[dict[str, Any]]:
        for step in range(sizes.fact_steps):
            one = document(step, held_out=False)
            yield {"ids": one.ids, "labels": one.labels}

    def on_step(step: int, loss: float, norm: float) -> None:
        bench.results.add("facts_step", **labels, step=step, loss=round(loss, 7), norm=round(norm, 5))

    with switched_on(model, settings, training=True):
        ask(0)
        done = train(bench, model, batches(), learning_rate=LEARNING_RATE, steps=sizes.fact_steps, on_step=on_step)
        ask(done)


def answers(model: nn.Module, document: FactDocument, *, sparse: bool) -> dict[str, list[Any]]:
    """Mean loss per token of each answer, whether all its tokens are the likeliest ones, and where its fact stands."""
    with likeliest_tokens(model) as found:
        losses = token_losses(model, document.ids, sparse=sparse, labels=document.labels)
    likeliest = torch.cat(found).cpu()
    wanted = torch.as_tensor(document.labels[document.labels >= 0])
    assert len(likeliest) == len(wanted), "one row of logits per target, in the order of the text"
    right = likeliest == wanted
    row: dict[str, list[Any]] = {"answers": [], "exact": [], "depth": document.depths}
    before = 0
    for first, end in document.answers:
        row["answers"].append(round(float(losses[first - 1 : end - 1].mean()), 6))
        row["exact"].append(int(right[before : before + end - first].all()))
        before += end - first
    return row


@contextmanager
def likeliest_tokens(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the head's likeliest token of every row it is called on is kept: the library calls it on targets only."""
    found: list[Tensor] = []
    head: Any = model.get_submodule("lm_head")
    handle = head.register_forward_hook(lambda module, inputs, logits: found.append(logits.argmax(-1).flatten()))
    try:
        yield found
    finally:
        handle.remove()
