"""Chunk recurrence: exact training on a long stream with the activations of one chunk.

The stream is cut into chunks (`schedule.py`). Two sweeps:

1. Forward sweep, left to right, without gradients. Each chunk runs through the whole model; its attention layers
   keep K and V of the chunk in pages and attend to all earlier pages, or to those that they select. What comes out
   is the log-probability of each target. Everything else is forgotten.
2. Backward sweep, right to left. Each chunk runs again, now with gradients, against the same pages and selections.
   Its backward adds dK and dV of earlier tokens to *their* pages. When the sweep reaches a chunk, all later chunks
   have left their share in its pages, and its attention layers return that share together with their own dK and dV.
   So the gradient of every chunk is complete, and its pages can go.

From outside it is one differentiable function of the trainable parameters: one forward, one backward. Dropout
draws the same masks in both sweeps. (OOMB, arXiv 2602.02108, Algorithm 1; the sweep order is SeCO's.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from oomb_accel.chunk_pass import AttentionSettings, ChunkPass, Sweep
from oomb_accel.gradients import StepGradients
from oomb_accel.keep import ActivationMeter
from oomb_accel.memory import StreamMemory
from oomb_accel.progress import ChunkEvent
from oomb_accel.rng import RngState, forked_rng
from oomb_accel.schedule import Chunk, ChunkSchedule
from oomb_kernels import deterministic_algorithms


class ChunkModel(Protocol):
    """The model as the recurrence sees it: one chunk in, log-probabilities of its targets out."""

    def __call__(self, run: ChunkPass, embeds_1TD: Tensor | None) -> Tensor:
        """Run one chunk. ``embeds_1TD`` are its input embeddings where the caller gave embeddings, not ids."""


@dataclass(frozen=True, slots=True)
class RecurrenceSettings:
    """What stays the same from step to step."""

    attention: AttentionSettings
    windows: tuple[int | None, ...]
    keep_last_graph: bool
    always_one_node: bool
    """Other ranks may be in a step of many chunks, and ZeRO 2 reduces gradients in the order of their arrival."""
    pass_context: Callable[[ChunkPass], AbstractContextManager[Any]]
    """Entered around every pass: autocast and other thread-local modes of the caller."""
    fingerprint: Callable[[], dict[str, object]]
    """Everything about the model that must be the same in both sweeps, by name."""
    on_chunk: Callable[[ChunkEvent], None] | None
    meter: ActivationMeter


@dataclass(frozen=True, slots=True)
class DummyPasses:
    """Passes over one token without targets, which keep a rank with fewer chunks in step with the others.

    They come first in both sweeps, so that no rank waits with its pages full. Progress reports count them.
    """

    count: int
    model: ChunkModel
    chunk: Chunk
    memory: StreamMemory


def run_recurrence(recurrence: ChunkRecurrence, gradients: StepGradients, embeds_1TD: Tensor | None) -> Tensor:
    """Log-probabilities of all targets of the stream.

    Differentiable, once, in what ``gradients`` serves and in ``embeds_1TD``. Without gradients enabled it is
    the forward sweep alone.

    Args:
        recurrence: new, for this stream.
        gradients: where the gradients of the passes go.
        embeds_1TD: input embeddings of the stream ``[1, T, D]``, or None when the model takes token ids.

    Returns:
        ``[num_targets]`` in fp32, in stream order.

    Raises:
        RuntimeError: in its backward, if the backward has run before or the model has changed since the forward.
    """
    if not torch.is_grad_enabled():
        return recurrence.forward_sweep(embeds_1TD)
    if recurrence.is_ordinary:
        return recurrence.ordinary_step(embeds_1TD)
    leaves = [*gradients.leaves, *([embeds_1TD] if embeds_1TD is not None else [])]
    log_probs_N: Tensor = _Recurrence.apply(recurrence, gradients, embeds_1TD is not None, *leaves)
    return log_probs_N


class _Recurrence(torch.autograd.Function):
    """One node in the caller's graph; parameter hooks of DDP and ZeRO fire once."""

    @staticmethod
    def forward(
        ctx: Any, recurrence: ChunkRecurrence, gradients: StepGradients, has_embeds: bool, *leaves: Tensor
    ) -> Tensor:
        ctx.recurrence, ctx.gradients, ctx.has_embeds = recurrence, gradients, has_embeds
        ctx.save_for_backward(*leaves)
        train = any(leaf.requires_grad for leaf in leaves)
        return recurrence.forward_sweep(leaves[-1] if has_embeds else None, train=train)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        recurrence: ChunkRecurrence | None = ctx.recurrence
        if recurrence is None:
            raise RuntimeError(
                "The backward of this step has already run; its pages are freed.\n"
                "  Got a second backward for one forward.\n"
                "  Call backward once per forward (sum losses first), or run the forward again."
            )
        recurrence.refuse_changes()
        ctx.recurrence = None
        embeds_1TD = ctx.saved_tensors[-1] if ctx.has_embeds else None
        gradients, ctx.gradients = ctx.gradients, None  # the node may live on with the caller's loss
        embeds_grad = recurrence.backward_sweep(grads[0], gradients, embeds_1TD)
        return None, None, None, *gradients.results(), *([embeds_grad] if ctx.has_embeds else [])


