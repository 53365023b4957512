"""One optimizer step over micro-steps and ranks, in which every target weighs the same."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from oomb_accel.sampler import Step
from oomb_accel.training.data import collate
from oomb_accel.training.launch import zero_stage
from oomb_accel.training.run import Run


def run_step(run: Run, plan: Step, *, number: int, learning_rate: float, num_targets: int) -> tuple[float, float]:
    """Forward, backward and update.

    Args:
        plan: the documents of the step.
        number: of the step, for messages.
        learning_rate: of this step.
        num_targets: of the whole step on all ranks.

    Returns: mean loss per target and norm of the gradient before clipping, the same on all ranks.

    Raises:
        RuntimeError: one of them is no finite number. Weights and optimizer are then as before the step.
    """
    accelerator, model = run.accelerator, run.model
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    model.train()
    loss_sum = torch.zeros((), device=accelerator.device)
    for index, micro_step in enumerate(plan):
        last = index == len(plan) - 1
        batch = _batch(run, micro_step[accelerator.process_index])
        accelerator.gradient_state._set_sync_gradients(last)
        with nullcontext() if last else _without_reduction(run):
            # Gradients are averaged over ranks, and the loss is already a share of the whole step's mean.
            loss = model(**batch, **_normaliser(run, num_targets)).loss * accelerator.num_processes
            loss_sum += loss.detach()
            if last:  # DeepSpeed updates within the last backward
                mean_loss = float(accelerator.reduce(loss_sum, "mean"))
                _check_finite(run, number, "loss", mean_loss)
                run.updating = zero_stage(accelerator) is not None
            accelerator.backward(loss, **({} if zero_stage(accelerator) is None else {"scale_wrt_gas": False}))
    norm = _measured_norm(run)
    _check_finite(run, number, "gradient norm", norm)
    run.updating = True
    run.optimizer.step()
    run.optimizer.zero_grad()
    return mean_loss, norm


class NormBeforeUpdate:
    """Measures and clips gradients when the optimizer of an engine is about to step: DeepSpeed in fp32 without ZeRO
    would not tell the norm.

    Args:
        parameters: the trained ones.
        max_norm: largest norm; 0 does not clip.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], max_norm: float) -> None:
        self.norm = 0.0
        self._parameters, self._max_norm = parameters, max_norm

    def __call__(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self.norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm or math.inf))
        if not math.isfinite(self.norm):
            for parameter in self._parameters:
                parameter.grad = None  # the optimizer then finds nothing to do


def _batch(run: Run, documents: list[int]) -> dict[str, torch.Tensor]:
    batch = collate([run.corpus.documents[index] for index in documents], run.pad_token_id)
    return {name: tensor.to(run.accelerator.device, non_blocking=True) for name, tensor in batch.items()}


def _without_reduction(run: Run) -> AbstractContextManager[Any]:
    """For all micro-steps but the last. DeepSpeed keeps its own account of the boundary."""
    if zero_stage(run.accelerator) is not None:
        return nullcontext()
    context: AbstractContextManager[Any] = run.accelerator.no_sync(run.model)
    return context


def _normaliser(run: Run, num_targets: int) -> dict[str, int]:
    """The step's number of targets, under our name, or under transformers' own when we are off."""
    return {"num_targets" if run.recipe.oomb.enabled else "num_items_in_batch": max(num_targets, 1)}


def _measured_norm(run: Run) -> float:
    if run.norm_hook is not None:
        return run.norm_hook.norm
    parameters = list(run.trainable().values())
    return float(run.accelerator.clip_grad_norm_(parameters, run.recipe.max_grad_norm or math.inf) or 0.0)


def _check_finite(run: Run, number: int, what: str, value: float) -> None:
    """DeepSpeed has left out an update by a norm that is no number, so weights are unharmed in every case."""
    if math.isfinite(value):
        return
    run.updating = False
    raise RuntimeError(
        f"Step {number} gave no finite number; the weights of step {number - 1} are unharmed.\n"
        f"  Got {what} {value}.\n"
        f"  Set a lower learning_rate, for example {run.recipe.learning_rate / 10:g}, or torch_dtype: float32."
    )
