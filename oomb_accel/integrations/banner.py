"""A few lines that say what is switched on."""

from __future__ import annotations

import logging
import os
import sys

from torch import nn
from transformers import PreTrainedModel

from oomb_accel.integrations.agreement import is_partitioned, num_ranks
from oomb_accel.integrations.attachment import Attachment, attachment_of
from oomb_accel.integrations.float8_base import Float8Base
from oomb_accel.integrations.rope import describe_rope
from oomb_accel.integrations.support import compute_dtype, whole_numel
from oomb_accel.plan.sizes import size_text
from oomb_kernels import AttentionCall, choose_backend

logger = logging.getLogger("oomb_accel")


def banner(model: nn.Module) -> str:
    """What is active for a model that is switched on: chunks, pages, attention backends, RoPE, parameters.

    Tells of the device that the model is on now and of the autocast mode that is set now. Asking for it counts as
    having said it: the first step then says nothing.

    Raises:
        ValueError: the model is not switched on, or a forced backend cannot do its attention.
    """
    state = attachment_of(model)
    state.announced = True
    return describe(state)


def describe(state: Attachment) -> str:
    """The banner of an attachment."""
    config, facts = state.config, state.facts
    trainable = sum(whole_numel(p) for p in state.model.parameters() if p.requires_grad)
    total = sum(whole_numel(p) for p in state.model.parameters())
    windows = [window for window in facts.windows if window is not None]
    stored = "" if config.page_dtype == "model" else f" in {config.page_dtype}"
    lines = [
        f"oomb_accel on {type(state.base).__name__} ({facts.model_type}), {facts.num_layers} layers, "
        f"{trainable:,} of {total:,} parameters trainable",
        f"  chunks     {_chunk(state)}, pages {config.page_tokens}{stored}, "
        f"spans {config.span_tokens:,}; page gradients {state.settled.page_grad_dtype}; "
        f"outputs kept: {config.keep_outputs}",
        f"  attention  {config.attention}: {_backends(state)}",
        *([f"  selection  {_selection(state)}"] if state.sparse_layers else []),
        *([f"  base       {_float8_base(state.float8_base, state.base)}"] if state.float8_base is not None else []),
        f"  RoPE       {describe_rope(state.base.config.get_text_config())}",
    ]
    if windows:
        lines.append(f"  windows    {len(windows)} layers attend to {windows[0]:,} tokens, the rest to everything")
    if state.pages:
        lines.append(f"  pages      {state.pages}")
    lines += [f"  {line}" for line in (*_gradients(state), *state.notes)]
    return "\n".join(lines)


def _chunk(state: Attachment) -> str:
    """Their size, or that nobody knows it yet."""
    undecided = state.chosen is None and state.config.chunk_tokens == "auto"
    return "auto (chosen at the first training step)" if undecided else f"{state.chunk_tokens:,} tokens"


def say(state: Attachment, text: str) -> None:
    """To the log if somebody listens, else to stderr, and not at all with progress=False."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    elif state.config.progress is not False and os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def _gradients(state: Attachment) -> list[str]:
    """How gradients reach the parameters, and why."""
    ranks = f"{num_ranks()} ranks" if num_ranks() > 1 else "1 process"
    if not is_partitioned(state.model):
        why = "hooks of DDP and ZeRO 0-2 fire once per micro-batch, unequal ranks never wait inside a sweep"
        return [f"gradients  returned, summed over chunks in fp32; {ranks}: {why}"]
    gathered = sum(
        whole_numel(p) * p.element_size() for p in state.model.parameters() if not getattr(p, "ds_persist", True)
    )
    return [
        f"gradients  deferred to the last chunk, because ZeRO 3 holds parameters in parts; {ranks} agree on the number "
        "of chunks before every call",
        f"gathering  {size_text(gathered)} of parameters three times per chunk of {state.chunk_tokens:,} "
        "tokens, overlapped by DeepSpeed's prefetch; larger chunks gather less often, ZeRO 2 never",
    ]


def _float8_base(float8: Float8Base, base: PreTrainedModel) -> str:
    """How many layers run in 8 bits, and what that takes."""
    able = float8.able_layers()
    copies = 2 * sum(layer.weight.numel() for layer in able)
    simulated = "" if next(base.parameters()).is_cuda else "; simulated, which is slow"
    return f"{len(able)} of {len(float8.layers)} linear layers in float8, {size_text(copies)} of copies{simulated}"


def _selection(state: Attachment) -> str:
    """Which layers are sparse, and what their queries attend to."""
    config, facts = state.config, state.facts
    who = "KV head" if config.select_per == "kv_head" else "layer"
    extras = [
        "chosen by the block before" if config.causal_selection else "",
        f"at most {config.page_budget:,} pages per chunk" if config.page_budget is not None else "",
    ]
    dense = sorted({layer for layer, window in enumerate(facts.windows) if window is None} - state.sparse_layers)
    return (
        f"{len(state.sparse_layers)} of {facts.num_layers} layers select {config.top_k:,} pages per {config.q_block} "
        f"queries and {who}{''.join(f', {extra}' for extra in extras if extra)}; beside the own chunk, the first "
        f"{config.sink_pages} and last {config.recent_pages} pages"
        + (f"; dense layers {', '.join(map(str, dense))}" if dense else "")
        + "; dense without gradients"
    )


def _backends(state: Attachment) -> str:
    """Which library does which part, by asking the question that the attention layers ask."""
    chunk, span = state.chunk_tokens, state.config.span_tokens
    window = next((w for w in state.facts.windows if w is not None), None)
    parts = []
    if any(w is None for w in state.facts.windows):
        parts.append("own chunk " + _backend(state, chunk, chunk, causal=True))
        parts.append("earlier spans " + _backend(state, chunk, span))
    if state.sparse_layers:
        on_gpu = next(state.model.parameters()).is_cuda
        parts.append(f"selected pages {'triton' if on_gpu else 'torch'}")
    if window is not None:
        parts.append("windows " + _backend(state, chunk, chunk + window, causal=True, window=window))
    try:
        halves = (chunk // 2, chunk - chunk // 2)
        packed = _backend(state, chunk, chunk, causal=True, window=window, segments=halves)
    except ValueError:
        packed = f"not by {state.config.backend}"
    return ", ".join([*parts, "packed documents " + packed])


def _backend(
    state: Attachment,
    num_q: int,
    num_k: int,
    *,
    causal: bool = False,
    window: int | None = None,
    segments: tuple[int, ...] | None = None,
) -> str:
    device = next(state.model.parameters()).device
    return choose_backend(
        state.config.backend,
        device=device,
        dtype=compute_dtype(state.base, device),
        head_dim=state.facts.head_dim,
        call=AttentionCall(
            scale=1.0,
            causal=causal,
            window=window,
            softcap=getattr(state.base.config.get_text_config(), "attn_logit_softcapping", None),
            segments=segments,
            deterministic=state.config.deterministic,
        ),
        num_q=num_q,
        num_k=num_k,
    )
