"""Training from a recipe in processes of their own: what `run_ranks` calls, and how a launch looks to them."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from oomb_accel import OombConfig
from oomb_accel.training import Recipe, loop, setup
from oomb_accel.training.folder import RunFolder
from oomb_accel.training.identity import whole
from oomb_accel.training.run import Run

Settings = dict[str, Any]


@dataclass
class Trained:
    """What one rank has at the end."""

    losses: list[float]
    """By step that this process did."""
    norms: list[float]
    """Of the gradient before clipping, by step."""
    weights: dict[str, Tensor]
    """Trained weights, whole."""
    num_sharded: int
    """Parameters of the model that this rank held only a part of, when it was loaded."""


def launched(stage: int | None, folder: Path | None = None, **config: Any) -> Mapping[str, str]:
    """The environment that `accelerate launch` makes for DDP (None) or a ZeRO stage.

    Args:
        folder: where a DeepSpeed config is written; without one there is none, as with a short Accelerate config.
        config: settings in the DeepSpeed config.
    """
    if stage is None:
        return {"ACCELERATE_USE_CPU": "true"}
    environment = {
        "ACCELERATE_USE_CPU": "false",  # it would win over DeepSpeed
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
    }
    if folder is None:
        return environment
    # By default tiny models would not be sharded at all.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **config.pop("zero_optimization", {})}
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": zero, **config}))
    return environment | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "ds.json")}


def recipe_of(settings: Settings) -> Recipe:
    return Recipe(**{**settings, "oomb": OombConfig.from_dict(settings["oomb"])})


def train_recipe(rank: int, settings: Settings) -> Trained:
    """Train; the weights are those of the model behind the last step."""
    outcomes: list[tuple[float, float]] = []
    ended: list[dict[str, Tensor]] = []
    num_sharded = []
    with pytest.MonkeyPatch.context() as patch:
        run_step, save_result, load_model = loop.run_step, loop.save_result, setup.load_model

        def remember_shards(recipe: Recipe) -> Any:
            model = load_model(recipe)
            num_sharded.append(sum(hasattr(p, "ds_id") and p.numel() == 0 for p in model.parameters()))
            return model

        def remember_loss(*arguments: Any, **named: Any) -> tuple[float, float]:
            outcome = run_step(*arguments, **named)
            outcomes.append(outcome)
            return outcome

        def remember_weights(run: Run) -> None:
            with whole(run.trainable().values()):
                ended.append({name: p.detach().clone() for name, p in run.trainable().items()})
            save_result(run)

        patch.setattr(setup, "load_model", remember_shards)
        patch.setattr(loop, "run_step", remember_loss)
        patch.setattr(loop, "save_result", remember_weights)
        loop.train(recipe_of(settings))
    losses, norms = zip(*outcomes, strict=True)
    return Trained(list(losses), list(norms), ended[0], num_sharded[0])


def train_and_be_refused(rank: int, settings: Settings) -> str:
    """Text of the error that the run ends with before its first step."""
    with pytest.raises(ValueError) as caught:
        loop.train(recipe_of(settings))
    return str(caught.value)


def train_where_rank_1_is_blind(rank: int, settings: Settings) -> str:
    """Text of the error where rank 1 does not see the folders of rank 0."""
    is_folder = os.path.isdir
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("os.path.isdir", lambda path: ".oomb-" not in str(path) and is_folder(path))
        return train_and_be_refused(rank, settings)


def train_and_stop(rank: int, settings: Settings, step: int) -> str:
    """What the run prints when all ranks fail at the beginning of a step."""
    one_step, printed = loop._one_step, io.StringIO()

    def stop(run: Run, number: int, *rest: Any) -> None:
        if number == step:
            raise ZeroDivisionError
        one_step(run, number, *rest)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(loop, "_one_step", stop)
        with pytest.raises(ZeroDivisionError):
            loop.train(recipe_of(settings))
    return printed.getvalue()


def train_aloud(rank: int, settings: Settings) -> str:
    """What the run prints."""
    with redirect_stdout(io.StringIO()) as printed:
        loop.train(recipe_of(settings))
    return printed.getvalue()


def train_and_tell_timeouts(rank: int, settings: Settings) -> list[dict[str, int]]:
    """Train; what the loop asked of the timeouts."""
    asked: list[dict[str, int]] = []
    set_timeout = setup.set_timeout

    def remember(*arguments: Any, **named: Any) -> str | None:
        asked.append(named)
        return set_timeout(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "set_timeout", remember)
        loop.train(recipe_of(settings))
    return asked


def train_to_infinity(rank: int, settings: Settings, step: int) -> dict[str, Tensor]:
    """Train until one gradient on rank 1 is infinite in one step, which must end the run on all ranks.

    Returns: trained weights behind the error, whole.
    """
    runs: list[Run] = []
    with pytest.MonkeyPatch.context() as patch:
        run_step = loop.run_step

        def spoil(run: Run, *rest: Any, number: int, **named: Any) -> Any:
            runs.append(run)
            if rank == 1 and number == step:
                list(run.trainable().values())[-1].register_hook(lambda grad: grad * math.inf)
            return run_step(run, *rest, number=number, **named)

        patch.setattr(loop, "run_step", spoil)
        with pytest.raises(RuntimeError, match=f"Step {step} gave no finite number; the weights of step {step - 1}"):
            loop.train(recipe_of(settings))
    with whole(runs[-1].trainable().values()):
        return {name: p.detach().clone() for name, p in runs[-1].trainable().items()}


def train_and_die(rank: int, settings: Settings, place: str, step: int) -> None:
    """Train, and have the process killed: ``in step`` between forward and backward, ``in save`` when everything of a
    checkpoint is written but its name, ``in state`` in the middle of writing it."""

    def kill_if(here: bool) -> None:
        if here:
            os.kill(os.getpid(), signal.SIGKILL)

    def killing(function: Callable[..., Any], here: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            kill_if(here(*arguments, **named))
            return function(*arguments, **named)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        if place == "in step":
            import accelerate

            one_step, steps = loop._one_step, []

            def count(run: Run, number: int, *rest: Any) -> None:
                steps.append(number)
                one_step(run, number, *rest)

            patch.setattr(loop, "_one_step", count)
            backward = accelerate.Accelerator.backward
            patch.setattr(accelerate.Accelerator, "backward", killing(backward, lambda *_, **__: steps[-1] == step))
        elif place == "in save":
            publish = RunFolder.publish_checkpoint
            patch.setattr(RunFolder, "publish_checkpoint", killing(publish, lambda folder, number: number == step))
        else:
            import torch

            patch.setattr(torch, "save", killing(torch.save, lambda obj, file, *_, **__: f"-{step}/" in str(file)))
        loop.train(recipe_of(settings))