class ChunkRecurrence:
    """Both sweeps over one stream. Lives from the caller's forward to its backward.

    Args:
        model: runs one chunk.
        schedule: of the stream; may be without chunks when there are dummy passes.
        memory: empty, for this stream.
        dummies: passes that other ranks wait for.
    """

    def __init__(
        self,
        model: ChunkModel,
        schedule: ChunkSchedule,
        memory: StreamMemory,
        settings: RecurrenceSettings,
        dummies: DummyPasses,
        device: torch.device,
    ) -> None:
        self._model = model
        self._schedule = schedule
        self._memory = memory
        self._settings = settings
        self._dummies = dummies
        self._device = device
        self._rng: dict[int, RngState] = {}
        self._last_graph: tuple[Tensor, Tensor | None] | None = None
        self._fingerprint: dict[str, object] = {}

    @property
    def num_passes(self) -> int:
        """Passes of one sweep."""
        return self._dummies.count + len(self._schedule.chunks)

    @property
    def is_ordinary(self) -> bool:
        """Whether one pass is all, and its graph may be the caller's own."""
        settings = self._settings
        # Deterministic kernels are asked for around each sweep, and an ordinary step's backward is the caller's.
        bound = settings.always_one_node or settings.attention.deterministic
        return self.num_passes == 1 and settings.keep_last_graph and not bound

    def ordinary_step(self, embeds_1TD: Tensor | None) -> Tensor:
        """A step of one pass: its graph is the caller's own."""
        if self._dummies.count:
            return self._run_dummy("forward")
        (chunk,) = self._schedule.chunks
        with self._settings.meter.measure(chunk.num_tokens, self._device):
            log_probs_N = self._run(chunk, "forward", embeds_1TD)
        self._report("forward", 1, chunk.end)
        return log_probs_N

    def forward_sweep(self, embeds_1TD: Tensor | None, *, train: bool = False) -> Tensor:
        """Fill the pages and return the log-probability of each target, ``[num_targets]``.

        In training, the last chunk keeps its graph where the settings say so.
        """
        if train:
            self._fingerprint = self._settings.fingerprint()
        log_probs = []
        for done in range(self._dummies.count):
            with torch.no_grad():
                log_probs.append(self._run_dummy("forward"))
            self._report("forward", done + 1, 0, train)
        for chunk in self._schedule.chunks:
            last = chunk is self._schedule.chunks[-1]
            if train:
                self._rng[chunk.index] = RngState.capture(self._device)
            if train and last and self._settings.keep_last_graph:
                self._last_graph = self._run_with_graph(chunk, "forward", embeds_1TD)
                log_probs.append(self._last_graph[0].detach())
            else:
                with torch.no_grad():
                    log_probs.append(self._run(chunk, "forward", _slice(embeds_1TD, chunk)))
            self._report("forward", self._dummies.count + chunk.index + 1, chunk.end, train)
        return torch.cat(log_probs) if log_probs else torch.zeros(0, device=self._device)

    def backward_sweep(self, grad_N: Tensor, gradients: StepGradients, embeds_1TD: Tensor | None) -> Tensor | None:
        """Run the passes again, last chunk first, and give their gradients to ``gradients``.

        Args:
            grad_N: gradient of each target's log-probability, ``[num_targets]``.

        Returns:
            Gradient of the embeddings, where they want one.
        """
        embeds_grad = torch.zeros_like(embeds_1TD) if embeds_1TD is not None and embeds_1TD.requires_grad else None
        for done in range(1, self._dummies.count + 1):
            with torch.enable_grad():
                log_probs_N = self._run_dummy("backward")
            self._back_propagate(gradients, log_probs_N, grad_N[:0], None, last=done == self.num_passes)
            self._report("backward", done, 0)
        for done, chunk in enumerate(reversed(self._schedule.chunks), start=self._dummies.count + 1):
            log_probs_N, leaf_1TD = self._take_graph(chunk, embeds_1TD)
            grad_chunk_N = grad_N[chunk.first_target : chunk.end_target]
            self._memory.begin(chunk, "backward")
            grad = self._back_propagate(gradients, log_probs_N, grad_chunk_N, leaf_1TD, last=done == self.num_passes)
            del log_probs_N, leaf_1TD
            if embeds_grad is not None and grad is not None:
                embeds_grad[:, chunk.start : chunk.end] = grad
            self._memory.release(chunk)
            self._report("backward", done, self._schedule.num_tokens - chunk.start)
        return embeds_grad

    def _back_propagate(
        self, gradients: StepGradients, log_probs_N: Tensor, grad_N: Tensor, leaf_1TD: Tensor | None, *, last: bool
    ) -> Tensor | None:
        with (
            deterministic_algorithms(self._settings.attention.deterministic),
            torch.autocast(self._device.type, enabled=False),  # a backward has the precision of its forward
        ):
            return gradients.add(log_probs_N, grad_N, leaf_1TD, last=last)

    def _take_graph(self, chunk: Chunk, embeds_1TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The chunk's log-probabilities with a graph: kept from the forward sweep, or by running it again."""
        if self._last_graph is not None:
            graph, self._last_graph = self._last_graph, None
            return graph
        with forked_rng(self._device):
            self._rng[chunk.index].restore(self._device)
            return self._run_with_graph(chunk, "backward", embeds_1TD)

    def _run_with_graph(self, chunk: Chunk, sweep: Sweep, embeds_1TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        leaf_1TD = _slice(embeds_1TD, chunk)
        if leaf_1TD is not None:
            leaf_1TD = leaf_1TD.detach().requires_grad_(embeds_1TD is not None and embeds_1TD.requires_grad)
        with torch.enable_grad(), self._settings.meter.measure(chunk.num_tokens, self._device):
            return self._run(chunk, sweep, leaf_1TD), leaf_1TD

    def _run_dummy(self, sweep: Sweep) -> Tensor:
        """No log-probabilities, ``[0]``; with gradients enabled they hang on every parameter."""
        dummies, settings = self._dummies, self._settings
        run = ChunkPass(dummies.chunk, sweep, dummies.memory, settings.attention, settings.windows)
        with forked_rng(self._device):
            return self._call(dummies.model, run, None)

    def _run(self, chunk: Chunk, sweep: Sweep, embeds_1TD: Tensor | None) -> Tensor:
        run = ChunkPass(chunk, sweep, self._memory, self._settings.attention, self._settings.windows)
        self._memory.begin(chunk, "forward" if sweep == "forward" else "recompute")
        return self._call(self._model, run, embeds_1TD)

    def _call(self, model: ChunkModel, run: ChunkPass, embeds_1TD: Tensor | None) -> Tensor:
        with self._settings.pass_context(run), deterministic_algorithms(self._settings.attention.deterministic):
            return model(run, embeds_1TD)

    def refuse_changes(self) -> None:
        """Refuse a model that is not the one of the forward sweep.

        Raises:
            RuntimeError: naming what has changed.
        """
        now = self._settings.fingerprint()
        changed = [name for name, value in self._fingerprint.items() if now[name] != value]
        if changed:
            raise RuntimeError(
                f"The model was changed between forward and backward: {', '.join(changed)}.\n"
                "  The backward sweep runs the model again, so its gradients would belong to another model.\n"
                "  Call backward before you change the model, or run the forward again."
            )

    def _report(self, sweep: Sweep, done: int, tokens_done: int, with_backward: bool = True) -> None:
        if self._settings.on_chunk is not None:
            place = (sweep, done, self.num_passes, tokens_done, self._schedule.num_tokens, str(self._device))
            self._settings.on_chunk(ChunkEvent(*place, with_backward, self._memory.device_bytes))


def _slice(embeds_1TD: Tensor | None, chunk: Chunk) -> Tensor | None:
    return None if embeds_1TD is None else embeds_1TD[:, chunk.start : chunk.end]
