"""What ``enable`` keeps on a model between steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from oomb_accel.chunk_pass import AttentionSettings, ChunkPass
from oomb_accel.config import OombConfig
from oomb_accel.gradients import Deliveries
from oomb_accel.integrations import attention_interface
from oomb_accel.integrations.agreement import ranks_on_host
from oomb_accel.integrations.float8_base import Float8Base, Place
from oomb_accel.integrations.lora_layers import block_ends, lora_siblings
from oomb_accel.integrations.parameters import parameters_of
from oomb_accel.integrations.rope import DocumentRope
from oomb_accel.integrations.support import (
    ModelFacts,
    checkpointed_modules,
    decoder_layers,
    linear_layers,
    linear_places,
    sparse_layers,
)
from oomb_accel.keep import ActivationMeter
from oomb_accel.offload import Offload
from oomb_accel.pages import PageShape, PassNeeds
from oomb_accel.plan import Choice, ModelShape, read_shape
from oomb_accel.progress import ChunkEvent
from oomb_accel.recurrence import RecurrenceSettings
from oomb_accel.selection import OnSelection, PageSelector, SelectionSettings
from oomb_accel.selection_tally import SelectionTally

STATE = "_oomb_attachment"
"""Name of the attribute that holds the attachment, on the model and on its replaced forward."""


_SHARDED = {"FSDPModule", "FullyShardedDataParallel"}
"""Classes that FSDP gives to modules, or wraps them in."""


@dataclass(slots=True)
class Attachment:
    """Everything that ``enable`` keeps between steps. The state of a step lives on the call, not here."""

    model: nn.Module
    base: PreTrainedModel
    config: OombConfig
    facts: ModelFacts
    forward: Callable[..., Any]
    """The forward that was there before ours, for calls that pass through."""
    chunk_forward: Callable[..., Any]
    """The forward that chunks run through: the same one, or what lies below a wrapper for whole steps."""
    on_chunk: Callable[[ChunkEvent], None] | None
    own_forward: bool
    """Whether the model had an instance attribute ``forward`` before ours."""
    step_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around a chunked step: what the skipped wrapper would have entered."""
    deliveries: Deliveries = field(default_factory=Deliveries)
    notes: list[str] = field(default_factory=list)
    """Lines that others add to the banner: where settings come from, the engine around the model."""
    active: bool = True
    announced: bool = False
    chosen: Choice | None = None
    """What "auto" came to, from the first training step on."""
    stream_tokens: int | None = None
    """Tokens of the longest micro-batch, where whoever set up the training knows it."""
    optimizer_stands: bool = False
    """Whether the optimizer has its states before the first step, as DeepSpeed's have."""
    pages: str = ""
    """The banner's line about where pages lie, once a step has shown it."""
    pages_said: set[str] = field(default_factory=set)
    """Places for which that line was said."""
    seen_whole: bool = False
    """Whether a step has found the model unsharded; looking takes a walk over all modules, so it is done once."""
    on_selection: OnSelection | None = None
    """Told about every selection of pages."""
    on_stream: Callable[[tuple[int, ...], int], None] | None = None
    """Told the length of each document and the number of targets of every stream that is trained on."""
    head_is_last: bool | None = None
    """Whether the model returns as logits what its head returns; None before it was tried."""
    tally: SelectionTally | None = None
    """Counts what pages are selected, where somebody wants to know."""
    sparse_layers: frozenset[int] = field(init=False)
    """Layers that select pages; none with dense attention."""
    offload: Offload = field(init=False)
    """Host memory for pages and kept results, made when it is needed."""
    rope: DocumentRope = field(init=False)
    meter: ActivationMeter = field(init=False)
    checkpointed: tuple[nn.Module, ...] = field(init=False)
    """Modules that gradient checkpointing may be switched on for."""
    configs: tuple[Any, ...] = field(init=False)
    """Config objects that attention layers read their implementation from."""
    modules: tuple[nn.Module, ...] = field(init=False)
    """All modules of the model."""
    adapter_layers: tuple[BaseTunerLayer, ...] = field(init=False)
    lora_layers: tuple[BaseTunerLayer, ...] = field(init=False)
    """Plain LoRA layers, whose input cast is redundant under autocast."""
    lora_siblings: tuple[tuple[BaseTunerLayer, ...], ...] = field(init=False)
    """Groups of layers that read the same input."""
    around_head: tuple[nn.Module, ...] = field(init=False)
    """Modules within the model whose output is the head's, or has it."""
    block_ends: tuple[tuple[Any, ...], ...] = field(init=False)
    """Layers whose outputs may be kept from the forward sweep, those first that save most."""
    wrapped: bool = field(init=False)
    """Whether a wrapper runs layers again in the backward, outside of passes."""
    float8_base: Float8Base | None = field(init=False)
    """Frozen weights in 8 bits, where that is asked for."""

    def __post_init__(self) -> None:
        self.sparse_layers = sparse_layers(self.facts, self.config)
        self.offload = Offload(self.config.host_memory_gib, ranks_on_host())
        self.rope = DocumentRope(self.base)
        self.meter = ActivationMeter(_activation_estimate(self.base))
        # Found once: a walk over all modules takes milliseconds, in which the GPU would wait at every step.
        self.checkpointed = checkpointed_modules(self.base)
        self.modules = tuple(self.model.modules())
        layers = (
            module.config for module in self.modules if hasattr(module, "layer_idx") and hasattr(module, "config")
        )
        self.configs = tuple({id(config): config for config in (self.base.config.get_text_config(), *layers)}.values())
        self.adapter_layers = tuple(m for m in self.modules if isinstance(m, BaseTunerLayer))
        # A layer that a wrapper runs again in the backward must run there as it did in the pass.
        self.wrapped = any(type(module).__name__ == "CheckpointWrapper" for module in self.modules)
        self.lora_layers = () if self.wrapped else tuple(m for m in self.adapter_layers if _is_plain_lora(m))
        self.lora_siblings = lora_siblings(self.modules)
        head = self.base.get_output_embeddings()
        self.around_head = tuple(m for m in self.modules if m is not self.model and head in m.modules())
        self.block_ends = () if self.wrapped else block_ends(decoder_layers(self.base))
        self.float8_base = None
        if self.config.base_dtype == "float8":
            owned = (linear_places(layer) for layer in decoder_layers(self.base))
            self.float8_base = Float8Base(Place(*owner_and_name) for places in owned for owner_and_name in places)

    def settings(
        self,
        pass_context: Callable[[ChunkPass], AbstractContextManager[Any]],
        *,
        keep_last_graph: bool,
        always_one_node: bool,
    ) -> RecurrenceSettings:
        """Settings of one step, under the caller's modes."""
        config = self.config
        return RecurrenceSettings(
            attention=AttentionSettings(
                backend=config.backend,
                span_pages=self.span_pages,
                page_tokens=config.page_tokens,
                deterministic=config.deterministic,
            ),
            windows=self.facts.windows,
            keep_last_graph=keep_last_graph,
            always_one_node=always_one_node,
            pass_context=pass_context,
            fingerprint=self.fingerprint,
            on_chunk=self.on_chunk,
            meter=self.meter,
        )

    def listen(self, listener: Callable[[ChunkEvent], None]) -> None:
        """Tell one more listener about every chunk, before those that are there."""
        others = self.on_chunk

        def on_chunk(event: ChunkEvent) -> None:
            listener(event)
            if others is not None:
                others(event)

        self.on_chunk = on_chunk

    def fingerprint(self) -> dict[str, object]:
        """What must not change between the sweeps, by the name that an error gives it."""
        return {
            "oomb_accel was switched off": self.active,
            "train() or eval()": [module.training for module in self.modules],
            "the active adapter": [(m.active_adapters, m.disable_adapters) for m in self.adapter_layers],
            # A merge changes weights by their data, of which parameters do not tell.
            "which adapters are merged": [tuple(getattr(m, "merged_adapters", ())) for m in self.adapter_layers],
            "the scaling of an adapter": [dict(getattr(m, "scaling", {})) for m in self.adapter_layers],
            "the values of its parameters": [_identity(p) for p in parameters_of(self.model)],
        }

    def check_attached(self) -> None:
        """Refuse a step when attention would not come to us, or parameters are not whole.

        Raises:
            RuntimeError: somebody set another attention implementation.
            ValueError: the model was sharded by FSDP.
        """
        for config in self.configs:
            if not attention_interface.is_registered(config._attn_implementation):
                raise RuntimeError(
                    "The attention implementation was changed after oomb_accel was switched on.\n"
                    f"  It is {config._attn_implementation!r} now; perhaps another model shares its config object.\n"
                    "  Call oomb_accel.disable(model) and oomb_accel.enable(model, config) again."
                )
        if self.seen_whole:
            return
        kinds = {kind.__name__ for module in self.model.modules() for kind in type(module).__mro__}
        if kinds & _SHARDED:
            raise ValueError(
                "FSDP shards the parameters that chunks need whole; its gradients would be lost.\n"
                f"  Got {', '.join(sorted(kinds & _SHARDED))} in the model.\n"
                "  Use DDP: accelerate launch --multi_gpu, or train on one GPU."
            )
        self.seen_whole = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles of a model that is switched on would still run the original.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "A model that oomb_accel is on for cannot be copied or pickled: the copy would train the original.\n"
            f"  Got a copy or pickle of {type(self.model).__name__}.\n"
            "  Call oomb_accel.disable(model) first, or copy before enable; to save, use save_pretrained or state_dict."
        )

    def selector(self, *, tell_pages: bool) -> PageSelector | None:
        """A new one, for one stream; None where no layer selects pages.

        Args:
            tell_pages: whether somebody asks which are selected.
        """
        config = self.config
        if not self.sparse_layers:
            return None
        settings = SelectionSettings(
            top_k=config.top_k,
            q_block=config.q_block,
            sink_pages=config.sink_pages,
            recent_pages=config.recent_pages,
            page_budget=config.page_budget,
            select_per=config.select_per,
            causal_selection=config.causal_selection,
        )
        return PageSelector(settings, self.sparse_layers, self.on_selection, self.tally, tell_pages=tell_pages)

    @property
    def settled(self) -> OombConfig:
        """The settings with what was chosen."""
        if self.chosen is None:
            return self.config
        return replace(self.config, chunk_tokens=self.chosen.chunk_tokens, page_grad_dtype=self.chosen.page_grad_dtype)

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self.config.known_chunk_tokens if self.chosen is None else self.chosen.chunk_tokens

    @property
    def page_grad_dtype(self) -> torch.dtype:
        """Storage of page gradients; there are none before "auto" is chosen."""
        name = self.config.page_grad_dtype if self.chosen is None else self.chosen.page_grad_dtype
        return torch.float32 if name == "auto" else getattr(torch, name)

    @property
    def span_pages(self) -> int:
        """Most earlier pages per call of a dense layer."""
        return self.config.span_tokens // self.config.page_tokens

    def pass_needs(self) -> PassNeeds:
        """What one pass over a chunk asks of a layer at once."""
        config = self.config
        blocks = -(-self.chunk_tokens // config.q_block)
        listed = min(blocks * config.top_k, config.page_budget or sys.maxsize)
        return PassNeeds(
            chunk_pages=self.chunk_tokens // config.page_tokens,
            span_pages=self.span_pages,
            listed_pages=max(listed, config.top_k) + config.sink_pages + config.recent_pages,
        )

    def list_bytes(self, num_chunks: int) -> int:
        """Device memory of the lists of so many chunks, which are kept for the backward sweep."""
        config = self.config
        blocks = -(-self.chunk_tokens // config.q_block)
        return 4 * num_chunks * len(self.sparse_layers) * self.facts.num_kv_heads * blocks * config.top_k

    def model_shape(self) -> ModelShape:
        """The sizes of the model, for what is counted and planned.

        Raises:
            ValueError: its config does not say how large it is.
        """
        return replace(read_shape(self.base.config), windows=self.facts.windows)

    def page_shape(self, *, sparse: bool = False) -> PageShape:
        """What pages are like.

        Args:
            sparse: whether pages are selected, which needs more to be stored with them.
        """
        return PageShape(
            num_layers=self.facts.num_layers,
            num_kv_heads=self.facts.num_kv_heads,
            head_dim=self.facts.head_dim,
            page_tokens=self.config.page_tokens,
            grad_dtype=self.page_grad_dtype,
            windows=self.facts.windows,
            sparse_layers=self.sparse_layers if sparse else frozenset(),
            sink_pages=self.config.sink_pages,
            float8=self.config.page_dtype == "float8",
        )


def attachment_of(model: nn.Module) -> Attachment:
    """What ``enable`` left on the model.

    Raises:
        ValueError: the model is not switched on.
    """
    state: Attachment | None = getattr(model, STATE, None)
    if state is None:
        raise ValueError(
            f"oomb_accel is not on for this model.\n  Got {type(model).__name__} as it is.\n"
            "  Call oomb_accel.enable(model, config) first."
        )
    return state


def _identity(parameter: Any) -> tuple[int, ...]:
    """What changes with a parameter's values. ZeRO 3 gathers and frees the parameter itself all the time."""
    shard = getattr(parameter, "ds_tensor", None)
    return (parameter._version, parameter.data_ptr()) if shard is None else (shard._version,)


def _activation_estimate(base: PreTrainedModel) -> float:
    """Bytes of activations per token, from the widths of all linear layers of the blocks: each keeps its input, and
    what works on its output keeps that. What was measured for a 7B; taken until a step has measured its own."""
    widths = sum(m.in_features + m.out_features for m in linear_layers(base))
    head = base.get_output_embeddings()
    in_head = head.in_features + head.out_features if isinstance(head, nn.Linear) else 0
    return float((widths - in_head) * base.dtype.itemsize)


def _is_plain_lora(module: BaseTunerLayer) -> bool:
    """A LoRA layer of PEFT that casts its input; DoRA is none, since it computes with the cast input."""
    casts = getattr(module, "cast_input_dtype_enabled", True)
    return hasattr(module, "lora_A") and casts and not getattr(module, "lora_variant", None)
