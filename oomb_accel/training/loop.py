"""The training loop: a recipe in, an adapter and a summary out. Built on Accelerate."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import oomb_accel
from oomb_accel.integrations.rope import check_length
from oomb_accel.progress import GIB, ProgressLine, host_bytes
from oomb_accel.training.data import Corpus, check_vocabulary, collate, last_tokens_batch, load_corpus
from oomb_accel.training.folder import METRICS, RunFolder
from oomb_accel.training.learning_rate import learning_rate_factor
from oomb_accel.training.model import add_adapters, apply_liger, load_model, load_tokenizer
from oomb_accel.training.recipe import Recipe


@dataclass(kw_only=True, slots=True)
class Summary:
    """What a run did. Times in seconds, memory in GiB; tokens count all devices."""

    steps: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    first_loss: float = math.nan
    last_loss: float = math.nan
    last_tokens_loss_before: float | None = None
    last_tokens_loss_after: float | None = None
    peak_gpu_gib: float | None = None
    peak_host_gib: float = 0.0
    output_dir: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(slots=True)
class Run:
    """The prepared parts of one run."""

    recipe: Recipe
    accelerator: Accelerator
    model: Any
    tokenizer: Any
    corpus: Corpus
    loader: Any
    optimizer: Any
    scheduler: Any
    folder: RunFolder
    line: ProgressLine
    num_steps: int
    summary: Summary = field(default_factory=Summary)

    def say(self, text: str) -> None:
        """Print on the main process, without disturbing the progress line."""
        self.line.clear()
        self.accelerator.print(text, flush=True)


def train(recipe: Recipe) -> Summary:
    """Fine-tune as the recipe says.

    Writes nothing before the first step has succeeded. A run that fails or is interrupted keeps what it has
    saved.

    Returns: the summary, which is also in ``output_dir/summary.json``.

    Raises:
        ValueError: something in the recipe, the data or the model cannot work.
        RuntimeError: the loss or the gradient stopped being a finite number.
    """
    run = _prepare(recipe)
    run.say(_header(run))
    summary = run.summary
    summary.output_dir = str(run.folder.path)
    with _says_what_is_left(run):
        summary.last_tokens_loss_before = _last_tokens_loss(run, "before")
        started = time.perf_counter()
        for step, (epoch, batches) in enumerate(_steps(run), start=1):
            _one_step(run, step, epoch, batches)
            if recipe.save_steps and step % recipe.save_steps == 0 and step < run.num_steps:
                _save(run, step)
        summary.seconds = time.perf_counter() - started
        summary.tokens_per_second = summary.tokens / summary.seconds
        _save(run, None)
        summary.last_tokens_loss_after = _last_tokens_loss(run, "after")
    if run.accelerator.is_main_process:
        run.folder.save_summary(summary.to_dict())
    # Accelerate's autocast wrapper lies around our forward and has to go first.
    oomb_accel.disable(run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False))
    run.say(_closing(run))
    return summary


def _prepare(recipe: Recipe) -> Run:
    """Load everything; whatever is wrong with the recipe shows here, before any time is spent."""
    folder = RunFolder(recipe)
    accelerator = Accelerator(
        mixed_precision=_precision(recipe),
        step_scheduler_with_optimizer=False,  # the schedule counts optimizer steps, on however many devices
    )
    set_seed(recipe.seed)
    tokenizer = load_tokenizer(recipe)
    corpus = load_corpus(recipe, tokenizer)
    model = load_model(recipe)
    check_vocabulary(corpus.documents, model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    if recipe.oomb.enabled and recipe.oomb.beyond_trained_length == "error":
        check_length(model.config, [len(document.input_ids) for document in corpus.documents])
    if apply_liger(model, recipe, accelerator.device):
        corpus.notes.append("Liger kernels for norms, RoPE and MLP")
    model = add_adapters(model, recipe)
    line = ProgressLine(force=recipe.oomb.progress is True)
    show = recipe.oomb.progress is not False
    model = oomb_accel.enable(model, recipe.oomb, on_progress=line if show else None)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        fused=accelerator.device.type == "cuda",
    )
    loader: Any = DataLoader(
        corpus.documents,  # type: ignore[arg-type]  # a list is a map-style dataset
        batch_size=recipe.per_device_train_batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(recipe.seed),
        collate_fn=partial(collate, pad_token_id=tokenizer.pad_token_id or 0),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    per_epoch = math.ceil(len(loader) / recipe.gradient_accumulation_steps)
    num_steps = recipe.max_steps or per_epoch * (recipe.num_train_epochs or 1)
    factor = partial(
        learning_rate_factor,
        kind=recipe.lr_scheduler_type,
        warmup_steps=recipe.warmup_steps,
        num_steps=num_steps,
    )
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
    return Run(recipe, accelerator, model, tokenizer, corpus, loader, optimizer, scheduler, folder, line, num_steps)


def _precision(recipe: Recipe) -> str:
    if recipe.mixed_precision != "auto":
        return recipe.mixed_precision
    return "bf16" if PartialState().device.type == "cuda" else "no"


def _steps(run: Run) -> Iterator[tuple[int, list[dict[str, torch.Tensor]]]]:
    """The micro-batches of each optimizer step, with the epoch (from 0) that they belong to."""
    size, left = run.recipe.gradient_accumulation_steps, run.num_steps
    for epoch in itertools.count():
        batches = iter(run.loader)
        while step := list(itertools.islice(batches, size)):
            if left == 0:
                return
            left -= 1
            yield epoch, step


def _one_step(run: Run, step: int, epoch: int, batches: list[dict[str, torch.Tensor]]) -> None:
    """Forward, backward and update over the micro-batches of one step; every target weighs the same."""
    accelerator, recipe, summary = run.accelerator, run.recipe, run.summary
    started = time.perf_counter()
    run.line.prefix = f"step {step}/{run.num_steps} | "
    run.model.train()
    targets = _total(run, sum(oomb_accel.count_targets(batch) for batch in batches))
    tokens = _total(run, sum(int(batch["attention_mask"].sum()) for batch in batches))
    loss_sum = torch.zeros((), device=accelerator.device)
    for batch in batches:
        loss = run.model(**batch, **_normaliser(recipe, targets)).loss
        # Gradients are averaged over devices, and the loss is already a share of the whole step's mean.
        accelerator.backward(loss * accelerator.num_processes)
        loss_sum += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(_trainable(run.model), recipe.max_grad_norm or math.inf)
    loss_value, norm_value = float(accelerator.reduce(loss_sum, "sum")), float(grad_norm or 0.0)
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        raise RuntimeError(
            f"Step {step} gave no finite number; the weights of step {step - 1} are unharmed.\n"
            f"  Got loss {loss_value} and gradient norm {norm_value}.\n"
            f"  Set a lower learning_rate, for example {recipe.learning_rate / 10:g}, "
            "or torch_dtype: float32."
        )
    learning_rate = run.scheduler.get_last_lr()[0]
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    seconds = time.perf_counter() - started
    summary.steps, summary.last_loss = step, loss_value
    summary.first_loss = loss_value if step == 1 else summary.first_loss
    summary.tokens += tokens
    summary.trained_tokens += targets
    _measure_memory(run)
    row = {
        "step": step,
        "epoch": epoch,
        "loss": loss_value,
        "learning_rate": learning_rate,
        "grad_norm": norm_value,
        "tokens": tokens,
        "trained_tokens": targets,
        "num_input_tokens_seen": summary.tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_gpu_gib": summary.peak_gpu_gib,
        "host_gib": host_bytes() / GIB,
    }
    if accelerator.is_main_process:
        run.folder.start()
        run.folder.log(row)
    if step % recipe.logging_steps == 0 or step == run.num_steps:
        run.say(_step_line(row, run.num_steps))


def _normaliser(recipe: Recipe, targets: int) -> dict[str, int]:
    """The step's number of targets, under our name, or under transformers' own when we are off."""
    return {"num_targets" if recipe.oomb.enabled else "num_items_in_batch": max(targets, 1)}


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


def _save(run: Run, step: int | None) -> None:
    """Save the adapter (or the whole model) and the tokenizer: a checkpoint, or with None the result."""
    run.accelerator.wait_for_everyone()
    if not run.accelerator.is_main_process:
        return
    model = run.accelerator.unwrap_model(run.model)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)

    if step is None:
        run.folder.save_final(write)
    else:
        run.say(f"saved {run.folder.save_checkpoint(step, write)}")


@contextmanager
def _says_what_is_left(run: Run) -> Iterator[None]:
    """When the run stops early, say what of it is on disk."""
    try:
        yield
    except BaseException as error:
        run.say(f"stopped after step {run.summary.steps} of {run.num_steps} ({type(error).__name__})")
        _save_what_is_done(run)
        saved = run.folder.last_saved
        where = f"the last save is {saved}" if saved else "no step was finished, nothing was saved"
        logged = f"; losses are in {run.folder.path / METRICS}" if (run.folder.path / METRICS).is_file() else ""
        run.say(where + logged)
        raise


def _save_what_is_done(run: Run) -> None:
    """A checkpoint of the last finished step, unless there is one. Never hides the error that ended the run."""
    steps = run.summary.steps
    done = run.folder.last_saved in (run.folder.path, run.folder.path / f"checkpoint-{steps}")
    if not steps or done or run.accelerator.num_processes > 1:  # the other processes may be gone
        return
    try:
        _save(run, steps)
    except Exception as error:
        run.say(f"and the weights could not be saved: {error}")


def _trainable(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _total(run: Run, count: int) -> int:
    """Sum of a count over all devices."""
    if run.accelerator.num_processes == 1:
        return count
    return int(run.accelerator.reduce(torch.tensor(count, device=run.accelerator.device), "sum"))


def _measure_memory(run: Run) -> None:
    summary = run.summary
    summary.peak_host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    if run.accelerator.device.type == "cuda":
        summary.peak_gpu_gib = torch.cuda.max_memory_allocated(run.accelerator.device) / GIB


def _header(run: Run) -> str:
    """What is about to run."""
    lengths = [len(document.input_ids) for document in run.corpus.documents]
    documents = "1 document" if len(lengths) == 1 else f"{len(lengths)} documents"
    model = run.accelerator.unwrap_model(run.model)
    trained, total = (sum(p.numel() for p in some) for some in (_trainable(model), model.parameters()))
    off = f"oomb_accel off (oomb.enabled: false), {trained:,} of {total:,} parameters trainable"
    lines = [
        oomb_accel.banner(model) if run.recipe.oomb.enabled else off,
        f"device {run.accelerator.device}, weights {next(model.parameters()).dtype}, "
        f"mixed precision {run.accelerator.mixed_precision}",
        f"data: {documents}, {sum(lengths):,} tokens, longest {max(lengths):,}",
        *(f"  {note}" for note in run.corpus.notes),
        f"steps: {run.num_steps} of {run.recipe.per_device_train_batch_size} x "
        f"{run.recipe.gradient_accumulation_steps} documents on {run.accelerator.num_processes} device(s)",
    ]
    if not sys.stderr.isatty() and run.recipe.oomb.progress == "auto":
        lines.append("no progress inside a step, as this is no terminal; --oomb.progress true shows it")
    return "\n".join(lines)


def _step_line(row: dict[str, Any], num_steps: int) -> str:
    gpu = "" if row["peak_gpu_gib"] is None else f" | GPU peak {row['peak_gpu_gib']:.1f} GiB"
    return (
        f"step {row['step']}/{num_steps} | loss {row['loss']:.4f} | lr {row['learning_rate']:.2e} | "
        f"grad norm {row['grad_norm']:.3f} | {row['tokens_per_second']:,.0f} tok/s | "
        f"{row['trained_tokens']:,} trained tokens | {row['seconds']:.1f} s{gpu}"
    )


def _closing(run: Run) -> str:
    """The summary in words, and how to load the result."""
    summary, recipe = run.summary, run.recipe
    folder = json.dumps(str(run.folder.path))
    lines = [
        f"done: {summary.steps} steps, {summary.tokens:,} tokens ({summary.trained_tokens:,} trained) in "
        f"{summary.seconds:.1f} s, {summary.tokens_per_second:,.0f} tok/s",
        f"loss: {summary.first_loss:.4f} -> {summary.last_loss:.4f}",
    ]
    if summary.last_tokens_loss_before is not None and summary.last_tokens_loss_after is not None:
        lines.append(
            f"loss on the last {recipe.eval_last_tokens} tokens: "
            f"{summary.last_tokens_loss_before:.4f} -> {summary.last_tokens_loss_after:.4f}"
        )
    gpu = "" if summary.peak_gpu_gib is None else f"GPU {summary.peak_gpu_gib:.1f} GiB, "
    lines.append(f"peak memory: {gpu}host {summary.peak_host_gib:.1f} GiB")
    if recipe.lora_r == 0:
        lines.append(f"model: AutoModelForCausalLM.from_pretrained({folder})")
    else:
        base = json.dumps(recipe.model_name_or_path)
        dtype = next(p.dtype for p in run.model.parameters() if not p.requires_grad)
        load = f"AutoModelForCausalLM.from_pretrained({base}, dtype={dtype})"
        lines.append(f"adapter: PeftModel.from_pretrained({load}, {folder})")
        if recipe.rope_parameters is not None:
            lines.append("  load the base with the same rope_parameters as in this recipe")
    return "\n".join(lines)
