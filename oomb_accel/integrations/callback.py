"""Chunk recurrence for transformers' Trainer and TRL's SFTTrainer, as a callback."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oomb_accel.config import OombConfig
from oomb_accel.integrations import engine
from oomb_accel.integrations.attachment import STATE, Attachment
from oomb_accel.integrations.banner import say
from oomb_accel.integrations.checkpoints import guard_checkpoints
from oomb_accel.integrations.collator import TargetsOnly
from oomb_accel.integrations.memory_watch import watch_memory
from oomb_accel.integrations.step_metrics import StepMetrics
from oomb_accel.integrations.switch import sources_of, switch_on
from oomb_accel.integrations.timeout import set_timeout
from oomb_accel.integrations.trainer_checks import trainer_refusals, trl_refusals
from oomb_accel.integrations.transformers import disable
from oomb_accel.integrations.versions import check_versions
from oomb_accel.memory_report import FILE as MEMORY
from oomb_accel.memory_report import MemoryReport, keep_lines
from oomb_accel.reading import refusal
from oomb_accel.sources import BLOCK, Resolved, Source, from_deepspeed, gather, resolve

_GUARDED: weakref.WeakSet[Trainer] = weakref.WeakSet()


class OombCallback(TrainerCallback):
    """Switches chunk recurrence on for the model of a Trainer: ``Trainer(..., callbacks=[OombCallback()])``.

    The model is switched on when training begins, because SFTTrainer replaces its forward after it was made. It
    stays on afterwards, so evaluation is chunked too; ``oomb_accel.disable(model)`` undoes it. What Trainer logs gets
    the figures of docs/metrics.md, under names that begin with ``oomb_``.

    Args:
        config: the settings, as a config or a mapping. They may also stand in the ``"oomb"`` block of the
            Trainer's DeepSpeed config, in ``OOMB_`` variables or in a preset; what is given twice must agree.
        memory_report: write ``memory.jsonl`` into the Trainer's ``output_dir``, for ``oomb report``, and say the peaks
            when training ends.

    Raises:
        ValueError: when the Trainer is made or training begins: settings that contradict each other, or something
            switched on in the Trainer that chunks cannot honour. The text names it.
    """

    def __init__(self, config: OombConfig | Mapping[str, Any] | None = None, *, memory_report: bool = False) -> None:
        self._source = Source.of_python(config, "OombCallback(...)")
        self._installed = False
        self._wants_report = memory_report
        self._report: MemoryReport | None = None
        self._metrics: StepMetrics | None = None
        self._since: float | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check what is known before anything is sharded, and resolve the block."""
        resolved = self._resolve(args)
        if not resolved.config.enabled:
            return
        trainer = self._trainer()
        _refuse(trainer_refusals(args, trainer))
        if trainer is not None:
            guard_checkpoints(trainer)
        if args.deepspeed_plugin is not None:
            # Trainer makes the engine by deepspeed.initialize, which is to check and to set up what it gets.
            check_versions("deepspeed")
            self._installed = not engine.is_installed()
            engine.install()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Switch the model on, on top of whatever has replaced its forward by now."""
        model: nn.Module = kwargs["model"]
        trainer = self._trainer()
        if self._installed:
            engine.uninstall()
            self._installed = False
        earlier = _take_off_what_is_bypassed(model)
        resolved = self._resolve(args, *earlier)
        if resolved.config.enabled:
            _refuse(trainer_refusals(args, trainer) + (trl_refusals(trainer, model) if trainer is not None else []))
        switch_on(model, resolved)
        attachment: Attachment | None = getattr(model, STATE, None)
        if attachment is None:
            return
        if args.deepspeed_plugin is None:  # with it, the engine has done so
            note = set_timeout(model, resolved.config, micro_steps=args.gradient_accumulation_steps)
            attachment.notes += [note] if note is not None else []
        _mask_labels_of(kwargs.get("train_dataloader"))
        if trainer is not None and trainer not in _GUARDED:
            _guard(trainer)
            _add_figures(trainer, self)
            _GUARDED.add(trainer)
        if self._wants_report:
            self._begin_report(model, args, state, kwargs.get("optimizer"))
        if attachment.on_stream is None or self._metrics is not None:  # otherwise another callback does so
            self._metrics, self._since = StepMetrics(model, self._report), None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._report is not None:
            self._report.step = state.global_step + 1
        if self._since is None:
            self._since = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._report is not None:
            self._report.updated()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        attachment: Attachment | None = getattr(kwargs["model"], STATE, None)
        if self._report is not None and attachment is not None:
            say(attachment, self._report.table())
            self._report.stop()

    def figures(self) -> dict[str, Any]:
        """Of the steps since the last call, on this rank; nothing between trainings."""
        since, self._since = self._since, None
        if self._metrics is None or since is None:
            return {}
        found = self._metrics.take(time.perf_counter() - since)
        return {f"oomb_{name}": value for name, value in found.items() if value is not None}

    def _begin_report(self, model: nn.Module, args: TrainingArguments, state: TrainerState, optimizer: Any) -> None:
        if self._report is not None:  # of a training that failed
            self._report.stop()
        self._report = watch_memory(model, optimizer=optimizer)
        if state.is_world_process_zero and args.output_dir is not None:
            path = Path(args.output_dir) / MEMORY
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_lines(path, state.global_step or -1)
            self._report.write_to(path)

    def _resolve(self, args: TrainingArguments, *earlier: Source) -> Resolved:
        """The settings from all places. The block is left without ``"auto"``, which Accelerate refuses."""
        plugin = args.deepspeed_plugin
        config = None if plugin is None else plugin.deepspeed_config
        block = tuple(_by_file_name(source, args) for source in from_deepspeed(config))
        trainer = self._trainer()
        callbacks = [self] if trainer is None else trainer.callback_handler.callbacks  # ``oomb run`` adds another one
        python = [callback._source for callback in callbacks if isinstance(callback, OombCallback)]
        resolved = resolve(*gather(None, *block, *python, *earlier))
        if config is not None:
            config[BLOCK] = resolved.block()
        return resolved

    def _trainer(self) -> Trainer | None:
        """The Trainer that is calling. It does not hand itself to callbacks, so it is looked for among the callers."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer) and self in caller.callback_handler.callbacks:
                return caller
            frame = frame.f_back
        return None


