"""Saving an adapter whole, whatever holds its parameters, and checking one before it is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from oomb_accel.reading import Unreadable, in_a_line, json_object
from oomb_accel.writing import CannotWriteError, give_usual_modes, is_of_file_system

_TEMPORARY = ".saving-"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MUST_AGREE = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias")
"""Settings of an adapter that change what its weights mean."""


def save_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the adapter as plain PEFT would: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Call it on every rank: under ZeRO 3 all of them gather the parameters. Rank 0 writes, reads the file back and
    compares, and only then puts it in place, so a kill leaves the old adapter or the new one.

    Args:
        model: a PEFT model, or the engine, DDP or other wrapper around one.
        folder: where the files go; other files in it stay.

    Raises:
        ValueError: the model has no adapter.
        RuntimeError: on every rank, when rank 0 could not write, or read back something else. Where the file system
            did not take it, that is a :class:`oomb_accel.writing.CannotWriteError`.
    """
    inner = _adapted(model)
    with _gathered(inner) as names:
        tensors = {}
        if _is_writer():
            state = inner.state_dict()
            tensors = {name: state[name].detach().to("cpu", copy=True).contiguous() for name in names}
    problem = ""
    kind: type[RuntimeError] = RuntimeError
    if _is_writer():
        try:
            _write(inner, tensors, Path(folder))
        except Exception as error:  # told to the other ranks first: they would wait for ever
            problem = f"{type(error).__name__}: {error}"
            kind = CannotWriteError if is_of_file_system(error) else RuntimeError
    problem, kind = _from_writer(problem, kind)
    if problem:
        raise kind(
            f"The adapter could not be saved in {str(folder)!r}.\n  {problem}\n"
            "  Free space or choose another folder, and save again; what was there before is untouched."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a saved adapter, whose weights lie beside them.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            found = ", ".join(sorted(item.name for item in folder.iterdir())[:5]) if folder.is_dir() else "no folder"
            raise ValueError(
                f"{str(folder)!r} holds no adapter: {name} is missing.\n  Found: {found or 'nothing'}.\n"
                "  Give the output_dir of a run with LoRA, or one of its checkpoints that is complete."
            )
    try:
        return json_object(folder / CONFIG)
    except Unreadable as error:
        raise ValueError(
            f"{str(folder / CONFIG)!r} is not a config of PEFT.\n  {in_a_line(error)}\n"
            "  Copy it again, or take another checkpoint."
        ) from None


def check_adapter(folder: str | os.PathLike[str], model: nn.Module) -> None:
    """Refuse a saved adapter that was made for another model or with other adapter settings.

    Args:
        folder: what :func:`save_adapter` or PEFT wrote.
        model: a PEFT model, or a wrapper around one.

    Raises:
        ValueError: files are missing, or settings, names or shapes differ; the first difference is named.
    """
    inner = _adapted(model)
    path = Path(folder)
    saved = read_config(path)
    ours = json.loads(json.dumps(inner.peft_config[inner.active_adapter].to_dict(), default=_plain))
    for name in _MUST_AGREE:
        if name == "rank_pattern" and ours.get("peft_type") == "ADALORA":
            continue  # it changes in training
        if saved.get(name) != ours.get(name):
            raise ValueError(_other(folder, f"{name}={saved.get(name)!r}", f"{name}={ours.get(name)!r}"))
    base, our_base = saved.get("base_model_name_or_path"), ours.get("base_model_name_or_path")
    if _is_hub_id(base) and _is_hub_id(our_base) and base != our_base:  # a folder may have been moved
        raise ValueError(_other(folder, f"base model {base!r}", f"base model {our_base!r}"))
    wanted = {name: tuple(_shape(tensor)) for name, tensor in _adapter_tensors(inner).items()}
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            found_shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{str(path / WEIGHTS)!r} is broken.\n  {in_a_line(error)}.\n  Copy it again, or take another checkpoint."
        ) from error
    for name in sorted(wanted.keys() | found_shapes.keys()):
        if wanted.get(name) != found_shapes.get(name):
            raise ValueError(_other(folder, _tell(name, found_shapes.get(name)), _tell(name, wanted.get(name))))


def _write(inner: PeftModel, tensors: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{_TEMPORARY}{os.getpid()}"
    for left in folder.glob(f"{_TEMPORARY}*"):  # by a save that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        inner.save_pretrained(str(temporary), state_dict=tensors, selected_adapters=[inner.active_adapter])
        written = temporary if (temporary / WEIGHTS).is_file() else temporary / inner.active_adapter
        _check_written(inner, tensors, written / WEIGHTS)
        give_usual_modes(written)
        # Weights come last: where they are, everything else is too.
        for item in sorted(written.iterdir(), key=lambda item: item.name == WEIGHTS):
            if item.is_file():
                os.replace(item, folder / item.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_written(inner: PeftModel, tensors: dict[str, Tensor], path: Path) -> None:
    wanted = get_peft_model_state_dict(inner, state_dict=tensors, adapter_name=inner.active_adapter)
    read = load_file(path)
    if not read or any(tensor.numel() == 0 for tensor in read.values()):
        raise RuntimeError("the file holds empty tensors: parameters were not gathered")
    different = sorted(
        name for name in wanted.keys() | read.keys() if name not in wanted or not _same(read.get(name), wanted[name])
    )
    if different:
        raise RuntimeError(f"the file does not hold what was written: {', '.join(different[:3])}")


@contextmanager
def _gathered(inner: PeftModel) -> Iterator[list[str]]:
    """Inside, the tensors of the adapter are whole on every rank; gives their names in the state dict."""
    state = inner.state_dict(keep_vars=True)
    chosen = {id(tensor) for tensor in _adapter_tensors(inner).values()}
    names = [name for name, tensor in state.items() if id(tensor) in chosen]
    sharded = [state[name] for name in names if hasattr(state[name], "ds_id")]
    if not sharded:
        yield names
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=None):
        yield names


def _adapter_tensors(inner: PeftModel) -> dict[str, Tensor]:
    """The adapter's own parameters and buffers by PEFT's names, not copies of them."""
    found: dict[str, Tensor] = get_peft_model_state_dict(
        inner, state_dict=inner.state_dict(keep_vars=True), adapter_name=inner.active_adapter
    )
    return found


def _adapted(model: Any) -> PeftModel:
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=True)
    if not isinstance(inner, PeftModel):
        raise ValueError(
            f"{type(inner).__name__} has no adapter.\n  save_adapter() takes a PEFT model, or an engine around one.\n"
            "  After full fine-tuning use accelerator.save_model or engine.save_16bit_model."
        )
    return inner


def _is_hub_id(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not Path(name).exists()
    )


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _from_writer(problem: str, kind: type[RuntimeError]) -> tuple[str, type[RuntimeError]]:
    """Rank 0's values, on every rank."""
    told: list[Any] = [problem, kind]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    return told[0], told[1]


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.dtype == b.dtype and torch.equal(a, b)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _tell(name: str, shape: tuple[int, ...] | None) -> str:
    return f"no {name}" if shape is None else f"{name} of shape {list(shape)}"


def _other(folder: object, saved: str, ours: str) -> str:
    return (
        f"The adapter in {str(folder)!r} belongs to another model or adapter.\n  It has {saved}; this run has {ours}.\n"
        "  Use the model and the LoRA settings that it was made with, or start a new run."
    )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
