"""Keys that recipes of other trainers have, and what to write here instead."""

from __future__ import annotations

from typing import Any

from oomb_accel.setting_text import LENGTH_NAMES

_LEAVE = "Leave it out"
_WEIGHTS = f"{_LEAVE}: weights of a recipe are bf16 or fp32."
_ATTENTION = f"{_LEAVE}; oomb.backend chooses the attention kernels."
_CHUNKS = f"{_LEAVE}: activations cost one chunk, of oomb.chunk_tokens."
_LAUNCH = f"{_LEAVE}; the launch says it: accelerate launch --config_file configs/accelerate/zero2.yaml."
_HELD_OUT = f"{_LEAVE}; oomb eval measures held-out documents, eval_last_tokens the end of one."
_ROLES = "Set train_on: all, completions or assistant."
_TRACKER = "Set report_to: wandb, and run_name."
_ONE_GPU = f"{_LEAVE}: one document is on one GPU."
_NOT_HERE = f"{_LEAVE}: there is no such thing here."

OTHER_NAMES = {
    # model and types
    "base_model": "Set model_name_or_path.",
    "model": "Set model_name_or_path.",
    "model_name": "Set model_name_or_path.",
    "model_id": "Set model_name_or_path.",
    "model_type": f"{_LEAVE}: the model's config says it.",
    "tokenizer_type": f"{_LEAVE}: the model's config says it.",
    "model_revision": "Set revision.",
    "dtype": "Set torch_dtype.",
    "bf16": "Set mixed_precision: bf16, or 'no' on a CPU; auto, the default, does just that.",
    "fp16": "Training runs in bf16 or fp32: set mixed_precision.",
    "tf32": f"{_LEAVE}.",
    "load_in_4bit": _WEIGHTS,
    "load_in_8bit": _WEIGHTS,
    "rope_scaling": "Set rope_parameters.",
    "overrides_of_model_config": "Set rope_parameters, where it is RoPE that is overridden.",
    # adapters
    "adapter": "Set lora_r: 16, or 0 to train all weights.",
    "use_peft": "Set lora_r: 16, or 0 to train all weights.",
    "full_finetuning": "Set lora_r: 0 to train all weights.",
    "r": "Set lora_r.",
    "target_modules": "Set lora_target_modules.",
    "lora_target_linear": "Set lora_target_modules: all-linear.",
    "modules_to_save": "Set lora_modules_to_save.",
    "lora_fan_in_fan_out": f"{_LEAVE}.",
    "lora_task_type": f"{_LEAVE}.",
    "peft_use_rslora": "Set use_rslora.",
    "peft_use_dora": "Set use_dora.",
    # data
    "datasets": "Set data_path.",
    "dataset_name": "Set data_path, which takes hub ids too.",
    "dataset_config": "Set data_path: owner/name:config.",
    "dataset_train_split": "Set data_split.",
    "split": "Set data_split.",
    "dataset_text_field": "Set text_field.",
    "dataset_prepared_path": "Set data_cache.",
    "dataset_num_proc": f"{_LEAVE}: texts are tokenised on all cores.",
    "dataset_processes": f"{_LEAVE}: texts are tokenised on all cores.",
    "dataloader_num_workers": f"{_LEAVE}.",
    "chat_template": f"{_LEAVE}: the tokenizer's own is used.",
    "special_tokens": f"{_LEAVE}: the tokenizer's own are used.",
    **dict.fromkeys(LENGTH_NAMES, "Set max_length."),
    "excess_length_strategy": "Set truncation: error, drop, start, end or split.",
    "truncation_mode": "Set truncation: error, drop, start, end or split.",
    "sample_packing": "Set packing.",
    "eval_sample_packing": _HELD_OUT,
    "pad_to_sequence_len": f"{_LEAVE}: nothing is padded.",
    "padding_free": f"{_LEAVE}: nothing is padded.",
    "train_on_inputs": _ROLES,
    "roles_to_train": _ROLES,
    "assistant_only_loss": "Set train_on: assistant.",
    "train_on_responses_only": "Set train_on: assistant.",
    "completion_only_loss": "Set train_on: completions.",
    "val_set_size": _HELD_OUT,
    # schedule
    "micro_batch_size": "Set per_device_train_batch_size.",
    "num_epochs": "Set num_train_epochs.",
    "epochs": "Set num_train_epochs.",
    "lr": "Set learning_rate.",
    "lr_scheduler": "Set lr_scheduler_type.",
    "warmup_ratio": "Set warmup_steps.",
    "optim": "Set optimizer: adamw, the only one.",
    "group_by_length": f"{_LEAVE}: devices get documents of like length anyway.",
    "random_state": "Set seed.",
    "save_strategy": "Set save_steps.",
    "saves_per_epoch": "Set save_steps.",
    "eval_strategy": _HELD_OUT,
    "eval_steps": _HELD_OUT,
    "evals_per_epoch": _HELD_OUT,
    "per_device_eval_batch_size": _HELD_OUT,
    "logging_strategy": "Set logging_steps.",
    "neftune_noise_alpha": _NOT_HERE,
    "early_stopping_patience": _NOT_HERE,
    "rl": _NOT_HERE,
    # kernels, memory, machines
    "gradient_checkpointing": _CHUNKS,
    "gradient_checkpointing_kwargs": _CHUNKS,
    "use_gradient_checkpointing": _CHUNKS,
    "activation_offloading": _CHUNKS,
    "tiled_mlp": _CHUNKS,
    "chunked_cross_entropy": _CHUNKS,
    "attn_implementation": _ATTENTION,
    "flash_attention": _ATTENTION,
    "xformers_attention": _ATTENTION,
    "sdp_attention": _ATTENTION,
    "use_liger_kernel": "Set use_liger.",
    "plugins": f"{_LEAVE}; use_liger is for Liger's kernels.",
    "torch_compile": _NOT_HERE,
    "deepspeed": _LAUNCH,
    "fsdp": _LAUNCH,
    "fsdp_config": _LAUNCH,
    "context_parallel_size": _ONE_GPU,
    "sequence_parallel_size": _ONE_GPU,
    "sequence_parallel_degree": _ONE_GPU,
    "ddp_timeout": "Set oomb.timeout_minutes.",
    # trackers and hub
    "wandb_project": _TRACKER,
    "wandb_name": _TRACKER,
    "wandb_entity": _TRACKER,
    "wandb_watch": _TRACKER,
    "wandb_log_model": _TRACKER,
    "push_to_hub": _NOT_HERE,
    "hub_model_id": _NOT_HERE,
}
"""Names that other trainers use (axolotl, TRL, Unsloth, transformers), or that have no place here."""


_READERS = frozenset(("json", "csv", "parquet", "arrow", "text"))
"""What axolotl has as the path of a dataset whose data_files say where it is."""


def remedy_of(key: str, value: Any) -> str:
    """What to write instead of a key of `OTHER_NAMES`; for axolotl's datasets with the paths in them."""
    paths = _paths_of(value) if key == "datasets" and isinstance(value, list) else []
    if not paths:
        return OTHER_NAMES[key]
    return f"Set data_path: {paths[0] if len(paths) == 1 else '[' + ', '.join(paths) + ']'}"


def _paths_of(datasets: list[Any]) -> list[str]:
    found: list[Any] = []
    for item in datasets:
        path, files = (item.get("path"), item.get("data_files")) if isinstance(item, dict) else (item, None)
        in_files = files is not None and path in _READERS
        found += (files if isinstance(files, list) else [files]) if in_files else [path]
    return [path for path in found if isinstance(path, str)]