def _by_file_name(source: Source, args: TrainingArguments) -> Source:
    path = args.deepspeed
    return dataclasses.replace(source, place=path) if isinstance(path, str) and source.kind == "json" else source


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ValueError(refusal("oomb_accel cannot work with this Trainer", reasons))


def _take_off_what_is_bypassed(model: nn.Module) -> tuple[Source, ...]:
    """Switch off what was switched on before and would not be called now; returns its settings.

    That is a model whose forward was replaced since then (SFTTrainer does that), or a model that a PEFT model was made
    around since then. It is switched on anew on top, with the same settings.
    """
    found = next((module for module in model.modules() if STATE in vars(module)), None)
    if found is None or (found is model and _answers(model, getattr(model, STATE))):
        return ()
    sources = sources_of(found)
    disable(found)
    return sources


def _answers(model: nn.Module, state: Attachment) -> bool:
    """Whether a call of the model comes to us: directly, or through wrappers that say what they wrap."""
    forward: Any = model.forward
    while forward is not None:
        if getattr(forward, STATE, None) is state:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _guard(trainer: Trainer) -> None:
    """Evaluation gets exact labels too, and predictions are refused as long as the model is on."""
    for name in ("get_eval_dataloader", "get_test_dataloader"):
        setattr(trainer, name, _with_masked_labels(getattr(trainer, name)))
    plain = trainer.prediction_step

    @functools.wraps(plain)
    def prediction_step(model: nn.Module, inputs: Any, prediction_loss_only: bool, *more: Any, **kwargs: Any) -> Any:
        if not prediction_loss_only and getattr(trainer.model, STATE, None) is not None:
            raise ValueError(
                "Predictions were asked for: logits of whole documents, which are never made.\n"
                "  trainer.predict and compute_metrics need them.\n"
                "  Set prediction_loss_only=True for the loss alone, or call oomb_accel.disable(trainer.model) first."
            )
        return plain(model, inputs, prediction_loss_only, *more, **kwargs)

    setattr(trainer, plain.__name__, prediction_step)


def _add_figures(trainer: Trainer, callback: OombCallback) -> None:
    """What is logged about training gets our figures. A callback's own ``on_log`` would come behind the trackers'."""
    plain = trainer.log

    @functools.wraps(plain)
    def log(logs: dict[str, Any], *more: Any, **kwargs: Any) -> None:
        plain({**logs, **callback.figures()} if "loss" in logs else logs, *more, **kwargs)

    setattr(trainer, plain.__name__, log)


def _with_masked_labels(make_loader: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_loader)
    def make(*args: Any, **kwargs: Any) -> Any:
        loader = make_loader(*args, **kwargs)
        _mask_labels_of(loader)
        return loader

    return make


def _mask_labels_of(loader: Any) -> None:
    """Wrap the loader's collator, once. Accelerate's loaders read through one of torch's."""
    base = getattr(loader, "base_dataloader", loader)
    collator = getattr(base, "collate_fn", None)
    if collator is not None and not isinstance(collator, TargetsOnly):
        base.collate_fn = TargetsOnly(collator)
