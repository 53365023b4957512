"""One chunked step: batch to stream, recurrence, loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oomb_accel.attention import ChunkPass
from oomb_accel.integrations import attention_interface
from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.outputs import OombOutput
from oomb_accel.integrations.rope import check_length
from oomb_accel.integrations.stream import Stream, build_stream, check_targets
from oomb_accel.integrations.support import check_checkpointing, check_device, compute_dtype, switched_on_outputs
from oomb_accel.keep import chunks_to_keep, free_bytes
from oomb_accel.loss import target_log_probs
from oomb_accel.pages import PagedKVCache
from oomb_accel.recurrence import ChunkModel, run_recurrence

_FULL_OUTPUTS = ("output_attentions", "output_hidden_states", "past_key_values")
_BATCH_KEYS = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    *("num_items_in_batch", "num_targets", "use_cache", "return_dict", "cache_position"),
}


def chunked_step(state: Attachment, batch: dict[str, Any]) -> OombOutput | tuple[Tensor, ...]:
    """The chunked step: batch to stream, recurrence, loss.

    Args:
        batch: arguments of the model's forward by name, with ``labels`` or ``shift_labels``; see `build_stream`.

    Raises:
        ValueError: inputs that contradict each other, that chunks do not know, or that ask for full logits.
    """
    _check_request(batch)
    state.check_attached()
    if reasons := switched_on_outputs(state.base):
        raise ValueError("A chunked step returns the loss only:\n  - " + "\n  - ".join(reasons))
    if state.model.training:
        check_checkpointing(state.checkpointed)
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    device = tokens.device
    check_device(state.base, tokens)
    stream = build_stream(
        batch, chunk_tokens=state.config.chunk_tokens, page_tokens=state.config.page_tokens, device=device
    )
    text_config = state.base.config.get_text_config()
    check_targets(stream, text_config.vocab_size)
    if state.config.beyond_trained_length == "error":
        check_length(text_config, stream.document_tokens)
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    if stream.num_targets == 0:
        log_probs_N = _no_targets(tokens, parameters)
    else:
        log_probs_N = _log_probs(state, batch, stream, parameters, device)
    loss = log_probs_N.neg().sum() / _normaliser(batch, stream)
    shape = tokens.shape[:2]
    spread = log_probs_N.new_zeros(shape[0] * shape[1])
    log_probs_BL = spread.scatter(0, stream.target_index_N, log_probs_N).view(shape)
    output = OombOutput(loss=loss, log_probs=log_probs_BL)
    return output.to_tuple() if batch.get("return_dict") is False else output


def _log_probs(
    state: Attachment,
    batch: dict[str, Any],
    stream: Stream,
    parameters: list[nn.Parameter],
    device: torch.device,
) -> Tensor:
    embeds_1TD = None
    if batch.get("inputs_embeds") is not None:
        embeds_1TD = batch["inputs_embeds"].flatten(0, 1).index_select(0, stream.token_index_T)[None]
    return run_recurrence(
        _chunk_model(state, batch, stream),
        stream.schedule,
        PagedKVCache(state.page_shape(), stream.schedule, device),
        state.settings(_caller_modes(state, device)),
        parameters=parameters,
        embeds_1TD=embeds_1TD,
        kept_chunks=_kept_chunks(state, stream, device),
        device=device,
    )


def _chunk_model(state: Attachment, batch: dict[str, Any], stream: Stream) -> ChunkModel:
    """The model as the recurrence sees it: the original forward on one chunk, its head on targets only."""
    ids_1T = None
    if batch.get("input_ids") is not None:
        ids_1T = batch["input_ids"].reshape(-1).index_select(0, stream.token_index_T)[None]
    mask = attention_interface.no_mask(stream.token_index_T.device)

    def run_chunk(run: ChunkPass, embeds_1TD: Tensor | None) -> Tensor:
        chunk = run.chunk
        tokens = slice(chunk.start, chunk.end)
        targets = slice(chunk.first_target, chunk.end_target)
        inputs = {"input_ids": ids_1T[:, tokens]} if ids_1T is not None else {"inputs_embeds": embeds_1TD}
        rope_segments = [(s.num_tokens, stream.document_tokens[s.document]) for s in chunk.segments]
        with state.rope.segments(rope_segments):
            output = state.forward(
                **inputs,
                attention_mask=mask,
                position_ids=stream.position_ids_1T[:, tokens],
                use_cache=False,
                return_dict=True,
                logits_to_keep=stream.target_rows_N[targets] - chunk.start,
                **{attention_interface.PASS_KEYWORD: run},
            )
        missing = set(range(state.facts.num_layers)) - run.layers_seen
        if missing:
            raise RuntimeError(
                f"Layers {sorted(missing)[:8]} never called attention through AttentionInterface.\n"
                "  Their tokens would not see earlier chunks. This model cannot be trained in chunks."
            )
        return target_log_probs(output.logits[0], stream.targets_N[targets])

    return run_chunk


def _caller_modes(state: Attachment, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The caller's autocast, captured now and entered around every pass: passes of the backward sweep run in
    autograd's own thread, where thread-local modes are not set."""
    enabled = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type)

    # PEFT's input casts must be the same in a checkpoint's recompute, which runs outside of the pass.
    lora_layers = () if any(m.gradient_checkpointing and m.training for m in state.checkpointed) else state.lora_layers

    @contextmanager
    def modes() -> Iterator[None]:
        # No cache, and nothing left from a pass before: a weight cast without a graph must not serve a pass that
        # needs one. The caller's own autocast may lie around this one, or a wrapped forward enter another.
        torch.clear_autocast_cache()
        with (
            torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False),
            _without_input_casts(lora_layers if enabled else ()),
        ):
            yield

    return modes


