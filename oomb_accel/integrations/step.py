"""One chunked step: batch to stream, recurrence, loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oomb_accel.chunk_pass import ChunkPass
from oomb_accel.gradients import DeferredGradients, ReturnedGradients
from oomb_accel.integrations import attention_interface
from oomb_accel.integrations.agreement import agree_on_passes, is_partitioned, num_ranks, refusing_together
from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.auto import choose_settings
from oomb_accel.integrations.float8_checks import prepare_float8_base
from oomb_accel.integrations.fused_lora import fused_lora
from oomb_accel.integrations.outputs import OombOutput
from oomb_accel.integrations.own_head import HeadPass, own_head
from oomb_accel.integrations.parameters import trained_parameters
from oomb_accel.integrations.rope import check_length
from oomb_accel.integrations.same_calls import check_same_calls
from oomb_accel.integrations.step_memory import divide_pages, kept_chunks, reserve_host_memory, stream_memory
from oomb_accel.integrations.step_recurrence import StepRecurrence
from oomb_accel.integrations.stream import Stream, build_stream, check_targets, dummy_stream
from oomb_accel.integrations.support import (
    check_checkpointing,
    check_device,
    check_kernels,
    compute_dtype,
    switched_on_outputs,
)
from oomb_accel.integrations.trl import FUSED_HEAD_KEYWORD, FusedHeadOutput, TargetStatistics, check_fused_head
from oomb_accel.integrations.versions import check_versions
from oomb_accel.integrations.zero3_release import released_after_use
from oomb_accel.kept_results import HEAD, HeadGradient
from oomb_accel.loss import target_log_probs
from oomb_accel.memory import StreamMemory
from oomb_accel.pages import PagedKVCache
from oomb_accel.reading import refusal, shown
from oomb_accel.recurrence import ChunkModel, ChunkRecurrence, DummyPasses, run_recurrence

_FULL_OUTPUTS = ("output_attentions", "output_hidden_states", "past_key_values")
_BATCH_KEYS = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    *("num_items_in_batch", "num_targets", "use_cache", "return_dict", "cache_position", FUSED_HEAD_KEYWORD),
}


def chunked_step(state: Attachment, batch: dict[str, Any]) -> OombOutput | FusedHeadOutput | tuple[Tensor, ...]:
    """The chunked step: batch to stream, recurrence, loss.

    Args:
        batch: arguments of the model's forward by name, with ``labels`` or ``shift_labels``; see `build_stream`.

    Raises:
        ValueError: inputs that contradict each other, that chunks do not know, or that ask for full logits.
        RuntimeError: under ZeRO 3, when another rank has refused its batch.
    """
    partitioned = is_partitioned(state.model)
    if partitioned and not state.announced:
        check_versions("deepspeed")
    prepare_float8_base(state)
    choose_settings(state, batch)
    stream, num_passes = _agreed_stream(state, batch, collective=partitioned)
    if state.on_stream is not None and torch.is_grad_enabled():
        state.on_stream(tuple(stream.document_tokens), stream.num_targets)
    device = stream.token_index_T.device
    statistics = TargetStatistics(stream.num_targets, device) if batch.get(FUSED_HEAD_KEYWORD) else None
    # Through the root module DeepSpeed sees each chunk as a pass of its own; one pass alone is the caller's.
    # A deterministic step is never ordinary, so its passes must be alike on all ranks.
    through_root = partitioned and (num_passes > 1 or state.config.deterministic)
    recurrence = build_recurrence(
        state,
        batch,
        stream,
        num_passes,
        call=state.model if through_root else state.chunk_forward,
        keep_last_graph=state.config.keep_last_graph and not through_root,
        statistics=statistics,
    )
    gradients = (
        DeferredGradients(stream.trained, device, state.deliveries)
        if partitioned
        else ReturnedGradients(stream.trained)
    )
    log_probs_N = run_recurrence(recurrence, gradients, stream_embeds(batch, stream))
    if partitioned and recurrence.is_ordinary and log_probs_N.requires_grad:
        log_probs_N.register_hook(lambda _: state.deliveries.note(deferred=False))
    loss = log_probs_N.neg().sum() / _normaliser(batch, stream)
    shape = batch_tokens(batch).shape[:2]
    spread = log_probs_N.new_zeros(shape[0] * shape[1])
    log_probs_BL = spread.scatter(0, stream.target_index_N, log_probs_N).view(shape)
    if statistics is not None:
        shifted = batch.get("shift_labels") is not None
        return statistics.output(loss, log_probs_BL, stream.target_index_N, shifted=shifted)
    output = OombOutput.of(loss, log_probs_BL)
    return output.to_tuple() if batch.get("return_dict") is False else output


def _agreed_stream(state: Attachment, batch: dict[str, Any], *, collective: bool) -> tuple[Stream, int]:
    """The stream of a batch, and the number of passes of each sweep.

    Args:
        collective: passes contain collectives, so ranks agree on their number; then it is at least 1.

    Raises:
        ValueError, RuntimeError: as `chunked_step`.
    """
    with refusing_together(next(state.model.parameters()).device) if collective else nullcontext():
        stream = checked_stream(state, batch)
    num_chunks = len(stream.schedule.chunks)
    return stream, agree_on_passes(num_chunks, stream.token_index_T.device) if collective else num_chunks


def build_recurrence(
    state: Attachment,
    batch: dict[str, Any],
    stream: Stream,
    num_passes: int,
    *,
    call: Callable[..., Any],
    keep_last_graph: bool,
    statistics: TargetStatistics | None = None,
) -> ChunkRecurrence:
    """The recurrence over a stream.

    Args:
        call: runs the model on one chunk; what a forward takes by name.
        statistics: filled from the logits of the forward sweep.
    """
    device, head = stream.token_index_T.device, own_head(state)
    kept = kept_chunks(state, stream, device, head=head, keep_last_graph=keep_last_graph)
    return StepRecurrence(
        state,
        _chunk_model(state, batch, stream, call, head, statistics),
        stream.schedule,
        stream_memory(state, stream.schedule, stream.rooms, device, kept),
        state.settings(
            _caller_modes(state, device),
            keep_last_graph=keep_last_graph,
            always_one_node=num_ranks() > 1 and not is_partitioned(state.model),
        ),
        _dummy_passes(state, batch, num_passes - len(stream.schedule.chunks), device, call),
        device,
    )


def batch_tokens(batch: dict[str, Any]) -> Tensor:
    """``input_ids`` or ``inputs_embeds``."""
    tokens: Tensor = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    return tokens


def stream_embeds(batch: dict[str, Any], stream: Stream) -> Tensor | None:
    """The caller's input embeddings in stream order, ``[1, T, D]``; None when the batch has ids."""
    if batch.get("inputs_embeds") is None:
        return None
    return batch["inputs_embeds"].flatten(0, 1).index_select(0, stream.token_index_T)[None]


