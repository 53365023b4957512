"""A tiny model, data for it, and one step of plain gradient descent, for tests of what stands around a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oomb_accel.integrations.attachment import STATE, Attachment
from oomb_accel.progress import ChunkEvent
from tests.harness.batches import Document, documents_of, padded
from tests.harness.models import sgd_step, tiny_model, with_lora
from tests.harness.parity import reference
from tests.harness.tolerance import assert_same_gradients, assert_same_total

RATE = 1.0  # updates as large as gradients: what is left of them in fp32 weights is exact enough to compare
BLOCK: dict[str, Any] = {"chunk_tokens": 16, "page_tokens": 4, "progress": False}


def lora_model() -> nn.Module:
    return with_lora(tiny_model())


def documents() -> list[Document]:
    return documents_of(50, 21)


def batch() -> dict[str, Tensor]:
    return padded(documents()).batch


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def deepspeed_config(stage: int, block: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A config in which nothing is left to defaults that change numbers, and everything is really sharded."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    return config if block is None else {**config, "oomb": block}


def count_chunks(model: nn.Module) -> list[ChunkEvent]:
    """A list that grows with every chunk pass from now on; nothing where the model is not switched on."""
    events: list[ChunkEvent] = []
    state: Attachment | None = getattr(model, STATE, None)
    if state is not None:
        state.on_chunk = events.append
    return events


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name, gathered where they are sharded."""
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not any(hasattr(p, "ds_id") for p in names.values()):
        return {name: p.detach().clone() for name, p in names.items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(names.values())):
        return {name: p.detach().clone() for name, p in names.items()}


def assert_same_step(loss: Tensor, after: dict[str, Tensor], model: nn.Module | None = None) -> None:
    """The loss and the updates are those of one step of full attention on a fresh model."""
    model = lora_model() if model is None else model
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    wanted = reference(model, documents())
    sgd_step(model, RATE)
    assert_same_total(loss, wanted.loss)
    updates = {name: (before[name] - after[name]) / RATE for name in before}
    assert_same_gradients(updates, wanted.gradients)
