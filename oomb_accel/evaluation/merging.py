"""An adapter merged into its model: the sum in fp32, rounded once, saved whole or not at all, and compared."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from oomb_accel.reading import in_a_line
from oomb_accel.writing import give_usual_modes, nearest, refusal_of, saying

MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.gguf", "*.index.json", "adapter_config.json")
_TEMPORARY = ".merging-"
_OTHER_FILES = 64 * 2**20
"""Room for tokenizer and configs, in bytes."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest relative L2 difference of logits, by the coarser of the dtypes that were loaded and written: rounding of
weights adds up over layers."""
PROBE = "The adapter and the merged model read this sentence, and their logits are compared token by token."


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the merged model compares on a few tokens."""

    num_tokens: int
    error: float
    """Relative L2 difference of its logits to those with the adapter."""
    limit: float
    effect: float
    """The same difference of the model without the adapter: what merging is about."""
    same_choice: float
    """Share of the tokens behind which the likeliest next token is that with the adapter."""

    @property
    def passed(self) -> bool:
        """Within the limit; and where the adapter's effect is beyond the limit, much nearer to it than without."""
        return self.error <= self.limit and (self.effect <= self.limit or self.error < self.effect / 2)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"passed": self.passed}


def check_output(folder: Path, num_bytes: int = 0) -> None:
    """Refuse a place that has a model, or no room.

    Args:
        num_bytes: of the weights; 0 before they are known.

    Raises:
        ValueError: with what would work.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"--output_dir {str(folder)!r} is a file.\n  Got a file.\n  Use --output_dir {_other(folder)}."
        )
    there = sorted({path.name for pattern in MODEL_FILES for path in folder.glob(pattern)})
    if there:
        raise ValueError(
            f"--output_dir {str(folder)!r} has a model already.\n  Found {', '.join(there[:3])}.\n"
            f"  Use another folder, such as --output_dir {_other(folder)}, or remove what is there."
        )
    refusal, place = refusal_of(folder), nearest(folder)
    if refusal is not None:
        raise ValueError(
            f"--output_dir {str(folder)!r} cannot be written.\n  {refusal}.\n"
            "  Use a folder of your own, on another disk perhaps."
        )
    free, wanted = shutil.disk_usage(place).free, num_bytes + _OTHER_FILES
    if num_bytes and free < wanted:
        raise ValueError(
            f"There is no room for the merged model in {str(place)!r}.\n"
            f"  It needs {wanted / 1e9:.2f} GB, {free / 1e9:.2f} GB are free.\n"
            f"  Free {(wanted - free) / 1e9:.2f} GB, use a folder on another disk, or --dtype bfloat16."
        )


def _other(folder: Path) -> str:
    """Another folder beside one, as a shell takes it."""
    return shlex.quote(f"{folder}-merged")


def num_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Size of the weights in a dtype; shared ones count once."""
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize


@torch.no_grad()
def merge(adapted: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """Merge the adapter and return the plain model in ``dtype``.

    Each layer is merged in fp32 and rounded once, so memory holds one layer in fp32 at a time. PEFT alone adds in the
    dtype of the weights, which rounds twice and loses small updates in bf16.

    Args:
        adapted: is taken apart.

    Raises:
        ValueError: a kind of adapter that cannot be merged, or weights that are no numbers.
    """
    layers = [module for module in adapted.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        if not callable(getattr(layer, "merge", None)):
            raise ValueError(
                f"This adapter cannot be merged into a model.\n  {type(layer).__name__} has no merged form.\n"
                "  Serve the adapter beside its model."
            )
        inner: Any = layer.get_base_layer()
        inner.to(torch.float32)
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise ValueError(
                f"The adapter cannot be merged.\n  {in_a_line(error)}\n"
                "  Its training has failed; take an earlier checkpoint."
            ) from error
        inner.to(dtype)
    merged: Any = adapted.unload()
    merged = merged.to(dtype)
    merged.config.dtype = dtype
    assert isinstance(merged, PreTrainedModel)
    return merged


def save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write model and tokenizer. The config comes last: where it is, everything else is too.

    Raises:
        CannotWriteError: the file system did not take them; nothing is left of them then.
    """
    made = not folder.exists()
    temporary = folder / f"{_TEMPORARY}{os.getpid()}"
    remedy = "Free space or use another folder, and merge again."
    try:
        with saying(f"The merged model for --output_dir {str(folder)!r}", folder, remedy):
            temporary.mkdir(parents=True)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            give_usual_modes(temporary)
            for item in sorted(temporary.iterdir(), key=lambda item: item.name == "config.json"):
                os.replace(item, folder / item.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def probe_ids(tokenizer: Any, vocab_size: int) -> Tensor:
    """A sentence as token ids ``[1, T]``."""
    ids: list[int] = tokenizer(PROBE, verbose=False)["input_ids"]
    return torch.tensor([[token for token in ids if token < vocab_size] or [0, 1]])


@torch.no_grad()
def probe_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """fp32 ``[T, V]`` on the CPU."""
    logits: Tensor = model.eval()(input_ids=ids.to(next(model.parameters()).device)).logits
    return logits[0].float().cpu()


def compare(merged: Tensor, adapter: Tensor, base: Tensor, dtypes: Sequence[torch.dtype]) -> Verdict:
    """Compare logits ``[T, V]``.

    Args:
        dtypes: that the model was loaded and written in.
    """
    size = adapter.norm().item()
    return Verdict(
        num_tokens=len(adapter),
        error=(merged - adapter).norm().item() / size,
        limit=max(TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) for dtype in dtypes),
        effect=(base - adapter).norm().item() / size,
        same_choice=float((merged.argmax(-1) == adapter.argmax(-1)).float().mean()),
    )
