"""The same training twice: on several ranks by the engine of a job, and in one process on the union of their data.

A job is data: what to train, on which documents, with which engine. `train` runs on each rank (give it to `run_ranks`),
`train_alone` is the reference, `check_outcomes` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.progress import ChunkEvent
from tests.harness.batches import IGNORED, Document, Layout, documents_of, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config, reference, split, switched_on
from tests.harness.tolerance import (
    assert_same_bits,
    assert_same_gradients,
    assert_same_total,
    assert_same_values,
    worst_relative_error,
)

SMALLEST_MOVE = 2e-3
"""Share of itself that training must add to each parameter: equal weights within 1e-5 are then equal gradients
within half a percent, and within 1e-4 for most parameters."""

Documents = tuple[Document, ...]
Micro = tuple[Documents, ...]
"""Documents of one micro-step, by rank. A rank without documents gets the empty batch."""
Step = tuple[Micro, ...]
"""One optimizer step, by micro-step."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, on what, how."""

    steps: tuple[Step, ...]
    stage: int | None
    """ZeRO stage, or None for plain DDP."""
    model_type: str = "qwen2"
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of `tiny_model`."""
    lora: dict[str, Any] | None = None
    """Settings of `with_lora`; None trains the whole model."""
    frozen: tuple[str, ...] = ()
    """Parameters whose name contains one of these are not trained."""
    bf16: bool = False
    """Train in bf16 with fp32 master weights, from weights that bf16 can hold."""
    clip: float = 0.0
    """Largest gradient norm; 0 does not clip."""
    offload: bool = False
    """Keep the optimizer on the CPU, as DeepSpeed does it."""
    zero: dict[str, Any] = field(default_factory=dict)
    """More settings of the ``zero_optimization`` block."""
    rate: float = 0.3
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of `OombConfig`."""
    chunked: bool = True
    """False trains without oomb_accel, for the twice-plain rule."""
    engine_by: str | None = None
    """Whose ``initialize`` makes the engine, ``"oomb_accel"`` or ``"deepspeed"``. By default ours under ZeRO 3, where
    it sets up more than ``enable`` does, and DeepSpeed's elsewhere."""
    saved_model: str | None = None
    """Ranks load the base model from this folder under ``zero.Init``, so that none ever holds it whole."""
    evaluation: Micro = ()
    """Documents to evaluate before and after training."""

    @property
    def accumulation(self) -> int:
        return len(self.steps[0])

    def config(self) -> OombConfig:
        """The self-test is left out: the test that follows says more."""
        return config(**{"self_test": False, **self.settings})

    def build(self) -> nn.Module:
        """The model, on every rank with the same weights."""
        base = tiny_model(self.model_type, **self.model)
        if self.bf16:
            base = base.bfloat16().float()
        return self._complete(base)

    def load(self) -> nn.Module:
        """The model from its folder. Under ZeRO 3 that is sharded from the start."""
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        assert self.saved_model is not None
        sharding = HfDeepSpeedConfig(self.deepspeed_config())  # noticed by transformers as long as it lives
        base = AutoModelForCausalLM.from_pretrained(self.saved_model, attn_implementation="eager")
        del sharding
        assert self.stage != 3 or _is_sharded(base)
        return self._complete(base.train())

    def _complete(self, base: Any) -> nn.Module:
        model: nn.Module = base if self.lora is None else with_lora(base, **self.lora)
        for name, parameter in model.named_parameters():
            if any(part in name for part in self.frozen):
                parameter.requires_grad_(False)
        return model

    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration for DeepSpeed; under ZeRO 3 all parameters are really sharded."""
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 0, **self.zero}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.bf16},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }


@dataclass
class Outcome:
    """What one rank has at the end."""

    losses: list[Tensor]
    """By step: its part of the mean over all targets of the step."""
    weights: dict[str, Tensor]
    """Trainable parameters, whole, in fp32."""
    num_chunks: list[int] = field(default_factory=list)
    """By call of the model in training: chunks that its sweeps ran."""
    log_probs: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Evaluation before and after training: of each document."""


