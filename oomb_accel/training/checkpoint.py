"""Saving a run so that it can go on, and going on: everything or nothing, and only with what it was."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import OPTIMIZER_NAME, RNG_STATE_NAME, broadcast_object_list, gather_object, load, set_seed
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oomb_accel.integrations.saving import save_adapter
from oomb_accel.training.folder import PROBE
from oomb_accel.training.identity import ADAPTER_SETTINGS
from oomb_accel.training.launch import strategy, zero_stage
from oomb_accel.training.progress_file import FORMAT, PROGRESS, files_of, read_progress, unreadable_state
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.reshard import TAG, cut_anew, fits, needs_other_shards
from oomb_accel.training.run import Run, Summary
from oomb_accel.writing import give_usual_modes

STATE = "state"
"""Folder in a checkpoint with what Accelerate saves; beside it lies the result so far."""
TRAINED = "trained.safetensors"
"""Trained weights without DeepSpeed, which writes its own files. Frozen weights are not saved: they are loaded anew."""
_BROKEN = (OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError, UnpicklingError, SafetensorError)
"""What readers of safetensors and of torch raise on bytes that are none of theirs."""
FREE_SETTINGS = frozenset(
    (
        *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit"),
        *("logging_steps", "report_to", "run_name", "logging_dir", "eval_last_tokens", "data_path", "data_cache"),
        *("per_device_train_batch_size", "gradient_accumulation_steps"),
    )
)
"""Settings that a run may change when it goes on, without a word: they do not change its numbers, or are checked by
what they lead to."""


def save_checkpoint(run: Run, step: int) -> Path:
    """Save everything that the run needs to go on behind ``step``, and the result so far. All ranks call this.

    Returns: the folder, which is there whole or not at all.
    """
    name = f"checkpoint-{step}"
    with _new_folder(run, name) as folder:
        run.accelerator.save_state(str(folder / STATE), **_deepspeed(run, exclude_frozen_parameters=True))
        _write_result(run, folder)
        run.accelerator.wait_for_everyone()  # every rank has files of its own
        if run.accelerator.is_main_process:
            progress = _progress(run, step) | {"files": files_of(folder / STATE)}
            text = json.dumps(progress, indent=2) + "\n"
            (folder / PROGRESS).write_text(text, encoding="utf-8")
    path = run.folder.path / name
    if run.accelerator.is_main_process:
        path = run.folder.publish_checkpoint(step)
    run.accelerator.wait_for_everyone()
    return path


def save_result(run: Run) -> None:
    """Save the adapter (or the whole model) and the tokenizer as the result of the run. All ranks call this."""
    with _new_folder(run, "result") as folder:
        _write_result(run, folder)
    if run.accelerator.is_main_process:
        run.folder.publish_result()
    run.accelerator.wait_for_everyone()


def load_checkpoint(run: Run, checkpoint: Path) -> None:
    """Put a prepared run where the checkpoint was: weights, optimizer, random generators, counters.

    Raises:
        ValueError: the checkpoint belongs to another model, adapter or data, or to another kind of launch, or one of
            its files cannot be read.
        RuntimeError: DeepSpeed could not read its files.
    """
    progress = read_progress(checkpoint)
    _check_same(run, checkpoint, progress)
    if needs_other_shards(run.accelerator, progress):
        with cut_anew(run.accelerator, checkpoint / STATE) as folder:
            run.model.load_checkpoint(str(folder), TAG, load_module_strict=False)
        _seed_anew(run, progress)
    else:
        same_ranks = progress["num_processes"] == run.accelerator.num_processes
        if same_ranks:
            _check_generators(run, checkpoint)
        with _names_broken_file(checkpoint):
            run.accelerator.load_state(str(checkpoint / STATE), **_deepspeed(run, load_module_strict=False))
        if not same_ranks:
            _seed_anew(run, progress)
    if zero_stage(run.accelerator) is not None and run.model.global_steps != progress["step"]:
        raise RuntimeError(
            f"DeepSpeed could not read {str(checkpoint / STATE)!r}.\n"
            f"  It is at step {run.model.global_steps}, the checkpoint at {progress['step']}.\n"
            "  Set resume_from_checkpoint to an earlier checkpoint."
        )
    run.summary = Summary.from_dict(progress["summary"])
    run.started = time.perf_counter() - run.summary.seconds
    run.corpus.notes += _changed_settings(run.recipe, progress["recipe"])


def _seed_anew(run: Run, progress: dict[str, Any]) -> None:
    """Random generators were saved by rank: other ranks begin with others, the same whenever this is done again."""
    set_seed(run.recipe.seed + progress["step"], device_specific=True)


def _check_generators(run: Run, checkpoint: Path) -> None:
    """Whether the random generators were saved: Accelerate goes on without them, with other numbers, in silence. All
    ranks refuse what one cannot read."""
    error: Exception | None = None
    try:
        states = load(checkpoint / _generators(run.accelerator.process_index))  # values only, no code
        torch.Generator().set_state(states["torch_manual_seed"])
    except _BROKEN as found:
        error = found
    for rank, wrong in enumerate(gather_object([error])):
        if wrong is not None:
            raise unreadable_state(checkpoint, _generators(rank), wrong) from error


def _generators(rank: int) -> str:
    return f"{STATE}/{RNG_STATE_NAME}_{rank}.pkl"


@contextmanager
def _names_broken_file(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _BROKEN as error:
        raise unreadable_state(checkpoint, f"{STATE}/{TRAINED} or {STATE}/{OPTIMIZER_NAME}.bin", error) from error


def check_shared(run: Run) -> None:
    """Checkpoints are written by all ranks into one folder, so all have to see it; better now than at the first save.

    Raises:
        ValueError: on all ranks, when one does not see what process 0 writes.
    """
    if run.accelerator.num_processes == 1 or not run.recipe.save_steps:
        return
    with tempfile.TemporaryDirectory(prefix=PROBE, dir=run.folder.parent) as own:
        probe = broadcast_object_list([own])[0]  # that of process 0
        blind = [rank for rank, seen in enumerate(gather_object([os.path.isdir(probe)])) if not seen]
    if blind:
        raise ValueError(
            f"output_dir {str(run.folder.path)!r} is not the same folder on all machines.\n"
            f"  Process {blind[0]} does not see what process 0 writes there.\n"
            "  Set output_dir to a folder on a shared file system, or save_steps: 0."
        )


def keep_frozen_weights_out(run: Run) -> None:
    """Have Accelerate save and load trained weights only. DeepSpeed has a switch of its own for that."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        if weights:
            weights.clear()
            if run.accelerator.is_main_process:
                trained = {name: p.detach().cpu().contiguous() for name, p in run.trainable().items()}
                save_file(trained, Path(folder) / TRAINED)

    def restore(models: list[Any], folder: str) -> None:
        if models:
            models.clear()
            saved = load_file(Path(folder) / TRAINED)
            with torch.no_grad():
                for name, parameter in run.trainable().items():
                    parameter.copy_(saved[name])

    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.register_load_state_pre_hook(restore)


