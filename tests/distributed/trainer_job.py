"""A Trainer or an SFTTrainer as a user writes it, on several ranks or in this process, with the callback or without.

A job is data; give `run_job` to `run_ranks`, or call it with rank 0 for one process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from oomb_accel import OombConfig
from oomb_accel.integrations.callback import OombCallback
from tests.harness.batches import Document, documents_of, packed, padded
from tests.harness.folders import BYTES, byte_tokenizer
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config
from tests.harness.watch import Watch

LENGTHS = (100, 9, 61, 12, 80, 5, 33, 70, 47, 16, 90, 21, 64, 3, 50, 18)
EVALUATED = (70, 9, 24, 55)
"""As many tokens on each of two ranks: SFTTrainer reports the mean of the ranks' means."""


@dataclass(frozen=True, kw_only=True)
class TrainerJob:
    """What to train and how; the ranks of a step together see ``rows_per_step`` documents."""

    folder: str
    stage: int | None = None
    """ZeRO stage; None for DDP, or for one process."""
    ranks: int = 2
    chunked: bool = True
    sft: bool = False
    lora: bool = True
    dropout: float = 0.0
    adapter: dict[str, Any] = field(default_factory=dict)
    """More settings of LoRA."""
    is_packed: bool = False
    """Make one row of the documents of a micro-batch, with labels on every token."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of TrainingArguments or SFTConfig."""
    block: dict[str, Any] | None = None
    """Of the DeepSpeed config."""
    settings: OombConfig | None = field(default_factory=lambda: config(self_test=False))
    """Of the callback."""
    saved_model: str | None = None
    """Load the base model from this folder after the arguments are made, as scripts do: under ZeRO 3 it is sharded from
    the start."""
    resume: str | bool | None = None

    def deepspeed_config(self) -> dict[str, Any] | None:
        """With every parameter really sharded under ZeRO 3."""
        if self.stage is None:
            return None
        return {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            **({} if self.block is None else {"oomb": self.block}),
        }


@dataclass(frozen=True)
class Trained:
    """What is there after training."""

    history: list[dict[str, float]]
    weights: dict[str, Tensor]
    """Trainable parameters, whole."""
    chunks: int
    """Chunk passes in steps of several chunks, from the second step on."""


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, lengths: Sequence[int]) -> None:
        self.documents = documents_of(*lengths)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.documents[index].ids, "labels": self.documents[index].labels}


def run_job(rank: int, job: TrainerJob) -> Trained:
    """Train on this rank."""
    from accelerate import PartialState

    if job.stage is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as accelerate launch does
        PartialState(backend="gloo")
    trainer, watch = make_trainer(job)
    trainer.train(resume_from_checkpoint=job.resume)
    # Our own figures tell the time, which no two runs share.
    history = [
        {name: entry[name] for name in entry if not name.startswith("oomb_")}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]
    return Trained(history, whole_weights(trainer.model), watch.chunks)


def make_trainer(job: TrainerJob) -> tuple[Trainer, Watch]:
    watch = Watch()
    callbacks = [OombCallback(job.settings), watch] if job.chunked else []
    arguments: dict[str, Any] = {
        "output_dir": job.folder,
        "max_steps": 2,
        "per_device_train_batch_size": 4 // job.ranks,
        "per_device_eval_batch_size": 4 // job.ranks,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        **({"ddp_backend": "gloo"} if job.stage is None and job.ranks > 1 else {}),
        **({} if job.stage is None else {"accelerator_config": {"use_configured_state": True}}),
        "deepspeed": job.deepspeed_config(),
        **job.arguments,
    }
    if job.sft:
        return _sft(job, arguments, callbacks), watch
    base: Any = tiny_model()  # before the arguments: it is still whole, and can be given its weights
    made = TrainingArguments(**arguments)
    if job.saved_model is not None:
        base = AutoModelForCausalLM.from_pretrained(job.saved_model, attn_implementation="eager")
    trainer = Trainer(
        model=_adapted(job, base),
        args=made,
        train_dataset=Rows(LENGTHS),
        eval_dataset=Rows(EVALUATED),
        data_collator=_packed if job.is_packed else _padded,
        callbacks=callbacks,
    )
    return trainer, watch


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Trainable parameters by name; under ZeRO 3 gathered, by all ranks together."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(hasattr(p, "ds_id") for p in trainable.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(trainable.values())):
            return {name: p.detach().clone() for name, p in trainable.items()}
    return {name: p.detach().clone() for name, p in trainable.items()}


def _sft(job: TrainerJob, arguments: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    import datasets
    import trl

    def texts(lengths: Sequence[int]) -> Any:
        letters = "abcdefghijklmnopqrstuvwxyz "
        rows = [{"text": "".join(letters[(7 * i * n + i * i) % 27] for i in range(n))} for n in lengths]
        return datasets.Dataset.from_list(rows)

    ids: dict[str, Any] = {"vocab_size": BYTES, "pad_token_id": None, "bos_token_id": None, "eos_token_id": BYTES - 4}
    made: Trainer = trl.SFTTrainer(
        model=_adapted(job, tiny_model("qwen2", **ids)),
        args=trl.SFTConfig(**arguments, max_length=100),
        train_dataset=texts(LENGTHS),
        eval_dataset=texts(EVALUATED),
        processing_class=byte_tokenizer(),
        callbacks=callbacks,
    )
    return made


def _adapted(job: TrainerJob, model: Any) -> nn.Module:
    return with_lora(model, lora_dropout=job.dropout, **job.adapter) if job.lora else model


def _padded(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return padded([Document(row["input_ids"], row["labels"]) for row in rows]).batch


def _packed(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return packed([Document(row["input_ids"], row["labels"]) for row in rows]).batch
