"""What ``enable`` keeps on a model between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from oomb_accel.attention import AttentionSettings
from oomb_accel.config import OombConfig
from oomb_accel.integrations.rope import DocumentRope
from oomb_accel.integrations.support import ModelFacts, checkpointed_modules
from oomb_accel.keep import ActivationMeter
from oomb_accel.pages import PageShape
from oomb_accel.progress import ChunkEvent
from oomb_accel.recurrence import RecurrenceSettings

STATE = "_oomb_attachment"
"""Name of the attribute that holds the attachment, on the model and on its replaced forward."""


@dataclass(slots=True)
class Attachment:
    """Everything that ``enable`` keeps between steps. The state of a step lives on the call, not here."""

    model: nn.Module
    base: PreTrainedModel
    config: OombConfig
    facts: ModelFacts
    forward: Callable[..., Any]
    on_chunk: Callable[[ChunkEvent], None] | None
    active: bool = True
    own_forward: bool = False
    announced: bool = False
    rope: DocumentRope = field(init=False)
    meter: ActivationMeter = field(init=False)
    checkpointed: tuple[nn.Module, ...] = field(init=False)
    """Modules that gradient checkpointing may be switched on for."""
    modules: tuple[nn.Module, ...] = field(init=False)
    adapter_layers: tuple[BaseTunerLayer, ...] = field(init=False)
    lora_layers: tuple[BaseTunerLayer, ...] = field(init=False)
    """Plain LoRA layers, whose input cast is redundant under autocast."""

    def __post_init__(self) -> None:
        self.rope = DocumentRope(self.base)
        self.meter = ActivationMeter(_activation_estimate(self.base))
        # Found once: a walk over all modules takes milliseconds, in which the GPU would wait at every step.
        self.checkpointed = checkpointed_modules(self.base)
        self.modules = tuple(self.model.modules())
        self.adapter_layers = tuple(m for m in self.modules if isinstance(m, BaseTunerLayer))
        self.lora_layers = tuple(m for m in self.adapter_layers if _is_plain_lora(m))

    def settings(self, pass_context: Callable[[], AbstractContextManager[Any]]) -> RecurrenceSettings:
        """Settings of one step, under the caller's modes."""
        config = self.config
        return RecurrenceSettings(
            attention=AttentionSettings(
                backend=config.backend,
                span_pages=config.span_tokens // config.page_tokens,
                page_tokens=config.page_tokens,
                deterministic=config.deterministic,
            ),
            windows=self.facts.windows,
            keep_last_graph=config.keep_last_graph,
            pass_context=pass_context,
            fingerprint=self.fingerprint,
            on_chunk=self.on_chunk,
            meter=self.meter,
        )

    def fingerprint(self) -> dict[str, object]:
        """What must not change between the sweeps, by the name that an error gives it."""
        return {
            "oomb_accel was switched off": self.active,
            "train() or eval()": [module.training for module in self.modules],
            "the active adapter": [(m.active_adapters, m.disable_adapters) for m in self.adapter_layers],
            "the values of its parameters": [p._version for p in self.model.parameters()],
        }

    def page_shape(self) -> PageShape:
        return PageShape(
            num_layers=self.facts.num_layers,
            num_kv_heads=self.facts.num_kv_heads,
            head_dim=self.facts.head_dim,
            page_tokens=self.config.page_tokens,
            grad_dtype=getattr(torch, self.config.page_grad_dtype),
            windows=self.facts.windows,
        )


def attachment_of(model: nn.Module) -> Attachment:
    """What ``enable`` left on the model.

    Raises:
        ValueError: the model is not switched on.
    """
    state: Attachment | None = getattr(model, STATE, None)
    if state is None:
        raise ValueError("oomb_accel is not on for this model.\n  Call oomb_accel.enable(model, config) first.")
    return state


def _activation_estimate(base: PreTrainedModel) -> float:
    """Bytes of activations per token, from the widths of all linear layers; generous, until one is measured."""
    widths = sum(m.in_features + 2 * m.out_features for m in base.modules() if isinstance(m, nn.Linear))
    head = base.get_output_embeddings()
    in_head = head.in_features + head.out_features if isinstance(head, nn.Linear) else 0
    return float((widths - in_head) * base.dtype.itemsize)


def _is_plain_lora(module: BaseTunerLayer) -> bool:
    """A LoRA layer of PEFT that casts its input; DoRA is none, since it computes with the cast input."""
    casts = getattr(module, "cast_input_dtype_enabled", True)
    return hasattr(module, "lora_A") and casts and not getattr(module, "lora_variant", None)
