"""Settings of transformers' Trainer, and of TRL's, that chunks cannot honour: each refused before training starts."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

_NEEDS_LOGITS = "needs logits of whole documents, which are never made"
_FULL_LOGITS_REMEDY = (
    "Use outputs.loss and outputs.log_probs in a loop of your own, or call oomb_accel.disable(model) first"
)


def trainer_refusals(args: TrainingArguments, trainer: Trainer | None) -> list[str]:
    """Reasons why this Trainer cannot train in chunks; empty when there is none.

    Args:
        args: of the Trainer.
        trainer: the Trainer itself, or None where it is not known: then what only it knows is not looked at.
    """
    reasons = [*_refused_arguments(args), *_refused_parallelism(args, trainer)]
    if trainer is not None:
        reasons += _refused_functions(args, trainer)
    return reasons


def _refused_arguments(args: TrainingArguments) -> list[str]:
    reasons = []
    if args.label_smoothing_factor:
        reasons.append(
            f"label_smoothing_factor={args.label_smoothing_factor} {_NEEDS_LOGITS}. Set label_smoothing_factor=0.0."
        )
    if args.fp16:
        reasons.append(
            "fp16=True scales the loss and skips a step after an overflow; a sum over many chunks overflows fp16 too "
            "easily. Set bf16=True and fp16=False."
        )
    if args.torch_compile:
        reasons.append("torch_compile=True would compile around the chunks. Set torch_compile=False.")
    if args.neftune_noise_alpha:
        reasons.append(
            f"neftune_noise_alpha={args.neftune_noise_alpha} sizes its noise by the length of each call: of a chunk, "
            "not of the document. Set neftune_noise_alpha=None."
        )
    if args.n_gpu > 1:
        reasons.append(
            f"{args.n_gpu} GPUs are visible to one process, so Trainer uses DataParallel, whose replicas cannot run "
            "chunks. Start with accelerate launch, or set CUDA_VISIBLE_DEVICES=0."
        )
    checkpointing = args.gradient_checkpointing_kwargs
    if args.gradient_checkpointing and isinstance(checkpointing, dict) and checkpointing.get("use_reentrant"):
        reasons.append(  # SFTTrainer sets it for PEFT under ZeRO 3
            "Reentrant gradient checkpointing is on; its gradients would be wrong inside of chunks. Set "
            "gradient_checkpointing=False: chunks bound the activations already."
        )
    if getattr(args, "activation_offloading", False):
        reasons.append(
            "activation_offloading=True moves activations that chunks do not keep. Set activation_offloading=False."
        )
    return reasons


def _refused_parallelism(args: TrainingArguments, trainer: Trainer | None) -> list[str]:
    reasons = []
    state = None if trainer is None else trainer.accelerator.state
    if args.fsdp or getattr(state, "fsdp_plugin", None) is not None:
        reasons.append(
            "FSDP shards the parameters that chunks need whole. Use DDP, or DeepSpeed with ZeRO stage 1, 2 or 3."
        )
    sizes = args.parallelism_config if trainer is None else getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("sp_size", "cp_size", "tp_size"):
        size = getattr(sizes, name, 1) or 1
        if size > 1:
            reasons.append(
                f"{name}={size} splits each document or layer over several GPUs; chunks need both whole. "
                f"Set {name}=1: chunks bound the memory of a long document on one GPU."
            )
    return reasons


def _refused_functions(args: TrainingArguments, trainer: Trainer) -> list[str]:
    reasons = []
    if trainer.compute_loss_func is not None:
        reasons.append(f"compute_loss_func {_NEEDS_LOGITS}. {_FULL_LOGITS_REMEDY}.")
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if evaluates and not args.prediction_loss_only:
        for name in ("compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(trainer, name) is not None:
                reasons.append(
                    f"{name} {_NEEDS_LOGITS}. Set prediction_loss_only=True to evaluate the loss only, or "
                    "eval_strategy='no' and evaluate after oomb_accel.disable(model)."
                )
                break
    return reasons


def trl_refusals(trainer: Trainer, model: nn.Module) -> list[str]:
    """The same for a Trainer of TRL that is complete; for any other one there are none."""
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    if not kinds:
        return []
    if all(kind.__name__ != "SFTTrainer" for kind in kinds):
        return [f"{kinds[0].__name__} of TRL makes its loss in a way that was not tested here. Use SFTTrainer."]
    config: Any = getattr(model, "config", None)
    if config is not None and getattr(config.get_text_config(), "output_router_logits", False):
        return [
            "The auxiliary loss of the router is no sum over chunks. Set router_aux_loss_coef=0.0 in the SFTConfig."
        ]
    return []