def steps_of(*micros: Sequence[Sequence[int]], accumulation: int = 1) -> tuple[Step, ...]:
    """Random documents for the lengths of every micro-step and rank, all of them different."""
    made = [
        tuple(tuple(documents_of(*lengths, seed=16 * number + rank)) for rank, lengths in enumerate(micro))
        for number, micro in enumerate(micros)
    ]
    return tuple(tuple(made[i : i + accumulation]) for i in range(0, len(made), accumulation))


def batch_of(documents: Documents) -> Layout:
    """One document per row; without documents the empty batch."""
    if documents:
        return padded(documents)
    one = torch.zeros(1, 1, dtype=torch.long)
    return Layout({"input_ids": one, "attention_mask": one, "labels": one + IGNORED}, (), ())


def train(rank: int, job: Job, before_training: Callable[[nn.Module, dict[str, Any]], None] | None = None) -> Outcome:
    """Train on one rank, by the loop that users write.

    Args:
        before_training: called with DeepSpeed's engine and this rank's first batch.
    """
    device = _connect(rank)
    model = (job.build() if job.saved_model is None else job.load()).to(device)
    events: list[ChunkEvent] = []
    if job.chunked:
        oomb_accel.enable(model, job.config(), on_progress=events.append)
    log_probs: list[tuple[Tensor, ...]] = []
    if job.stage is None:
        losses = _train_ddp(model, job, rank)
    else:
        losses, log_probs = _train_deepspeed(model, job, rank, before_training)
    firsts = [event for event in events if event.sweep == "forward" and event.chunk == 1]
    num_chunks = [event.num_chunks for event in firsts if event.with_backward]
    return Outcome(losses, whole_weights(model), num_chunks, log_probs)


def _connect(rank: int) -> torch.device:
    """Where this rank trains: on its GPU where the processes are connected by NCCL already, else on the CPU."""
    if dist.is_initialized():
        return torch.device("cuda", rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def train_alone(job: Job) -> Outcome:
    """The reference: plain full attention over each document alone, in one process, in fp32."""
    model = job.build()
    optimizer = sgd(model, job)
    losses = []
    for step in job.steps:
        everything = [document for micro in step for documents in micro for document in documents]
        losses.append(reference(model, everything).loss)
        if job.clip:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
    return Outcome(losses, whole_weights(model))


def train_alone_in_chunks(job: Job) -> Outcome:
    """The reference where chunks are part of the definition: one process that runs the batches of all ranks one after
    another, with the job's settings. Evaluation is of the documents of all ranks."""
    model = job.build()
    optimizer = sgd(model, job)
    losses: list[Tensor] = []
    log_probs: list[tuple[Tensor, ...]] = []

    def evaluate() -> None:
        if job.evaluation:
            log_probs.append(tuple(values for documents in job.evaluation for values in _evaluate(model, documents)))

    with switched_on(model, job.config()):
        evaluate()
        for step in job.steps:
            batches = [batch_of(documents).batch for micro in step for documents in micro]
            total = sum(oomb_accel.count_targets(batch) for batch in batches)
            parts = [model(**batch, num_targets=total).loss for batch in batches]
            for part in parts:
                part.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.stack(parts).sum().detach())
        evaluate()
    return Outcome(losses, whole_weights(model), log_probs=log_probs)


def check_outcomes(outcomes: Sequence[Outcome], alone: Outcome, job: Job) -> float:
    """Ranks against the reference: losses of every step, the weights at the end, which have moved, and evaluation.

    Returns:
        The largest relative error of a parameter.
    """
    for number, wanted in enumerate(alone.losses):
        got = torch.stack([outcome.losses[number] for outcome in outcomes]).sum()
        assert_same_total(got, wanted, f"loss of step {number}")
    for outcome in outcomes[1:]:
        assert_same_bits(outcome.weights, outcomes[0].weights)
    assert_same_gradients(outcomes[0].weights, alone.weights)
    before = whole_weights(job.build())
    moved = {n: (alone.weights[n] - w).norm().item() / w.norm().item() for n, w in before.items()}
    assert min(moved.values()) > SMALLEST_MOVE, f"too little was learnt to see an error: {moved}"
    if job.evaluation:
        for number, weights in enumerate((before, outcomes[0].weights)):
            _check_evaluation(job, weights, [outcome.log_probs[number] for outcome in outcomes])
    return worst_relative_error(outcomes[0].weights, alone.weights)


