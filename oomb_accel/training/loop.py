"""The training loop: a recipe in, an adapter and a summary out. Built on Accelerate."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import oomb_accel
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.progress import GIB, host_bytes
from oomb_accel.rng import RngState
from oomb_accel.sampler import Step, slots_of, tokens_of
from oomb_accel.training.checkpoint import save_checkpoint, save_result
from oomb_accel.training.data import last_tokens_batch
from oomb_accel.training.folder import MEMORY, METRICS
from oomb_accel.training.folder import RECIPE as CONFIG
from oomb_accel.training.interrupt import StopSignals, reason
from oomb_accel.training.learning_rate import learning_rate_factor
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.report import already_done, closing, header, keep_peaks, measure_memory, step_line
from oomb_accel.training.run import Run, Summary
from oomb_accel.training.setup import prepare
from oomb_accel.training.step import run_step

_OF_THE_LAUNCHER = (
    "a traceback that ends in SignalException, below, is the launcher's: it prints one whenever it is stopped"
)


def train(recipe: Recipe) -> Summary:
    """Fine-tune as the recipe says, from the beginning or from a checkpoint; nothing is done where a run that goes on
    from its latest checkpoint is at its end.

    Writes nothing before the first step has succeeded. A run that fails or is interrupted keeps what it has
    saved.

    Returns: the summary, which is also in ``output_dir/summary.json``.

    Raises:
        ValueError: something in the recipe, the data, the model, the launch or the checkpoint cannot work.
        RuntimeError: the loss or the gradient stopped being a finite number.
    """
    run = prepare(recipe)
    try:
        return _train(run)
    finally:
        run.folder.close()


def _train(run: Run) -> Summary:
    recipe = run.recipe
    if run.finished:
        oomb_accel.disable(run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False))
        run.say(already_done(run))
        return run.summary
    run.say(header(run))
    if run.trackers is not None:
        run.trackers.open_services()
    summary = run.summary
    summary.output_dir = str(run.folder.path)
    with StopSignals(lambda: run.updating or run.row is not None) as stop, _says_what_is_left(run):
        if recipe.oomb.enabled:
            attachment_of(run.bare_model).listen(stop.check)
        if run.folder.resume is None:
            summary.last_tokens_loss_before = _last_tokens_loss(run, "before")
            run.started = time.perf_counter()
        for step, (epoch, plan) in _steps(run):
            _one_step(run, step, epoch, plan)
            stop.check()
            if recipe.save_steps and step % recipe.save_steps == 0 and step < run.num_steps:
                run.say(f"saved {save_checkpoint(run, step)}")
        summary.seconds = time.perf_counter() - run.started
        summary.tokens_per_second = summary.tokens / summary.seconds
        if run.accelerator.is_main_process:
            run.folder.start()  # no step has done so, where only the end was left
        save_result(run)
        if recipe.save_steps and run.folder.resume != run.folder.path / f"checkpoint-{run.num_steps}":
            run.say(f"saved {save_checkpoint(run, run.num_steps)}")  # for a run with more steps
        summary.last_tokens_loss_after = _last_tokens_loss(run, "after")
        keep_peaks(run)
    if run.trackers is not None:
        run.trackers.close()
    if run.accelerator.is_main_process:
        run.folder.save_summary(summary.to_dict() | {"identity": run.identity.to_dict()})
    # Accelerate's autocast wrapper lies around our forward and has to go first.
    oomb_accel.disable(run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False))
    run.say(closing(run))
    return summary


def _steps(run: Run) -> Iterator[tuple[int, tuple[int, Step]]]:
    """Number, epoch (from 0) and documents of each optimizer step that is left to do."""
    first_epoch, skipped = divmod(run.summary.steps, run.sampler.steps_per_epoch)
    plans = ((epoch, plan) for epoch in itertools.count(first_epoch) for plan in run.sampler.steps(epoch))
    return zip(range(run.summary.steps + 1, run.num_steps + 1), itertools.islice(plans, skipped, None), strict=False)


def _one_step(run: Run, step: int, epoch: int, plan: Step) -> None:
    """Run one step and write down what came of it."""
    accelerator, recipe, summary = run.accelerator, run.recipe, run.summary
    started = time.perf_counter()
    run.line.prefix = f"step {step}/{run.num_steps} | "
    if run.memory is not None:
        run.memory.step = step
    if run.rng is None:
        run.rng = RngState.capture(accelerator.device)
    factor = learning_rate_factor(
        step - 1, kind=recipe.lr_scheduler_type, warmup_steps=recipe.warmup_steps, num_steps=run.num_steps
    )
    learning_rate = recipe.learning_rate * factor
    tokens, targets = tokens_of(plan, run.sampler.lengths), tokens_of(plan, run.num_targets)
    loss, grad_norm = run_step(run, plan, number=step, learning_rate=learning_rate, num_targets=targets)
    seconds = time.perf_counter() - started
    slots = slots_of(plan, run.sampler.lengths)
    earlier_slots = summary.tokens / (1.0 - summary.waiting)
    measure_memory(run)
    row = {
        "step": step,
        "epoch": epoch,
        "loss": loss,
        "learning_rate": learning_rate,
        "grad_norm": grad_norm,
        "tokens": tokens,
        "trained_tokens": targets,
        "num_input_tokens_seen": summary.tokens + tokens,
        "waiting": 1.0 - tokens / slots,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_gpu_gib": summary.peak_gpu_gib,
        "host_gib": host_bytes() / GIB,
    }
    if run.metrics is not None:  # tokens are those of all devices, the others of this one
        row = run.metrics.take(seconds) | row
    # From here on the step is done, with all that belongs to it; a stop before leaves nothing of it.
    summary.tokens += tokens
    summary.trained_tokens += targets
    summary.waiting = 1.0 - summary.tokens / (earlier_slots + slots)
    summary.first_loss = loss if step == 1 else summary.first_loss
    summary.steps, summary.last_loss = step, loss
    run.rng, run.row = RngState.capture(accelerator.device), row
    run.updating = False
    if accelerator.is_main_process:
        run.folder.start()
        run.folder.log(row)
        if run.memory is not None:
            run.memory.write_to(run.folder.path / MEMORY)
    run.row = None
    if run.trackers is not None:
        run.trackers.log(row, step)
    if step % recipe.logging_steps == 0 or step == run.num_steps:
        run.say(step_line(row, run.num_steps))


def _last_tokens_loss(run: Run, when: str) -> float | None:
    """Mean loss on the last tokens of the first document, given all of it as context."""
    num_tokens = run.recipe.eval_last_tokens
    if num_tokens == 0:
        return None
    document = run.corpus.documents[0]
    batch = {key: value.to(run.accelerator.device) for key, value in last_tokens_batch(document, num_tokens).items()}
    run.line.prefix = "evaluation | "
    run.model.eval()
    with torch.no_grad():
        value = float(run.model(**batch).loss)
    run.say(f"loss on the last {num_tokens} tokens of {document.name}, {when} training: {value:.4f}")
    return value


@contextmanager
def _says_what_is_left(run: Run) -> Iterator[None]:
    """When the run stops early, say what of it is on disk."""
    try:
        yield
    except BaseException as error:
        run.say(f"stopped after step {run.summary.steps} of {run.num_steps} ({reason(error)})")
        _write_missing_row(run)
        _save_what_is_done(run)
        saved = run.folder.last_saved or run.folder.resume
        where = f"the last save is {saved}{_how_to_go_on(run)}" if saved else _nothing_saved(run.summary.steps)
        logged = f"; losses are in {run.folder.path / METRICS}" if run.summary.steps else ""
        run.say(where + logged)
        if isinstance(error, KeyboardInterrupt) and run.accelerator.num_processes > 1:
            run.say(_OF_THE_LAUNCHER)
        raise


def _how_to_go_on(run: Run) -> str:
    """The command, where a checkpoint is in the folder of the run."""
    if run.folder.latest() is None:
        return ""
    start = "oomb train" if run.accelerator.num_processes == 1 else "accelerate launch ... -m oomb_accel train"
    return f"; go on with: {start} {shlex.quote(str(run.folder.path / CONFIG))} --resume"


def _nothing_saved(steps: int) -> str:
    if not steps:
        return "no step was finished, nothing was saved"
    finished = "1 step was" if steps == 1 else f"{steps} steps were"
    return f"{finished} finished, but nothing was saved: set save_steps"


def _write_missing_row(run: Run) -> None:
    """The row of the last finished step, if the run stopped before it was written for certain. Never hides the error
    that ended the run."""
    if run.row is None or run.updating or not run.accelerator.is_main_process:
        return
    try:
        run.folder.start()
        run.folder.log_again(run.row)
    except Exception as error:
        run.say(f"and its losses could not be written: {error}")


def _save_what_is_done(run: Run) -> None:
    """A checkpoint of the last finished step, unless there is one, in a single process. Never hides the error that
    ended the run."""
    steps = run.summary.steps
    checkpoint = run.folder.path / f"checkpoint-{steps}"
    done = run.folder.last_saved in (run.folder.path, checkpoint) or checkpoint == run.folder.resume
    # The other processes may be gone, and an update that was interrupted left no state worth keeping.
    if not steps or done or run.updating or run.accelerator.num_processes > 1:
        return
    try:
        if run.rng is not None:
            run.rng.restore(run.accelerator.device)  # as it was behind the last step
        run.say(f"saved {save_checkpoint(run, steps)}")
    except Exception as error:
        run.say(f"and the weights could not be saved: {error}")