def checked_stream(state: Attachment, batch: dict[str, Any]) -> Stream:
    """The stream of a batch, and every check that needs no other rank.

    Raises:
        ValueError: as `chunked_step`.
    """
    _check_request(batch)
    state.check_attached()
    if reasons := switched_on_outputs(state.base):
        raise ValueError(refusal("A chunked step returns the loss only", reasons))
    if state.model.training:
        check_checkpointing(state.checkpointed)
    if batch.get(FUSED_HEAD_KEYWORD):
        check_fused_head(state.base.forward, state.chunk_forward)
    tokens, config = batch_tokens(batch), state.config
    check_device(state.base, tokens)
    check_kernels(state.facts, config, compute_dtype(state.base, tokens.device), tokens.device)
    stream = build_stream(batch, chunk_tokens=state.chunk_tokens, page_tokens=config.page_tokens, device=tokens.device)
    text_config = state.base.config.get_text_config()
    check_targets(stream, text_config.vocab_size)
    if config.beyond_trained_length == "error":
        check_length(text_config, stream.document_tokens)
    _check_normaliser(batch, stream)
    state.offload.check_setting()
    trained = trained_parameters(state.model)
    rooms = divide_pages(state, stream.schedule, tokens.device, trained)
    if rooms is not None:  # before other ranks wait for this one within a pass
        reserve_host_memory(state, rooms, tokens.device)
    return replace(stream, rooms=rooms, trained=trained)


def _dummy_passes(
    state: Attachment, batch: dict[str, Any], count: int, device: torch.device, call: Callable[..., Any]
) -> DummyPasses:
    """Passes over one token, which is given as other ranks give theirs: by id or by embedding."""
    stream = dummy_stream(device)
    embeds = batch.get("inputs_embeds")
    embeds_1TD = None if embeds is None else torch.zeros_like(embeds[:1, :1])
    model = _chunk_model(state, {"input_ids": stream.position_ids_1T} if embeds is None else {}, stream, call, None)
    (chunk,) = stream.schedule.chunks
    memory = StreamMemory(PagedKVCache(state.page_shape(), stream.schedule, device))
    return DummyPasses(count, lambda run, _: model(run, embeds_1TD), chunk, memory)