@contextmanager
def _without_input_casts(lora_layers: Iterable[Any]) -> Iterator[None]:
    """PEFT casts the input of each LoRA layer to the adapter's fp32, and autocast casts it back: the same values,
    three times the memory traffic."""
    casting = [layer for layer in lora_layers if getattr(layer, "cast_input_dtype_enabled", True)]
    for layer in casting:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in casting:
            layer.cast_input_dtype_enabled = True


def _kept_chunks(state: Attachment, stream: Stream, device: torch.device) -> frozenset[int]:
    """Chunks whose attention outputs are kept for the backward sweep, by setting and free memory."""
    config, facts, shape = state.config, state.facts, state.page_shape()
    chunks = stream.schedule.chunks
    longest = max(chunk.num_tokens for chunk in chunks)
    if config.keep_last_graph:
        chunks = chunks[:-1]  # the last one's graph holds its outputs
    if config.keep_outputs is False or not torch.is_grad_enabled():
        return frozenset()
    if config.keep_outputs is True:
        return frozenset(chunk.index for chunk in chunks)
    dtype = compute_dtype(state.base, device)
    pages = shape.num_slots(stream.schedule) * (shape.slot_bytes(dtype) + shape.slot_bytes(shape.grad_dtype))
    activations = longest * state.meter.bytes_per_token
    # Sums in fp32, what is returned, and what it is added to.
    gradients = sum(p.numel() * (4 + 2 * p.element_size()) for p in state.model.parameters() if p.requires_grad)
    per_token = facts.num_layers * facts.num_heads * (facts.head_dim * dtype.itemsize + 4)
    return chunks_to_keep(chunks, per_token, free_bytes(device) - pages - activations - gradients)


def _normaliser(batch: dict[str, Any], stream: Stream) -> Any:
    """Number of targets of the whole step.

    ``num_targets`` is taken as it is. ``num_items_in_batch`` comes from transformers' Trainer, which counts
    every label but those of the first column; what it overcounts in this batch (first tokens of later documents
    or of left-padded rows, labels on padding) is taken off.
    """
    if batch.get("num_targets") is not None:
        count = batch["num_targets"]
        if not isinstance(count, Tensor) and count <= 0 < stream.num_targets:
            raise ValueError(
                "num_targets must be positive where there are targets.\n"
                f"  Got num_targets={count}; this batch alone has {stream.num_targets}.\n"
                "  Pass the sum of oomb_accel.count_targets(batch) over all micro-batches of the step."
            )
    elif batch.get("num_items_in_batch") is not None:
        count = batch["num_items_in_batch"] - stream.overcount
    else:
        count = stream.num_targets
    # A tensor on the GPU is not looked at: that would make the host wait.
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def _no_targets(tokens: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """An empty list of log-probabilities that still hangs on every trainable parameter: gradients are zero, not
    missing."""
    empty = torch.zeros(0, device=tokens.device)
    if not torch.is_grad_enabled():
        return empty
    leaves = parameters + ([tokens] if tokens.requires_grad else [])
    return torch.cat([empty, *(leaf.reshape(-1)[:0].float() for leaf in leaves)])


def _check_request(batch: dict[str, Any]) -> None:
    for name in _FULL_OUTPUTS:
        if batch.get(name) not in (None, False):
            raise ValueError(
                f"{name} cannot be given or returned in a chunked step.\n"
                "  It would cost memory in the length of the document.\n"
                f"  Leave {name} out, or call oomb_accel.disable(model) for a plain forward."
            )
    if isinstance(batch.get("logits_to_keep"), Tensor) or batch.get("logits_to_keep"):
        raise ValueError(
            "logits_to_keep has no meaning with labels here: full logits are never made.\n"
            "  Leave it out; outputs.log_probs has the log-probability of each target."
        )
    known = _BATCH_KEYS | {*_FULL_OUTPUTS, "logits_to_keep"}
    unknown = [key for key, value in batch.items() if key not in known and value is not None and value is not False]
    if unknown:
        raise ValueError(
            f"The batch has inputs that a chunked step does not know: {', '.join(unknown)}.\n"
            "  They might depend on whole rows, so they are not passed on silently.\n"
            "  Remove them from the batch, or call oomb_accel.disable(model)."
        )
