"""Switching chunk recurrence on inside of a script that knows nothing of it: what ``oomb run`` puts in place."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import nn
from transformers import Trainer
from transformers import trainer as trainer_module

from oomb_accel.integrations import engine
from oomb_accel.integrations import transformers as switched
from oomb_accel.integrations.callback import OombCallback
from oomb_accel.integrations.prepare import prepare_with, settings_of
from oomb_accel.integrations.self_test import MARK
from oomb_accel.integrations.support import base_model_of


def install_everywhere() -> Callable[[], int]:
    """Make DeepSpeed, Trainer and Accelerate switch the model on that they are given to train.

    Lasts until the process ends: for a process that runs one script.

    Returns: a function that tells how many training steps have run in chunks so far.
    """
    if importlib.util.find_spec("deepspeed") is not None:
        engine.install()
    callbacks: list[Any] = trainer_module.DEFAULT_CALLBACKS
    callbacks.append(OombCallback)
    if not torch.cuda.is_available():
        _use_gloo()
    _follow_prepare()
    return _count_steps()


def _use_gloo() -> None:
    """Without a GPU, Accelerate connects the processes of a launch only if it is told that they run on the CPU."""
    plain = PartialState.__init__

    @functools.wraps(plain)
    def init(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        if int(os.environ.get("LOCAL_RANK", "-1")) >= 0:
            # DeepSpeed and cpu=True exclude each other there; a backend is enough.
            cpu = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true"
            kwargs["backend"] = "gloo"
        plain(self, cpu, **kwargs)

    PartialState.__init__ = init


def _follow_prepare() -> None:
    """Let ``accelerator.prepare`` switch on the language model that it gets to train."""
    plain = Accelerator.prepare

    @functools.wraps(plain)
    def prepare(self: Accelerator, *objects: Any, **kwargs: Any) -> Any:
        models = [item for item in objects if _is_trained_language_model(item)]
        call = functools.partial(plain, self, **kwargs)
        if not models or _called_by_trainer():  # the callback looks after a Trainer's model
            return call(*objects)
        if len(models) > 1:
            raise ValueError(
                "The script prepares several language models to train.\n"
                f"  Got {', '.join(type(model).__name__ for model in models)}.\n"
                "  Freeze those that are not trained, or call oomb_accel.prepare for one of them in the script."
            )
        return prepare_with(self, call, objects, models[0], settings_of(self, None, place="oomb run"))

    Accelerator.prepare = prepare


def _is_trained_language_model(item: object) -> bool:
    if not isinstance(item, nn.Module) or not any(p.requires_grad for p in item.parameters()):
        return False
    try:
        base = base_model_of(item)
    except ValueError:
        return False
    return base.get_output_embeddings() is not None


def _called_by_trainer() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            return True
        frame = frame.f_back
    return False


def _count_steps() -> Callable[[], int]:
    """Count chunked training steps of models that were switched on here (not those of a self-test)."""
    plain = switched.chunked_step
    steps = 0

    @functools.wraps(plain)
    def counted(state: Any, batch: dict[str, Any]) -> Any:
        nonlocal steps
        output = plain(state, batch)
        if torch.is_grad_enabled() and not hasattr(state.model, MARK):
            steps += 1
        return output

    switched.chunked_step = counted
    return lambda: steps
