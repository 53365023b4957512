"""What TRL's SFTTrainer asks of a forward: a log-probability, an entropy and a hit or miss per target, no logits.

TRL gives the model that it trains a "fused LM head": its forward, called with ``fused_lm_head=True``, returns these
and the trainer makes its loss and metrics of them. A model that is switched on answers such a call itself. Nothing
here needs TRL to be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

FUSED_HEAD_KEYWORD = "fused_lm_head"
_FUSED_HEAD_SETTINGS = {"temperature": 1.0, "cast_lm_head_to_fp32": False}
_FUSED_HEAD_OUTPUTS = {"log_probs", "entropy", "is_top1"}
_BLOCK_BYTES = 64 << 20
"""Size of the fp32 copy of logits that statistics are made from."""


@dataclass
class FusedHeadOutput(ModelOutput):
    """The fields that TRL reads, by TRL's names. Per-token fields are 0 where there is no target.

    Attributes:
        loss: 0-d fp32; differentiable like ``log_probs``.
        log_probs: fp32 ``[B, L - 1]`` (``[B, L]`` for a call with ``shift_labels``): log-probability of the next
            token; differentiable once.
        entropy: the same shape, in nats: of the distribution of the next token; for metrics, without gradient.
        is_top1: the same shape, bool: whether the next token is the most likely one.
        label_mask: the same shape, bool: where the targets are.
        aux_loss: always None; a model whose router has an auxiliary loss is refused.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


def check_fused_head(*forwards: Callable[..., Any]) -> None:
    """Refuse a fused head that was made to compute something else than what is answered here.

    Args:
        forwards: of the model, one of which may be TRL's.

    Raises:
        ValueError: naming the setting. TRL keeps its settings in the closure of the forward that it makes.
    """
    for forward in forwards:
        function = getattr(forward, "__func__", forward)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = getattr(function, "__closure__", None) or ()
        settings = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
        if "temperature" not in settings:
            continue
        wrong = {name: settings[name] for name, kept in _FUSED_HEAD_SETTINGS.items() if settings.get(name) != kept}
        extra = sorted(set(settings.get("outputs", ())) - _FUSED_HEAD_OUTPUTS)
        if wrong or extra:
            asked = [f"{name}={value}" for name, value in wrong.items()] + extra
            raise ValueError(
                "TRL's trainer asks for something that chunks do not compute.\n"
                f"  Its fused LM head has {', '.join(asked)}; supported: temperature=1.0, "
                f"{', '.join(sorted(_FUSED_HEAD_OUTPUTS))}.\n"
                "  Use SFTTrainer, or call oomb_accel.disable(model)."
            )


class TargetStatistics:
    """Entropy and hits of all targets of a stream, recorded chunk by chunk in the forward sweep."""

    def __init__(self, num_targets: int, device: torch.device) -> None:
        self._entropy_N = torch.zeros(num_targets, device=device)
        self._is_top1_N = torch.zeros(num_targets, dtype=torch.bool, device=device)

    @torch.no_grad()
    def record(self, logits_NV: Tensor, targets_N: Tensor, first_target: int) -> None:
        """Record the targets of one chunk.

        Args:
            logits_NV: of this chunk's targets; not kept.
            targets_N: their token ids.
            first_target: place of the chunk's first target in the stream.
        """
        block = max(1, _BLOCK_BYTES // (4 * logits_NV.shape[-1]))
        for start in range(0, targets_N.numel(), block):
            rows = slice(start, start + block)
            places = slice(first_target + start, first_target + start + targets_N[rows].numel())
            logits = logits_NV[rows].detach().float()
            self._is_top1_N[places] = logits.argmax(-1) == targets_N[rows]
            self._entropy_N[places] = torch.special.entr(logits.softmax(-1)).sum(-1)

    def output(self, loss: Tensor, log_probs_BL: Tensor, target_index_N: Tensor, *, shifted: bool) -> FusedHeadOutput:
        """Spread the targets over the batch.

        Args:
            loss, log_probs_BL: of the same step.
            target_index_N: place of each target's predicting token in the flattened batch.
            shifted: whether the caller gave ``shift_labels``; TRL then expects the last column too.
        """

        def spread(values_N: Tensor) -> Tensor:
            flat = values_N.new_zeros(log_probs_BL.numel()).scatter(0, target_index_N, values_N)
            return trimmed(flat.view(log_probs_BL.shape))

        def trimmed(values_BL: Tensor) -> Tensor:
            return values_BL if shifted else values_BL[:, :-1]

        return FusedHeadOutput(
            loss=loss,
            log_probs=trimmed(log_probs_BL),
            entropy=spread(self._entropy_N),
            is_top1=spread(self._is_top1_N),
            label_mask=spread(torch.ones_like(self._is_top1_N)),
        )
