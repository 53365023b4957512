"""A recipe: every setting of one fine-tuning run, under the names that users of TRL and axolotl type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from oomb_accel.config import OombConfig
from oomb_accel.plan import Adapters
from oomb_accel.plan.limits import check_tokens
from oomb_accel.reading import shown
from oomb_accel.sources import Source
from oomb_accel.spelling import called
from oomb_accel.training.paths import checked_path
from oomb_accel.training.settings import Setting, check_value, read_settings

Auto = Literal["auto"]


@dataclass(kw_only=True, slots=True)
class Recipe:
    """One fine-tuning run. Make it with :meth:`from_yaml`, or by keyword.

    Raises:
        ValueError: a missing, misspelt or ill-typed setting, or settings that contradict each other.
    """

    model_name_or_path: str = ""
    """Folder of a model, or its hub id."""

    data_path: str | list[str] = ""
    """Text files (one document each), .jsonl, .json, .csv, .tsv, .parquet or .arrow files (one document per row),
    folders and Git checkouts (one document made of their files; see folder_as), hub datasets (owner/name or
    owner/name:config) or folders made by save_to_disk; one of them, or a list."""

    output_dir: str = ""
    """Folder for the adapter, metrics.jsonl, config.yaml and summary.json."""

    overwrite_output_dir: bool = False
    """Replace an earlier run in output_dir; together with resume_from_checkpoint only what came after the
    checkpoint."""

    resume_from_checkpoint: str | None = None
    """Go on from a checkpoint-N folder, or from the "latest" one in output_dir; with "latest" and none there, begin."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model or its tokenizer. Read it before: it can do whatever you can."""

    torch_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the weights. "auto" is the checkpoint's own with LoRA, and float32 for full fine-tuning."""

    rope_parameters: dict[str, Any] | None = None
    """Overrides of the model's RoPE settings, for documents longer than its trained range, for example
    {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}."""

    lora_r: int = 16
    """Rank of the LoRA adapters; 0 trains all weights of the model instead."""

    lora_alpha: float = 32.0
    """LoRA scale: the update is multiplied by lora_alpha / lora_r."""

    lora_dropout: float = 0.0
    """Dropout in front of the adapters."""

    lora_target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter; "all-linear" is every linear layer but the head."""

    lora_modules_to_save: list[str] | None = None
    """Modules that are trained whole and saved with the adapter, for example [embed_tokens, lm_head]."""

    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_r)."""

    use_dora: bool = False
    """Weight-decomposed LoRA."""

    data_split: str = "train"
    """Split of a hub or saved dataset, for example train or train[:100]."""

    folder_as: Literal["auto", "document", "files"] = "auto"
    """What a folder is: one document made of its text files in the order of their paths, or its files, read one by
    one. "auto" is files where all of them are tables such as .jsonl and .parquet, otherwise one document."""

    data_include: list[str] | None = None
    """Read only files of a folder that fit one of these globs, for example ["*.py", "docs/"]."""

    data_exclude: list[str] | None = None
    """Leave out files of a folder that fit one of these globs, for example [tests, "*.json"]."""

    text_field: str = "text"
    """Name of the text in the rows of a table."""

    train_on: Literal["auto", "all", "completions", "assistant"] = "auto"
    """Which tokens the loss is on: all; only the completion (of a chat, its last reply); or only what the assistant
    says. "auto" is completions for rows with prompt and completion, assistant for chats whose template marks it with
    {% generation %}, otherwise all."""

    max_length: int | None = None
    """Most tokens of one document. None sets no limit of its own; the model's trained range still counts."""

    truncation: Literal["error", "drop", "start", "end", "split"] = "error"
    """What to do with a document longer than max_length: refuse it, leave it out, keep its start, keep its end, or cut
    it into documents that do not see each other."""

    packing: bool = False
    """Put several short documents into one sequence of up to max_length tokens. They do not see each other."""

    data_cache: str | None = None
    """Folder that keeps token ids between runs; OOMB_CACHE or ~/.cache/oomb_accel if left out."""

    optimizer: Literal["adamw"] = "adamw"
    """AdamW, fused on a GPU. Its state is for the trained parameters only."""

    learning_rate: float = 2e-4
    """Highest learning rate."""

    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after the warm-up; linear and cosine end at 0."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""

    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them as they are."""

    max_steps: int | None = None
    """Optimizer steps of the run; data is repeated as needed. Excludes num_train_epochs."""

    num_train_epochs: int | None = None
    """Passes over the data; 1 when neither this nor max_steps is set."""

    per_device_train_batch_size: int = 1
    """Documents per micro-batch and device. Devices get documents of like length at the same time."""

    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step. Every target of a step has the same weight, however they are cut."""

    seed: int = 42
    """Seed of adapter weights, dropout and data order."""

    logging_steps: int = 1
    """Print a line every so many steps; metrics.jsonl has every step."""

    save_steps: int = 0
    """Save a checkpoint-N folder every so many steps and after the last one: the result so far, and what is needed to
    go on from it. 0 saves only the result, at the end, and, in a single process, a checkpoint when a run stops early.
    On several devices set it: a run that stops early keeps what it has saved before."""

    save_total_limit: int | None = None
    """Keep so many of the latest checkpoints; all of them if left out."""

    mixed_precision: Literal["auto", "bf16", "no"] = "auto"
    """Autocast. "auto" is bf16 on a GPU and none on the CPU."""

    use_liger: bool | Auto = "auto"
    """Liger kernels for norms, RoPE and MLP. "auto" takes them on a GPU where they are installed."""

    report_to: Literal["none", "all", "tensorboard", "wandb", "trackio"] = "none"
    """Tracker that gets the metrics of every step; "all" is every one of them that is installed."""

    run_name: str | None = None
    """Name of the run in trackers; the name of output_dir if left out."""

    logging_dir: str | None = None
    """Folder for what tensorboard reads; output_dir/logs if left out."""

    eval_last_tokens: int = 0
    """Measure the loss on this many last tokens of the first document, with all the document before them as
    context, before and after training; 0 measures nothing. All of a document that has fewer."""

    oomb: OombConfig = field(default_factory=OombConfig)
    """Settings of the chunk recurrence: chunk_tokens, page_tokens, backend, and so on."""

    # No settings of a recipe: names of those that were given on the command line, and of those that were given at all.
    flags: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)
    given: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, setting in hints().items():
            setattr(self, name, check_value(name, getattr(self, name), setting))
        for name, example in _REQUIRED.items():
            if not getattr(self, name) and called(name) != name:
                raise ValueError(f"{called(name)} is empty.\n  Got {getattr(self, name)!r}.\n  Example: {example}")
            if not getattr(self, name):
                raise ValueError(
                    f"The recipe lacks {name}.\n  Got none, or an empty one.\n"
                    f"  Example: {name}: {example}   (or --{name} {example})"
                )
        for name in _PATHS:
            setattr(self, name, checked_path(name, getattr(self, name)))
        for name in _LEAST:
            _check_range(name, getattr(self, name))
        if self.max_length is not None:
            check_tokens("max_length", self.max_length, self.max_length)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that contradict each other."""
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise ValueError(
                "Two settings say how long to train.\n"
                f"  Got max_steps={self.max_steps} and num_train_epochs={self.num_train_epochs}.\n"
                "  Leave num_train_epochs out (max_steps counts optimizer steps), "
                "or max_steps (num_train_epochs counts passes over the data)."
            )
        if self.truncation != "error" and self.max_length is None:
            raise ValueError(
                "truncation needs a length.\n"
                f"  Got truncation={self.truncation} without max_length.\n"
                "  Set max_length, for example 131072."
            )
        if self.packing and self.max_length is None:
            raise ValueError(
                "packing needs a length.\n  Got packing=true without max_length.\n  Set max_length, for example 131072."
            )
        if self.packing and not self.oomb.enabled:
            raise ValueError(
                "Packed documents would see each other: the model's own attention does not keep them apart.\n"
                "  Got packing=true with oomb.enabled=false.\n  Set packing: false, or oomb.enabled: true."
            )
        if self.lora_r == 0:
            for name in ("use_rslora", "use_dora", "lora_modules_to_save", "lora_dropout"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} belongs to LoRA, which is off.\n"
                        f"  Got {name}={getattr(self, name)} with lora_r=0.\n"
                        f"  Set lora_r=16, or leave {name} out."
                    )
        if self.lora_dropout >= 1.0:
            raise ValueError(
                f"lora_dropout must be below 1.\n  Got lora_dropout={self.lora_dropout}.\n  Set lora_dropout=0.05."
            )
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(
                "The warm-up would never end.\n"
                f"  Got warmup_steps={self.warmup_steps} with max_steps={self.max_steps}.\n"
                f"  Set warmup_steps={self.max_steps // 10}."
            )

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe file and apply command-line options over it.

        Args:
            path: yaml file with one mapping; the ``oomb`` key holds a mapping of its own.
            overrides: options such as ``--lora_r 8``, ``--lora-r=8`` or ``--oomb.chunk_tokens 512``.

        Raises:
            ValueError: no such file, not a mapping, or a setting that is unknown, ill-typed or contradictory;
                the message names the place, the key and what would be right.
        """
        values, flags = read_settings(Path(path), list(overrides), hints(), OombConfig)
        recipe = cls(**values)
        recipe.flags, recipe.given = flags, frozenset(values)
        return recipe

    @classmethod
    def from_options(cls, options: Sequence[str], **values: Any) -> Recipe:
        """A recipe without a file: command-line options over settings that are given by name.

        Raises:
            ValueError: as :meth:`from_yaml`.
        """
        typed, flags = read_settings(None, list(options), hints(), OombConfig)
        values |= typed
        recipe = cls(**values)
        recipe.flags, recipe.given = flags, frozenset(values)
        return recipe

    @property
    def adapters(self) -> Adapters:
        """What an estimate has to know of them beside their rank."""
        wanted = self.lora_target_modules
        return Adapters(
            plain=not self.lora_dropout and not self.use_dora,
            targets="all-linear" if isinstance(wanted, str) else tuple(wanted),
            whole=tuple(self.lora_modules_to_save or ()),
        )

    def oomb_sources(self) -> tuple[Source, ...]:
        """What this recipe says about the chunk recurrence, to be held against what others say."""
        given = {name: getattr(self.oomb, name) for name in sorted(self.oomb.given)}
        flags = {name: value for name, value in given.items() if f"oomb.{name}" in self.flags}
        written = {name: value for name, value in given.items() if name not in flags}
        places = {name: f"--oomb.{name}" for name in flags}
        sources = (
            Source("the oomb block of the recipe", "yaml", written),
            Source("the command line", "flag", flags, places),
        )
        return tuple(source for source in sources if source.values)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, for yaml."""
        plain = {name: getattr(self, name) for name in hints()}
        plain["oomb"] = self.oomb.to_dict()
        return plain


_REQUIRED = {
    "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
    "data_path": "book.txt",
    "output_dir": "out",
}

_LEAST: dict[str, float] = {
    "lora_r": 0,
    "lora_alpha": 1e-6,
    "lora_dropout": 0,
    "learning_rate": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "max_steps": 1,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "seed": 0,
    "logging_steps": 1,
    "save_steps": 0,
    "save_total_limit": 1,
    "eval_last_tokens": 0,
}
"""Smallest value of each number."""
_MOST: dict[str, int] = {"seed": 2**32 - 1, "lora_r": 1 << 14}
"""Largest value, where it is another one than `_MOST_OF_ALL`."""
_MOST_OF_ALL = 10**12
_PATHS = (
    *("model_name_or_path", "data_path", "output_dir", "resume_from_checkpoint", "data_cache", "run_name"),
    *("logging_dir", "revision"),
)
"""Settings that become names of files or folders."""

_HINTS: dict[str, Setting] = {}


def hints() -> dict[str, Setting]:
    """Name and type of every setting of a recipe."""
    if not _HINTS:
        _HINTS.update(Setting.of(Recipe))
    return _HINTS


def _default_of(name: str) -> Any:
    return next(field.default for field in fields(Recipe) if field.name == name)


def _check_range(name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"{name} must be a finite number.\n  Got {name}={value}.\n  Set {name}={_default_of(name)} (the default)."
        )
    if value is not None and not value >= _LEAST[name]:
        raise ValueError(
            f"{name} is too small.\n  Got {name}={value}; the least is {_LEAST[name]}.\n"
            f"  Set {name}={_LEAST[name]} or more."
        )
    most = _MOST.get(name, _MOST_OF_ALL)
    if type(value) is int and value > most:
        raise ValueError(
            f"{name} is too large.\n  Got {name}={shown(value)}; the most is {most}.\n  Set {name}={most} or less."
        )