@contextmanager
def _new_folder(run: Run, name: str) -> Iterator[Path]:
    """A temporary folder that all ranks fill; gone again when that fails.

    Raises:
        CannotWriteError: the file system did not take it.
    """
    folder = run.folder.temporary(name)
    main = run.accelerator.is_main_process
    if main:
        shutil.rmtree(folder, ignore_errors=True)
        with run.folder.writing():
            folder.mkdir()
    run.accelerator.wait_for_everyone()
    try:
        with run.folder.writing():  # inside: whether the disk is full shows while all that was written is there
            yield folder
            run.accelerator.wait_for_everyone()
            if main:
                give_usual_modes(folder)
    except BaseException:
        if main:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    run.accelerator.wait_for_everyone()


def _write_result(run: Run, folder: Path) -> None:
    """The adapter or the whole model, as plain transformers and PEFT write them, and the tokenizer."""
    if run.recipe.lora_r > 0:
        save_adapter(run.model, folder)
    else:
        state = run.accelerator.get_state_dict(run.model) if zero_stage(run.accelerator) == 3 else None
        if run.accelerator.is_main_process:
            run.bare_model.save_pretrained(folder, state_dict=state)
    if run.accelerator.is_main_process:
        run.tokenizer.save_pretrained(folder)


def _deepspeed(run: Run, **options: Any) -> dict[str, Any]:
    """Options that only DeepSpeed's engine takes."""
    return {} if zero_stage(run.accelerator) is None else options


