"""Chunk recurrence: exact training on a long stream with the activations of one chunk.

The stream is cut into chunks (`schedule.py`). Two sweeps:

1. Forward sweep, left to right, without gradients. Each chunk runs through the whole model; its attention layers
   keep K and V of the chunk in pages and attend to all earlier pages. What comes out is the log-probability of
   each target. Everything else is forgotten.
2. Backward sweep, right to left. Each chunk runs again, now with gradients, against the same pages. Its backward
   adds dK and dV of earlier tokens to *their* pages. When the sweep reaches a chunk, all later chunks have left
   their share in its pages, and its attention layers return that share together with their own dK and dV. So
   the gradient of every chunk is complete, and its pages can go.

From outside it is one differentiable function of the trainable parameters: one forward, one backward. Dropout
draws the same masks in both sweeps. (OOMB, arXiv 2602.02108, Algorithm 1; the sweep order is SeCO's.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from oomb_accel.attention import AttentionSettings, ChunkPass, Sweep
from oomb_accel.hooks import without_hooks
from oomb_accel.keep import ActivationMeter
from oomb_accel.pages import PagedKVCache
from oomb_accel.progress import ChunkEvent
from oomb_accel.rng import RngState
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
    pass_context: Callable[[], AbstractContextManager[Any]]
    """Entered around every pass: autocast and other thread-local modes of the caller."""
    fingerprint: Callable[[], dict[str, object]]
    """Everything about the model that must be the same in both sweeps, by name."""
    on_chunk: Callable[[ChunkEvent], None] | None
    meter: ActivationMeter


def run_recurrence(
    model: ChunkModel,
    schedule: ChunkSchedule,
    cache: PagedKVCache,
    settings: RecurrenceSettings,
    *,
    parameters: Sequence[Tensor],
    embeds_1TD: Tensor | None,
    kept_chunks: frozenset[int],
    device: torch.device,
) -> Tensor:
    """Log-probabilities of all targets of the stream.

    Differentiable, once, in the trainable ``parameters`` and in ``embeds_1TD``. Without gradients enabled it is
    the forward sweep alone.

    Args:
        model: runs one chunk.
        schedule: of the stream; at least one chunk.
        cache: empty, for this stream.
        parameters: the trainable parameters that ``model`` uses.
        embeds_1TD: input embeddings of the stream ``[1, T, D]``, or None when the model takes token ids.
        kept_chunks: chunks whose attention outputs are kept for the backward sweep.

    Returns:
        ``[num_targets]`` in fp32, in stream order.

    Raises:
        RuntimeError: in its backward, if the backward has run before or the model has changed since the forward.
    """
    recurrence = ChunkRecurrence(model, schedule, cache, settings, kept_chunks, device)
    if not torch.is_grad_enabled():
        return recurrence.forward_sweep(embeds_1TD)
    # Deterministic kernels are asked for around each sweep, and an ordinary step's backward is the caller's.
    if len(schedule.chunks) == 1 and settings.keep_last_graph and not settings.attention.deterministic:
        return recurrence.ordinary_step(embeds_1TD)
    leaves = list(parameters) + ([embeds_1TD] if embeds_1TD is not None else [])
    log_probs_N: Tensor = _Recurrence.apply(recurrence, embeds_1TD is not None, *leaves)
    return log_probs_N


class _Recurrence(torch.autograd.Function):
    """One node in the caller's graph; parameter hooks of DDP and ZeRO fire once."""

    @staticmethod
    def forward(ctx: Any, recurrence: ChunkRecurrence, has_embeds: bool, *leaves: Tensor) -> Tensor:
        parameters = leaves[:-1] if has_embeds else leaves
        embeds_1TD = leaves[-1] if has_embeds else None
        ctx.recurrence, ctx.has_embeds = recurrence, has_embeds
        ctx.save_for_backward(*leaves)
        return recurrence.forward_sweep(embeds_1TD, parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        recurrence: ChunkRecurrence | None = ctx.recurrence
        if recurrence is None:
            raise RuntimeError(
                "The backward of this step has already run; its pages are freed.\n"
                "  Call backward once per forward (sum losses first), or run the forward again."
            )
        recurrence.refuse_changes()
        ctx.recurrence = None
        leaves = ctx.saved_tensors
        parameters, embeds_1TD = (leaves[:-1], leaves[-1]) if ctx.has_embeds else (leaves, None)
        return None, None, *recurrence.backward_sweep(grads[0], parameters, embeds_1TD)


class ChunkRecurrence:
    """Both sweeps over one stream. Lives from the caller's forward to its backward."""

    def __init__(
        self,
        model: ChunkModel,
        schedule: ChunkSchedule,
        cache: PagedKVCache,
        settings: RecurrenceSettings,
        kept_chunks: frozenset[int],
        device: torch.device,
    ) -> None:
        self._model = model
        self._schedule = schedule
        self._cache = cache
        self._settings = settings
        self._device = device
        self._kept: dict[int, dict[int, tuple[Tensor, Tensor]]] = {index: {} for index in kept_chunks}
        self._rng: dict[int, RngState] = {}
        self._last_graph: tuple[Tensor, Tensor | None] | None = None
        self._fingerprint: dict[str, object] = {}

    def ordinary_step(self, embeds_1TD: Tensor | None) -> Tensor:
        """A stream of one chunk: one pass, whose graph is the caller's own."""
        (chunk,) = self._schedule.chunks
        with self._settings.meter.measure(chunk.num_tokens, self._device):
            log_probs_N = self._run(chunk, "forward", embeds_1TD)
        self._report("forward", 1, chunk.end)
        return log_probs_N

    def forward_sweep(self, embeds_1TD: Tensor | None, parameters: Sequence[Tensor] = ()) -> Tensor:
        """Fill the pages and return the log-probability of each target, ``[num_targets]``.

        With trainable parameters or embeddings, the last chunk keeps its graph where the settings say so.
        """
        train = bool(parameters) or (embeds_1TD is not None and embeds_1TD.requires_grad)
        if train:
            self._fingerprint = self._settings.fingerprint()
        log_probs = []
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
            self._report("forward", chunk.index + 1, chunk.end, train)
        return torch.cat(log_probs)

    def backward_sweep(
        self, grad_N: Tensor, parameters: Sequence[Tensor], embeds_1TD: Tensor | None
    ) -> list[Tensor | None]:
        """Gradients of the parameters and, last, of the embeddings where there are some.

        Args:
            grad_N: gradient of each target's log-probability, ``[num_targets]``.
        """
        sums = [torch.zeros_like(p, dtype=_wide(p)) if p.requires_grad else None for p in parameters]
        wanted = [p for p in parameters if p.requires_grad]
        held = [s for s in sums if s is not None]
        embeds_grad = torch.zeros_like(embeds_1TD) if embeds_1TD is not None and embeds_1TD.requires_grad else None
        for done, chunk in enumerate(reversed(self._schedule.chunks), start=1):
            log_probs_N, leaf_1TD = self._take_graph(chunk, embeds_1TD)
            inputs = wanted + ([leaf_1TD] if leaf_1TD is not None and embeds_grad is not None else [])
            grads = self._gradients(log_probs_N, inputs, grad_N[chunk.first_target : chunk.end_target])
            del log_probs_N
            _add_to_sums(held, grads[: len(wanted)])
            if embeds_grad is not None and grads[-1] is not None:
                embeds_grad[:, chunk.start : chunk.end] = grads[-1]
            del grads, inputs, leaf_1TD
            self._kept.pop(chunk.index, None)
            self._cache.release(chunk)
            self._report("backward", done, self._schedule.num_tokens - chunk.start)
        results = [s.to(p.dtype) if s is not None else None for s, p in zip(sums, parameters, strict=True)]
        return results + ([embeds_grad] if embeds_1TD is not None else [])

    def _gradients(self, log_probs_N: Tensor, inputs: list[Tensor], grad_N: Tensor) -> tuple[Tensor | None, ...]:
        with (
            deterministic_algorithms(self._settings.attention.deterministic),
            torch.autocast(self._device.type, enabled=False),  # a backward has the precision of its forward
            without_hooks(inputs),
        ):
            # A parameter may play no part in a chunk.
            return torch.autograd.grad(log_probs_N, inputs, grad_N, allow_unused=True)

    def _take_graph(self, chunk: Chunk, embeds_1TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The chunk's log-probabilities with a graph: kept from the forward sweep, or by running it again."""
        if self._last_graph is not None:
            graph, self._last_graph = self._last_graph, None
            return graph
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # puts the caller's generators back
            self._rng[chunk.index].restore(self._device)
            return self._run_with_graph(chunk, "backward", embeds_1TD)

    def _run_with_graph(self, chunk: Chunk, sweep: Sweep, embeds_1TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        leaf_1TD = _slice(embeds_1TD, chunk)
        if leaf_1TD is not None:
            leaf_1TD = leaf_1TD.detach().requires_grad_(embeds_1TD is not None and embeds_1TD.requires_grad)
        with torch.enable_grad(), self._settings.meter.measure(chunk.num_tokens, self._device):
            return self._run(chunk, sweep, leaf_1TD), leaf_1TD

    def _run(self, chunk: Chunk, sweep: Sweep, embeds_1TD: Tensor | None) -> Tensor:
        run = ChunkPass(
            chunk=chunk,
            sweep=sweep,
            cache=self._cache,
            settings=self._settings.attention,
            windows=self._settings.windows,
            kept=self._kept.get(chunk.index),
        )
        with self._settings.pass_context(), deterministic_algorithms(self._settings.attention.deterministic):
            return self._model(run, embeds_1TD)

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
            self._settings.on_chunk(
                ChunkEvent(
                    sweep=sweep,
                    chunk=done,
                    num_chunks=len(self._schedule.chunks),
                    tokens_done=tokens_done,
                    total_tokens=self._schedule.num_tokens,
                    device=str(self._device),
                    with_backward=with_backward,
                )
            )


def _add_to_sums(sums: list[Tensor], grads: Sequence[Tensor | None]) -> None:
    pairs = [(s, g) for s, g in zip(sums, grads, strict=True) if g is not None]
    if pairs:
        torch._foreach_add_([s for s, _ in pairs], [g.to(s.dtype) for s, g in pairs])


def _slice(embeds_1TD: Tensor | None, chunk: Chunk) -> Tensor | None:
    return None if embeds_1TD is None else embeds_1TD[:, chunk.start : chunk.end]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
