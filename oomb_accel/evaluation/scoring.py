"""Losses and hits of chosen tokens of one document, chunk by chunk: full logits are never made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.data.documents import IGNORED
from oomb_accel.progress import ProgressLine


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the scored tokens, in the order of the document."""

    losses: Tensor
    """fp64 ``[targets]`` on the CPU, in nats."""
    hits: Tensor
    """bool ``[targets]`` on the CPU: whether the token was the likeliest one; empty where that was not asked for."""


@dataclass(slots=True)
class Subject:
    """A model that is being evaluated, switched on."""

    model: nn.Module
    tokenizer: Any
    config: OombConfig
    has_adapter: bool
    line: ProgressLine = field(default_factory=ProgressLine)

    @property
    def variants(self) -> tuple[str, ...]:
        """What is compared: the model alone, and with its adapter where there is one."""
        return ("base", "adapter") if self.has_adapter else ("model",)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the model runs in chunks."""
        self.model.eval().requires_grad_(False)
        oomb_accel.enable(self.model, self.config, on_progress=self.line)
        try:
            yield
        finally:
            self.line.clear()
            oomb_accel.disable(self.model)

    def score(self, variant: str, ids: Sequence[int] | Tensor, targets: Tensor, *, hits: bool = False) -> Scores:
        """Score some tokens of one document.

        Args:
            variant: one of :attr:`variants`.
            ids: of the document ``[T]``, at least 2.
            targets: bool ``[T]``: which tokens are scored. The first one never is: nothing stands before it.
            hits: also compare with the likeliest token.
        """
        device = next(self.model.parameters()).device
        tokens = torch.as_tensor(ids, dtype=torch.int64)
        labels = torch.where(targets, tokens, IGNORED)[None].to(device)
        # Pages are selected where gradients are enabled, as in training. No parameter wants one, so no graph is made.
        with torch.set_grad_enabled(self.config.attention == "sparse"), self._as(variant):
            output: Any = self.model(input_ids=tokens[None].to(device), labels=labels, fused_lm_head=hits)
        scored = targets[1:]
        losses = -output.log_probs[0, : len(tokens) - 1].detach().double().cpu()[scored]
        found = output.is_top1[0, : len(tokens) - 1].cpu()[scored] if hits else torch.zeros(0, dtype=torch.bool)
        return Scores(losses, found)

    @contextmanager
    def _as(self, variant: str) -> Iterator[None]:
        if variant == "base":
            with self.model.disable_adapter():  # type: ignore[operator]
                yield
        else:
            yield