def _chunk_model(
    state: Attachment,
    batch: dict[str, Any],
    stream: Stream,
    call: Callable[..., Any],
    head: nn.Linear | None,
    statistics: TargetStatistics | None = None,
) -> ChunkModel:
    """The model as the recurrence sees it: the original forward on one chunk, its head on targets only.

    Args:
        head: where its gradient is made beside the log-probabilities.
    """
    ids_1T = None
    if batch.get("input_ids") is not None:
        ids_1T = batch["input_ids"].reshape(-1).index_select(0, stream.token_index_T)[None]
    mask = attention_interface.no_mask(stream.token_index_T.device)

    def run_chunk(run: ChunkPass, embeds_1TD: Tensor | None) -> Tensor:
        chunk = run.chunk
        tokens = slice(chunk.start, chunk.end)
        targets = slice(chunk.first_target, chunk.end_target)
        if embeds_1TD is not None and torch.is_grad_enabled() and is_partitioned(state.model):
            # Layers that are gathered whole need an input that wants a gradient, see `gather_whole_layers`.
            embeds_1TD = embeds_1TD if embeds_1TD.requires_grad else embeds_1TD.detach().requires_grad_()
        inputs = {"input_ids": ids_1T[:, tokens]} if ids_1T is not None else {"inputs_embeds": embeds_1TD}

        def record(logits_NV: Tensor) -> None:
            if statistics is not None and run.sweep == "forward":
                statistics.record(logits_NV, stream.targets_N[targets], chunk.first_target)

        results, head_pass = run.results, None
        if head is not None and (results.keeps(HEAD) or torch.is_grad_enabled()):

            def known() -> HeadGradient | None:
                kept = results.take(HEAD)
                return None if kept is None else HeadGradient(*kept)

            head_pass = HeadPass(head, stream.targets_N[targets], known, record)
        rope_segments = [(s.num_tokens, stream.document_tokens[s.document]) for s in chunk.segments]
        with state.rope.segments(rope_segments), nullcontext() if head_pass is None else head_pass.active():
            output = call(
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
                "  Their tokens would not see earlier chunks.\n"
                "  Use another model, or a newer transformers; this one cannot be trained in chunks."
            )
        check_same_calls(run, state.model, len(stream.schedule.chunks))
        if head_pass is None:
            record(output.logits.squeeze(0))
            return target_log_probs(output.logits.squeeze(0), stream.targets_N[targets])
        log_probs_N, gradient = head_pass.log_probs(output.logits)
        if run.sweep == "forward":
            results.put(HEAD, *gradient)
        return log_probs_N

    return run_chunk


def _caller_modes(state: Attachment, device: torch.device) -> Callable[[ChunkPass], AbstractContextManager[Any]]:
    """The caller's autocast, captured now and entered around every pass: passes of the backward sweep run in
    autograd's own thread, where thread-local modes are not set."""
    enabled = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type)

    # PEFT's layers must run alike in a checkpoint's recompute, which is outside of the pass.
    lora_layers = () if any(m.gradient_checkpointing and m.training for m in state.checkpointed) else state.lora_layers
    released = released_after_use(state.model)
    fused = fused_lora(lora_layers, state.lora_siblings)
    in_float8 = nullcontext if state.float8_base is None else state.float8_base.active

    @contextmanager
    def modes(run: ChunkPass) -> Iterator[None]:
        # No cache, and nothing left from a pass before: a weight cast without a graph must not serve a pass that
        # needs one. The caller's own autocast may lie around this one, or a wrapped forward enter another.
        torch.clear_autocast_cache()
        with (
            torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False),
            _without_input_casts(lora_layers if enabled else ()),
            released(),
            in_float8(),
            fused(run.results),
        ):
            yield

    return modes


@contextmanager
def _without_input_casts(lora_layers: Iterable[Any]) -> Iterator[None]:
    """PEFT casts the input of each LoRA layer to the adapter's fp32, and autocast casts it back: the same values,
    three times the memory traffic."""
    casting = [layer for layer in lora_layers if getattr(layer, "cast_input_dtype_enabled", True)]
    # Past nn.Module's __setattr__, which takes 2 us: there are some 200 of them, in every pass.
    for layer in casting:
        vars(layer)["cast_input_dtype_enabled"] = False
    try:
        yield
    finally:
        for layer in casting:
            vars(layer)["cast_input_dtype_enabled"] = True


def _normaliser(batch: dict[str, Any], stream: Stream) -> Any:
    """Number of targets of the whole step.

    ``num_targets`` is taken as it is. ``num_items_in_batch`` comes from transformers' Trainer, which counts
    every label but those of the first column; what it overcounts in this batch (first tokens of later documents
    or of left-padded rows, labels on padding) is taken off.
    """
    if batch.get("num_targets") is not None:
        count = batch["num_targets"]
    elif batch.get("num_items_in_batch") is not None:
        count = batch["num_items_in_batch"] - stream.overcount
    else:
        count = stream.num_targets
    # A tensor on the GPU is not looked at: that would make the host wait.
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def _check_normaliser(batch: dict[str, Any], stream: Stream) -> None:
    count = batch.get("num_targets")
    if count is not None and not isinstance(count, Tensor) and count <= 0 < stream.num_targets:
        raise ValueError(
            "num_targets must be positive where there are targets.\n"
            f"  Got num_targets={count}; this batch alone has {stream.num_targets}.\n"
            "  Pass the sum of oomb_accel.count_targets(batch) over all micro-batches of the step."
        )


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
            f"  Got logits_to_keep={shown(batch['logits_to_keep'])}.\n"
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
