"""Case 22: an unmodified Trainer, with accumulation, evaluation and checkpointing, with and without oomb_accel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import oomb_accel
from tests.harness.batches import documents_of, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.rows = [
            {name: value[0] for name, value in padded([document]).batch.items()}
            for document in documents_of(*[60] * count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def history(folder: Path, *, chunked: bool, **arguments: Any) -> list[dict[str, float]]:
    model = with_lora(tiny_model())
    if chunked:
        oomb_accel.enable(model, config())
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.05,
            optim="sgd",
            logging_steps=1,
            report_to="none",
            eval_strategy="steps",
            eval_steps=1,
            use_cpu=True,
            save_strategy="no",
            **arguments,
        ),
        train_dataset=Rows(12),
        eval_dataset=Rows(3),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_is_none_the_wiser(tmp_path: Path, checkpointing: bool) -> None:
    plain = history(tmp_path / "plain", chunked=False)
    ours = history(tmp_path / "ours", chunked=True, gradient_checkpointing=checkpointing)
    assert len(plain) == len(ours) == 6
    for a, b in zip(plain, ours, strict=True):
        for name in {"loss", "grad_norm", "eval_loss", "learning_rate"} & set(a):
            assert b[name] == pytest.approx(a[name], rel=1e-4), name


def test_bf16_checkpointing_and_dropout(tmp_path: Path) -> None:
    model = oomb_accel.enable(with_lora(tiny_model(), lora_dropout=0.05), config())
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        bf16=True,
        gradient_checkpointing=True,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    result = Trainer(model=model, args=arguments, train_dataset=Rows(4)).train()
    assert torch.isfinite(torch.tensor(result.training_loss))


def test_label_smoothing_is_refused(tmp_path: Path) -> None:
    model = oomb_accel.enable(tiny_model(), config())
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, label_smoothing_factor=0.1, report_to="none", use_cpu=True
    )
    with pytest.raises((ValueError, AttributeError, KeyError), match=r"(?s)[Ff]ull logits"):
        Trainer(model=model, args=arguments, train_dataset=Rows(4)).train()
