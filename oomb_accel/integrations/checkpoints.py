"""A Trainer's checkpoints: one whose save was cut short is never resumed, nor one of another model or adapter."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers.trainer
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from oomb_accel.integrations.saving import CONFIG, check_adapter

logger = logging.getLogger("oomb_accel")

MARK = ".saving"
"""A file ``checkpoint-N.saving`` lies beside ``checkpoint-N`` while that is being written. It lies outside of the
folder because Trainer may upload the folder to the Hub meanwhile, and because every other path stays Trainer's own."""

_GUARDED: weakref.WeakSet[Trainer] = weakref.WeakSet()


def guard_checkpoints(trainer: Trainer) -> None:
    """Make this Trainer mark a checkpoint while it writes it, and look at one before it resumes it. Once is enough.

    ``trainer.train(resume_from_checkpoint=...)`` then raises ValueError on every rank, before a weight is changed,
    when the checkpoint is not whole or its adapter is not the model's. With ``True`` it takes the last whole one.
    """
    if trainer in _GUARDED:
        return
    _GUARDED.add(trainer)
    plain_train, plain_save = trainer.train, trainer._save_checkpoint

    @functools.wraps(plain_train)
    def train(resume_from_checkpoint: str | bool | None = None, *more: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_whole(Path(str(trainer.args.output_dir)))
        if resume_from_checkpoint not in (None, True, False):
            _refuse_wrong(Path(str(resume_from_checkpoint)), trainer)
        return plain_train(resume_from_checkpoint, *more, **kwargs)

    @functools.wraps(plain_save)
    def save_checkpoint(model: Any, trial: Any, *more: Any, **kwargs: Any) -> None:
        run = Path(trainer._get_output_dir(trial=trial))
        folder = run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        if trainer.args.should_save:
            if _mark_of(folder).exists():  # a save that was cut short
                shutil.rmtree(folder, ignore_errors=True)
            run.mkdir(parents=True, exist_ok=True)
            _mark_of(folder).touch()
        trainer.accelerator.wait_for_everyone()
        with _later_rotation() as rotate:
            plain_save(model, trial, *more, **kwargs)
            trainer.accelerator.wait_for_everyone()
            if trainer.args.should_save:
                _mark_of(folder).unlink(missing_ok=True)  # nodes that share a disk may each do it
            rotate()

    setattr(trainer, "train", train)  # noqa: B010 - mypy refuses an assignment to a method
    setattr(trainer, "_save_checkpoint", save_checkpoint)  # noqa: B010


@contextmanager
def _later_rotation() -> Iterator[Callable[[], None]]:
    """Inside, Trainer keeps old checkpoints until the function that this gives is called.

    It would delete them before other ranks have written their part of the new one.
    """
    plain = transformers.trainer.rotate_checkpoints
    calls: list[Callable[[], None]] = []

    def remember(*args: Any, **kwargs: Any) -> None:
        calls.append(functools.partial(plain, *args, **kwargs))

    def rotate() -> None:
        for call in calls:
            call()

    transformers.trainer.rotate_checkpoints = remember
    try:
        yield rotate
    finally:
        transformers.trainer.rotate_checkpoints = plain


def _last_whole(output: Path) -> str | bool:
    """The last checkpoint that every rank finds whole; True where there is none at all, which Trainer refuses."""
    problems = {step: _missing(folder) for step, folder in _checkpoints(output).items()}
    seen = _of_all_ranks(problems)
    steps = sorted({step for found in seen for step in found}, reverse=True)
    if not steps:
        return True
    skipped: list[str] = []
    for step in steps:
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        problem = next((text for found in seen if (text := found.get(step, "not there on every rank"))), "")
        if not problem:
            if skipped and _is_first():
                logger.warning("oomb_accel resumes from %s. Not whole: %s.", output / name, "; ".join(skipped))
            return str(output / name)
        skipped.append(f"{name} ({problem})")
    raise ValueError(
        f"No checkpoint in {str(output)!r} is whole.\n  Found: {'; '.join(skipped)}.\n"
        "  Train without resume_from_checkpoint, or give the folder of a whole one."
    )


def _refuse_wrong(folder: Path, trainer: Trainer) -> None:
    try:
        _check(folder, trainer)
        problem = ""
    except ValueError as error:
        problem = str(error)
    problem = next((text for text in _of_all_ranks(problem) if text), "")
    if problem:
        raise ValueError(problem)


def _check(folder: Path, trainer: Trainer) -> None:
    problem = _missing(folder)
    if problem:
        whole = [other for _, other in sorted(_checkpoints(folder.parent).items()) if not _missing(other)]
        remedy = f"Resume from {str(whole[-1])!r}" if whole else "Give the folder of a whole one"
        raise ValueError(
            f"The checkpoint {str(folder)!r} is not whole: its save was cut short, or it is none of a Trainer.\n"
            f"  Found: {problem}.\n  {remedy}, or train without resume_from_checkpoint."
        )
    model = extract_model_from_parallel(trainer.model, keep_fp32_wrapper=True)
    if isinstance(model, PeftModel):
        named = folder / model.active_adapter  # PEFT puts adapters of other names than "default" there
        check_adapter(named if (named / CONFIG).is_file() else folder, model)


def _missing(folder: Path) -> str:
    """What shows that the checkpoint is not whole; empty when nothing does."""
    if not folder.is_dir():
        return "no such folder"
    if _mark_of(folder).exists():
        return f"{_mark_of(folder).name} lies beside it, so its save did not end"
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{TRAINER_STATE_NAME} is missing"
    except ValueError:
        return f"{TRAINER_STATE_NAME} is cut short"
    return ""


def _checkpoints(output: Path) -> dict[int, Path]:
    found = {}
    for folder in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = folder.name.rpartition("-")[2]
        if folder.is_dir() and folder.name == f"{PREFIX_CHECKPOINT_DIR}-{number}" and number.isdecimal():
            found[int(number)] = folder
    return found


def _mark_of(folder: Path) -> Path:
    return folder.with_name(folder.name + MARK)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _of_all_ranks(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told