def _check_evaluation(job: Job, weights: dict[str, Tensor], ours: Sequence[tuple[Tensor, ...]]) -> None:
    model = job.build()
    model.load_state_dict(weights, strict=False)
    wanted = reference(model, [document for documents in job.evaluation for document in documents]).log_probs
    got = [values for rank in ours for values in rank]
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert_same_values(a, b, f"evaluation of document {index}")


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable parameters in fp32, gathered where ZeRO has them in shards."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(p.dtype != torch.float32 for p in trained.values()):
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: _on_cpu(safe_get_full_fp32_param(p)) for name, p in trained.items()}
    if not any(hasattr(p, "ds_id") for p in trained.values()):
        return {name: _on_cpu(p) for name, p in trained.items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(trained.values())):
        return {name: _on_cpu(p) for name, p in trained.items()}


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _train_deepspeed(
    model: nn.Module, job: Job, rank: int, before_training: Callable[[nn.Module, dict[str, Any]], None] | None
) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    import deepspeed

    arguments = {"model": model, "optimizer": sgd(model, job), "config": job.deepspeed_config()}
    engine_by = job.engine_by or ("oomb_accel" if job.stage == 3 else "deepspeed")
    if job.chunked and engine_by == "oomb_accel":
        engine, *_ = oomb_accel.deepspeed.initialize(**arguments, oomb=job.config())
    else:
        engine, *_ = deepspeed.initialize(**arguments)
    assert job.stage != 3 or _is_sharded(model)
    if before_training is not None:
        before_training(engine, batch_of(job.steps[0][0][rank]).batch)
    losses = []
    log_probs = [_evaluate(engine, job.evaluation[rank])] if job.evaluation else []
    for step in job.steps:
        parts = []
        for layout, num_targets in _batches(step, rank, model):
            loss = _loss(engine, layout, num_targets, job.chunked)
            engine.backward(loss * dist.get_world_size() * job.accumulation)  # DeepSpeed takes means over both
            engine.step()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).sum().cpu())
    if job.evaluation:
        log_probs.append(_evaluate(engine, job.evaluation[rank]))
    return losses, log_probs


def _train_ddp(model: nn.Module, job: Job, rank: int) -> list[Tensor]:
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(model, job)
    losses = []
    for step in job.steps:
        parts = []
        for index, (layout, num_targets) in enumerate(_batches(step, rank, model)):
            with parallel.no_sync() if index + 1 < job.accumulation else nullcontext():
                loss = _loss(parallel, layout, num_targets, job.chunked)
                (loss * dist.get_world_size()).backward()  # DDP takes the mean over ranks
            parts.append(loss.detach())
        if job.clip:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).sum().cpu())
    return losses


def _loss(model: nn.Module, layout: Layout, num_targets: int, chunked: bool) -> Tensor:
    if chunked:
        loss: Tensor = model(**layout.batch, num_targets=num_targets).loss
        return loss
    inputs = {name: values for name, values in layout.batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets = layout.batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum") / num_targets


def _is_sharded(model: nn.Module) -> bool:
    """Whether no parameter is whole, not even a small one."""
    return all(parameter.numel() == 0 for parameter in model.parameters())


def _evaluate(engine: nn.Module, documents: Documents) -> tuple[Tensor, ...]:
    layout = _on(next(engine.parameters()).device, batch_of(documents))
    engine.eval()
    with torch.no_grad():
        log_probs_BL = engine(**layout.batch).log_probs
    engine.train()
    return tuple(split(log_probs_BL.cpu(), layout))


def _batches(step: Step, rank: int, model: nn.Module) -> Iterator[tuple[Layout, int]]:
    """This rank's micro-batches of a step, with the targets that all ranks have in it."""
    device = next(model.parameters()).device
    layouts = [_on(device, batch_of(micro[rank])) for micro in step]
    num_targets = torch.tensor(sum(oomb_accel.count_targets(layout.batch) for layout in layouts), device=device)
    dist.all_reduce(num_targets)
    return ((layout, int(num_targets)) for layout in layouts)


def _on(device: torch.device, layout: Layout) -> Layout:
    return replace(layout, batch={name: values.to(device) for name, values in layout.batch.items()})


def sgd(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=job.rate)
