"""From a recipe to a run that can begin; whatever is wrong shows here, before any time is spent."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn

from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.memory_watch import watch_memory
from oomb_accel.integrations.prepare import prepare_with
from oomb_accel.integrations.rope import check_length
from oomb_accel.integrations.step_metrics import StepMetrics
from oomb_accel.integrations.switch import switch_on
from oomb_accel.integrations.timeout import set_timeout
from oomb_accel.plan import check_base_dtype
from oomb_accel.progress import ProgressLine
from oomb_accel.sampler import LengthBalancedSampler
from oomb_accel.setting_text import dtype_name
from oomb_accel.sources import Resolved, gather, resolve
from oomb_accel.training.checkpoint import check_shared, keep_frozen_weights_out, load_checkpoint
from oomb_accel.training.data import Corpus, load_corpus, within_vocabulary
from oomb_accel.training.folder import LATEST, RunFolder
from oomb_accel.training.identity import (
    Identity,
    adapter_digest,
    check_same_function,
    check_same_on_all_ranks,
    data_digest,
    model_digest,
)
from oomb_accel.training.launch import clips_itself, make_accelerator, zero_stage
from oomb_accel.training.model import add_adapters, apply_liger, load_model, load_tokenizer
from oomb_accel.training.progress_file import read_progress
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.reshard import needs_other_shards
from oomb_accel.training.run import Run, Summary
from oomb_accel.training.step import NormBeforeUpdate
from oomb_accel.training.trackers import Trackers, check_trackers


def prepare(recipe: Recipe) -> Run:
    """Load everything, and go to where the checkpoint is that the recipe names.

    Raises:
        ValueError: something in the recipe, the data, the model, the launch or the checkpoint cannot work.
    """
    check_trackers(recipe)
    folder = RunFolder(recipe)
    accelerator = make_accelerator(recipe)
    resolved = _settings(recipe, accelerator)
    recipe.oomb, folder.origins = resolved.config, dict(resolved.origins)
    if recipe.oomb.enabled:
        check_base_dtype(recipe.oomb.base_dtype, lora_r=recipe.lora_r, zero_stage=zero_stage(accelerator))
    if folder.resume is not None:
        check_same_function(recipe, folder.resume, read_progress(folder.resume)["recipe"])
    set_seed(recipe.seed)
    tokenizer = load_tokenizer(recipe)
    corpus = load_corpus(recipe, tokenizer)
    _cap_last_tokens(recipe, corpus)
    model = load_model(recipe)
    identity_of_base = model_digest(model)
    num_embeddings = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    identity_of_data = data_digest(within_vocabulary(corpus.documents, num_embeddings))  # the one time all is read
    _check_model(model, recipe, corpus, accelerator)
    if apply_liger(model, recipe, accelerator.device):
        corpus.notes.append("Liger kernels for norms, RoPE and MLP")
    model = add_adapters(model, recipe)
    identity = Identity(model=identity_of_base, adapter=adapter_digest(model, recipe), data=identity_of_data)
    check_same_on_all_ranks(accelerator, identity, recipe)
    sampler = _sampler(recipe, corpus, accelerator, folder)
    num_steps = recipe.max_steps or sampler.steps_per_epoch * (recipe.num_train_epochs or 1)
    finished = _is_finished(folder, identity, num_steps)
    if not finished:
        folder.refuse_another_run()
        _check_steps_left(folder, num_steps, recipe)
    line = ProgressLine(force=recipe.oomb.progress is True)
    show = recipe.oomb.progress is not False
    switch_on(model, resolved, on_progress=line if show else None)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        fused=accelerator.device.type == "cuda",
    )
    if folder.resume is not None and needs_other_shards(accelerator, read_progress(folder.resume)):
        accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
    prepared, optimizer = prepare_with(accelerator, accelerator.prepare, (model, optimizer), model, resolved)
    _tell_longest_document(model, recipe, corpus)
    run = Run(
        recipe=recipe,
        accelerator=accelerator,
        model=prepared,
        tokenizer=tokenizer,
        corpus=corpus,
        sampler=sampler,
        optimizer=optimizer,
        folder=folder,
        line=line,
        num_steps=num_steps,
        num_targets=corpus.documents.num_targets(),
        identity=identity,
        memory=watch_memory(model, optimizer=optimizer) if recipe.oomb.enabled else None,
        finished=finished,
    )
    if recipe.oomb.enabled:
        run.metrics = StepMetrics(model, run.memory)
    if accelerator.is_main_process and not finished:
        run.trackers = Trackers(recipe, accelerator)
    _add_norm_hook(run)
    check_shared(run)
    keep_frozen_weights_out(run)
    set_seed(recipe.seed, device_specific=True)  # dropout differs between ranks
    if finished and folder.finished is not None:
        run.summary = Summary.from_dict(folder.finished)
    elif folder.resume is not None:
        load_checkpoint(run, folder.resume)
        if run.memory is not None:
            run.memory.add_peaks(run.summary.memory_peaks)
    return run


def _settings(recipe: Recipe, accelerator: Accelerator) -> Resolved:
    """The oomb settings of the recipe together with those of the DeepSpeed config and of the environment."""
    deepspeed = zero_stage(accelerator) is not None
    config = accelerator.state.deepspeed_plugin.deepspeed_config if deepspeed else None
    return resolve(*gather(config, *recipe.oomb_sources()))


def _check_model(model: nn.Module, recipe: Recipe, corpus: Corpus, accelerator: Accelerator) -> None:
    if recipe.oomb.enabled and recipe.oomb.beyond_trained_length == "error":
        check_length(model.config, corpus.documents.longest())
    if zero_stage(accelerator) is not None and not _deepspeed_casts(accelerator):
        odd = next((p.dtype for p in model.parameters() if p.dtype != torch.float32), None)
        if odd is not None:
            raise ValueError(
                f"DeepSpeed trains in fp32 here, and the weights are {dtype_name(odd)}.\n"
                "  Got mixed precision no.\n  Set mixed_precision: bf16, or torch_dtype: float32."
            )


def _cap_last_tokens(recipe: Recipe, corpus: Corpus) -> None:
    """No more tokens than can be predicted in the first document: its first one cannot. A note says so."""
    most = corpus.documents.num_tokens()[0] - 1
    if recipe.eval_last_tokens > most:
        corpus.notes.append(
            f"eval_last_tokens={most} instead of {recipe.eval_last_tokens}: the first document has no more"
        )
        recipe.eval_last_tokens = most


def _deepspeed_casts(accelerator: Accelerator) -> bool:
    config: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
    return config.get("bf16", {}).get("enabled") is True


def _sampler(recipe: Recipe, corpus: Corpus, accelerator: Accelerator, folder: RunFolder) -> LengthBalancedSampler:
    """The plan of the data; a run that goes on keeps the groups that it began with."""
    batch_size, accumulation = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    per_step = accelerator.num_processes * batch_size * accumulation
    before = read_progress(folder.resume) if folder.resume is not None else {}
    return LengthBalancedSampler(
        corpus.documents.num_tokens(),
        num_ranks=accelerator.num_processes,
        rank=accelerator.process_index,
        batch_size=batch_size,
        accumulation=accumulation,
        seed=recipe.seed,
        group=before["group"] if before.get("documents_per_step") == per_step else None,
    )


def _is_finished(folder: RunFolder, identity: Identity, num_steps: int) -> bool:
    """Whether the run that is to go on has done all its steps and left its result; process 0 says so for all."""
    before = folder.finished or {}
    done = before.get("steps") == num_steps and before.get("identity") == identity.to_dict()
    return bool(broadcast_object_list([done])[0])


def _tell_longest_document(model: nn.Module, recipe: Recipe, corpus: Corpus) -> None:
    """What prepared the model knows neither the documents nor how many there are in a step."""
    longest = max(corpus.documents.num_tokens())
    per_step = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    note = set_timeout(model, recipe.oomb, document_tokens=longest, micro_steps=per_step)
    if not recipe.oomb.enabled:
        return
    state = attachment_of(model)
    state.stream_tokens = longest * recipe.per_device_train_batch_size
    if note is not None:
        notes = state.notes
        notes[:] = [*(old for old in notes if not old.startswith("timeout ")), note]


def _check_steps_left(folder: RunFolder, num_steps: int, recipe: Recipe) -> None:
    """Something must be left to do: a step, or the end of a run that was stopped behind its last checkpoint."""
    done = read_progress(folder.resume)["step"] if folder.resume is not None else 0
    only_end = done == num_steps and recipe.resume_from_checkpoint == LATEST and folder.finished is None
    if done >= num_steps and not only_end:
        raise ValueError(
            f"There is nothing left to train.\n  {str(folder.resume)!r} is at step {done} of {num_steps}.\n"
            f"  Set max_steps={done + max(done // 2, 1)}, or leave resume_from_checkpoint out."
        )


def _add_norm_hook(run: Run) -> None:
    stage = zero_stage(run.accelerator)
    if stage is None or not clips_itself(stage, "bf16" if _deepspeed_casts(run.accelerator) else "no"):
        return
    run.norm_hook = NormBeforeUpdate(list(run.trainable().values()), run.recipe.max_grad_norm)
    run.model.optimizer.register_step_pre_hook(run.norm_hook)
