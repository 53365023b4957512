"""Trainer with sparse attention: one step takes off what the masked reference says, and evaluation is dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import Trainer, TrainingArguments

import oomb_accel
from oomb_accel import OombCallback
from tests.harness.batches import Document, documents_of, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import reference
from tests.harness.sparse import masked_reference, recorded_selections, sparse
from tests.harness.tolerance import assert_same_gradients, assert_same_total


def test_one_step_and_an_evaluation(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    model = with_lora(tiny_model())
    untrained = twin(model)
    trained: list[Document] = []

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        documents = [Document(row["input_ids"], row["labels"]) for row in rows]
        if len(rows) == 2:
            trained.extend(documents)
        return padded(documents).batch

    rows = [{"input_ids": d.ids, "labels": d.labels} for d in documents_of(110, 75)]
    held_out = documents_of(90, seed=3)
    arguments: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_steps": 1}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            per_device_eval_batch_size=1,
            max_grad_norm=0.0,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            **arguments,
        ),
        train_dataset=rows,
        eval_dataset=[{"input_ids": d.ids, "labels": d.labels} for d in held_out],
        data_collator=collate,
        callbacks=[OombCallback(sparse(dense_layers=(0,)))],
    )
    with recorded_selections() as calls:
        trainer.train()
    assert calls and {call.layer for call in calls} == {1, 2}
    wanted = masked_reference(twin(untrained), tuple(trained), calls, 4)
    before = {name: p.detach() for name, p in untrained.named_parameters() if p.requires_grad}
    after = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert_same_gradients({name: before[name] - after[name] for name in before}, wanted.gradients)
    with recorded_selections() as calls:
        metrics = trainer.evaluate()
    oomb_accel.disable(model)
    assert not calls
    assert_same_total(torch.tensor(metrics["eval_loss"]), reference(model, held_out).loss)