def _progress(run: Run, step: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": step,
        "documents_per_step": run.sampler.documents_per_step,
        "group": run.sampler.group,
        "strategy": strategy(run.accelerator),
        "num_processes": run.accelerator.num_processes,
        "identity": run.identity.to_dict(),
        "summary": run.summary.to_dict() | {"seconds": time.perf_counter() - run.started},
        "recipe": run.recipe.to_dict(),
    }


def _check_same(run: Run, checkpoint: Path, progress: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else, by what differs."""
    recipe, old = run.recipe, progress["recipe"]
    ours, theirs = run.identity.to_dict(), progress["identity"]
    different = next((what for what in ours if ours[what] != theirs[what]), None)
    if different == "model":
        detail = f"It trains {old['model_name_or_path']!r}, this run loads {recipe.model_name_or_path!r}"
        remedy = f"model_name_or_path: {old['model_name_or_path']}"
        if old["model_name_or_path"] == recipe.model_name_or_path:
            detail, remedy = f"{detail}, whose weights are others now", "model_name_or_path to the model it was then"
    elif different == "adapter":
        name = next((name for name in ADAPTER_SETTINGS if old[name] != getattr(recipe, name)), "lora_target_modules")
        detail = f"It has {name}={old[name]}, this run {name}={getattr(recipe, name)}"
        remedy = f"{name}: {old[name]}"
    elif different == "data":
        detail = f"It was trained on {old['data_path']!r}, this run reads {recipe.data_path!r}, with other tokens"
        remedy = f"data_path: {old['data_path']}, max_length: {old['max_length']}, truncation: {old['truncation']}"
    elif progress["documents_per_step"] != run.sampler.documents_per_step:
        different = "number of documents per step"
        wanted, per_micro_step = progress["documents_per_step"], run.sampler.num_ranks * run.sampler.batch_size
        detail = f"It takes {wanted} documents per step, this run {run.sampler.documents_per_step}"
        remedy = f"gradient_accumulation_steps: {max(wanted // per_micro_step, 1)}"
        if wanted % per_micro_step:
            remedy = f"a number of processes and a batch size that divide {wanted}"
    elif old["seed"] != recipe.seed:
        different, detail = "seed", f"It has seed {old['seed']}, this run {recipe.seed}"
        remedy = f"seed: {old['seed']}"
    else:
        return _check_same_strategy(run, checkpoint, progress)
    raise ValueError(
        f"{str(checkpoint)!r} belongs to a run with another {different}.\n  {detail}.\n"
        f"  Set {remedy}; or leave resume_from_checkpoint out and begin a new run."
    )


def _check_same_strategy(run: Run, checkpoint: Path, progress: dict[str, Any]) -> None:
    """The number of ranks may change, but not what they hold."""
    if fits(run.accelerator, progress):
        return
    ours, theirs = strategy(run.accelerator), progress["strategy"]
    raise ValueError(
        f"{str(checkpoint)!r} was saved under {_spell(theirs)}.\n"
        f"  This run is under {_spell(ours)}, which has other files.\n"
        f"  Go on under {_spell(theirs)}, or leave resume_from_checkpoint out and begin a new run."
    )


def _spell(how: str) -> str:
    return "DDP or in one process" if how == "replicas" else f"DeepSpeed {how}"


def _changed_settings(recipe: Recipe, old: dict[str, Any]) -> list[str]:
    """Settings that are others than before, for the header."""
    now = recipe.to_dict()
    pairs = [(name, old.get(name), value) for name, value in now.items() if name not in (*FREE_SETTINGS, "oomb")]
    pairs += [(f"oomb.{name}", old["oomb"].get(name), value) for name, value in now["oomb"].items()]
    notes = [f"goes on with {name}={value}; it was {before}" for name, before, value in pairs if before != value]
    if recipe.oomb.attention == "sparse" and now["oomb"]["chunk_tokens"] != old["oomb"].get("chunk_tokens"):
        notes.append("with sparse attention another chunk_tokens also changes what a token sees, and so the gradient")
    return notes
