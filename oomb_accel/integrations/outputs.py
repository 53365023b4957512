"""What a model that is switched on returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput


class LogitsNotKept(AttributeError, KeyError):
    """Full logits were asked for; they are never made."""


@dataclass
class OombOutput(ModelOutput):
    """Loss and log-probabilities of one micro-batch.

    Attributes:
        loss: 0-d fp32; differentiable once when gradients are enabled.
        log_probs: fp32 ``[B, L]``: at each position the log-probability of the next token where that is a
            target, 0 elsewhere; differentiable like the loss.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None

    @classmethod
    def of(cls, loss: Tensor, log_probs_BL: Tensor) -> OombOutput:
        """In evaluation ``log_probs`` is an attribute, but no item: Trainer takes every item but the loss for
        logits, and its metrics would be computed from something else without a word."""
        if torch.is_grad_enabled():
            return cls(loss=loss, log_probs=log_probs_BL)
        output = cls(loss=loss)
        vars(output)["log_probs"] = log_probs_BL  # setting it by its name would make it an item
        return output

    @property
    def logits(self) -> Tensor:
        """Not kept.

        Raises:
            LogitsNotKept: always.
        """
        raise self._not_kept()

    def __getitem__(self, key: Any) -> Any:
        if key == "logits":
            raise self._not_kept()
        return super().__getitem__(key)

    @staticmethod
    def _not_kept() -> LogitsNotKept:
        return LogitsNotKept(
            "Full logits are not kept: at this length they would not fit in memory.\n"
            "  Use outputs.loss or outputs.log_probs (log-probability of each target).\n"
            "  For logits of a short text call the model without labels under torch.no_grad(), or "
            "oomb_accel.disable(model)."
        )
