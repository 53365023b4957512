"""What every part of the study does: switch a model on, read per-token losses, train, write result rows."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import oomb_accel
from benchmarks.registry import environment
from benchmarks.sparsity.material import Material, build_model
from benchmarks.sparsity.sizes import Sizes
from benchmarks.sparsity.texts import Ids, Texts, describe
from oomb_accel import OombConfig

Settings = dict[str, Any]
"""Of `OombConfig`."""


class Results:
    """Rows of one process, written as they come: a run that is ended early leaves what it has."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def add(self, study: str, **values: Any) -> None:
        """Append one row."""
        with self._path.open("a") as file:
            file.write(json.dumps({"study": study} | values) + "\n")


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that the parts of the study share."""

    material: Material
    texts: Texts
    sizes: Sizes
    device: torch.device
    results: Results
    adapter: Path
    """Where the adaptation to long documents is stored."""
    deadline: float = math.inf
    """``time.time()`` at which a training ends early."""
    started: float = field(default_factory=time.time)
    name: str = "study"
    """In front of progress lines."""

    def model(self, *, long: bool, adapted: bool = False, dtype: torch.dtype | None = None) -> nn.Module:
        """A new model on the device; bf16 on a GPU, fp32 elsewhere.

        Args:
            long: with the RoPE scaling for long documents.
            adapted: with the adaptation of `adapt` merged into the weights.
        """
        dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        model: nn.Module = build_model(self.material, rope_factor=self.sizes.rope_factor if long else 1.0)
        if adapted:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(self.adapter)).merge_and_unload()
        model = model.to(self.device, dtype).train().requires_grad_(True)
        if self.device.type == "cuda":
            apply_liger(model)
        return model

    def say(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.time() - self.started:6.1f} s] {self.name}: {text}", flush=True)


def apply_liger(model: nn.Module) -> bool:
    """Liger's norm, RoPE and SwiGLU where it is installed."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        return False
    apply_liger_kernel_to_llama(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    return True


def dense_settings(chunk_tokens: int, page_tokens: int) -> Settings:
    return {"chunk_tokens": chunk_tokens, "page_tokens": page_tokens}


def sparse_settings(sizes: Sizes, chunk_tokens: int, *, top_k: int, page_tokens: int, **others: Any) -> Settings:
    """Settings of sparse attention with the study's recent tokens; ``others`` replace or add."""
    return {
        "chunk_tokens": chunk_tokens,
        "page_tokens": page_tokens,
        "attention": "sparse",
        "top_k": top_k,
        "recent_pages": sizes.recent_pages(page_tokens),
    } | others


@contextmanager
def switched_on(model: nn.Module, settings: Settings, *, training: bool = False) -> Iterator[nn.Module]:
    """The model with oomb_accel on.

    Args:
        training: keep what makes a backward faster. Outputs are kept by order, not by free memory, which other
            processes share here.
    """
    oomb_accel.enable(model, OombConfig(progress=False, keep_outputs=training, keep_last_graph=training, **settings))
    try:
        yield model
    finally:
        oomb_accel.disable(model)


def token_losses(model: nn.Module, ids: Ids | Tensor, *, sparse: bool, labels: Any = None) -> Tensor:
    """Loss of each token of a document but the first, fp32 on the CPU; 0 where there is no target.

    Args:
        sparse: as in training. Selection is for training only, so gradients are enabled; no backward runs.
    """
    device = next(model.parameters()).device
    tokens = torch.as_tensor(ids, dtype=torch.long, device=device)[None]
    wanted = tokens if labels is None else torch.as_tensor(labels, dtype=torch.long, device=device)[None]
    with torch.set_grad_enabled(sparse):
        output = model(input_ids=tokens, labels=wanted)
    losses: Tensor = -output.log_probs[0, :-1].detach()
    return losses.float().cpu()


def plain(settings: Settings) -> Settings:
    """Settings as JSON has them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def means(losses: Tensor) -> tuple[float, float]:
    """Mean over all tokens, and over the second half of the document, where there is a past to select from."""
    wide = losses.double()
    return float(wide.mean()), float(wide[len(wide) // 2 :].mean())


class Trainer:
    """AdamW with fp32 weights of its own beside a model of any dtype, warm-up, then cosine to a tenth."""

    def __init__(self, model: nn.Module, *, learning_rate: float, steps: int, warmup: int = 10) -> None:
        self._model: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._weights = [p.detach().float().clone() for p in self._model]
        fused = self._weights[0].is_cuda
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0, fused=fused
        )

        def rate(step: int) -> float:
            return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / max(1, steps)))

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate)

    def step(self, loss: Tensor) -> float:
        """Backward, clip to norm 1, update. Returns the norm before clipping."""
        loss.backward()
        for weight, parameter in zip(self._weights, self._model, strict=True):
            weight.grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(self._model, self._weights)
        return float(norm)


def train(
    bench: Bench,
    model: nn.Module,
    batches: Iterable[dict[str, Any]],
    *,
    learning_rate: float,
    steps: int,
    on_step: Callable[[int, float, float], None],
) -> int:
    """Train a model that is switched on.

    Args:
        batches: one document each: ``ids`` and perhaps ``labels``.
        on_step: called with the step's number from 1, its loss before the update and the gradient norm.

    Returns:
        Steps made: fewer than wanted at the deadline.
    """
    trainer = Trainer(model, learning_rate=learning_rate, steps=steps)
    done = 0
    for batch in batches:
        if time.time() > bench.deadline:
            break
        tokens = torch.as_tensor(batch["ids"], dtype=torch.long, device=bench.device)[None]
        labels = batch.get("labels")
        labels = tokens if labels is None else torch.as_tensor(labels, device=bench.device)[None]
        loss = model(input_ids=tokens, labels=labels).loss
        value = float(loss.detach())
        norm = trainer.step(loss)
        done += 1
        on_step(done, value, norm)
        if done == steps:
            break
    return done


def setup_row(bench: Bench) -> dict[str, Any]:
    """What the results of a run have in common."""
    return {
        **environment(),
        "liger": bench.device.type == "cuda" and _has_liger(),
        "model": bench.material.name,
        "weights": bench.material.digest,
        **describe(bench.texts),
    }


def _has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None
