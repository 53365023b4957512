"""``oomb estimate MODEL --length 1M`` or ``oomb estimate RECIPE.yaml``: memory, time and cost of a training step."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from oomb_accel.cli.estimate_options import SWITCH, estimate_parser
from oomb_accel.cli.estimate_origins import (
    around,
    as_of_another_gpu,
    distinct_share,
    from_around,
    where_distinct_is_from,
)
from oomb_accel.cli.estimate_tables import estimate_report
from oomb_accel.cli.options import check_recipe_is_first, is_recipe, tokens_of
from oomb_accel.config import OombConfig
from oomb_accel.plan import (
    Job,
    check_settings,
    choose,
    dtypes_of,
    estimate,
    gpu_named,
    largest_tokens,
    longest_on_this_machine,
    nearest,
    read_shape,
    settings_of,
    suggestions,
)
from oomb_accel.plan.gpus import other_gpu
from oomb_accel.plan.limits import LONGEST, check_device_pages, check_host_memory, check_tokens
from oomb_accel.plan.sizes import GIB, host_margin, with_host_margin
from oomb_accel.reading import shown
from oomb_accel.sources import gather, resolve
from oomb_accel.training import Recipe


def main(arguments: Sequence[str]) -> int:
    """Print the estimate of one step.

    Returns: 0 when it fits, 1 when not.

    Raises:
        ValueError: an unknown model, GPU or option, or a value that is not allowed.
    """
    options, config, rope = _options(arguments)
    options.distinct_run, options.distinct = distinct_share(options.distinct)
    job = _job(options, config, rope)
    _check_typed(options, _names(arguments))
    _check_machine(job)
    check_settings(job)
    job, reasons = _chosen(job, options)
    around_it = from_around(config, _names(arguments))
    reasons = (*around_it, *where_distinct_is_from(options), *as_of_another_gpu(options, job), *reasons)
    found = estimate(job)
    changes = [] if found.fits else suggestions(job)
    longest = largest_tokens(job)
    stays = any(not change.other_machine for change in changes)
    changed = None if found.fits or stays else longest_on_this_machine(job)
    near = "" if found.fits or changes else nearest(job)
    if options.json:
        report: dict[str, Any] = found.as_dict() | {"largest_tokens": longest}
        if options.price is not None:
            cost = found.cost_per_million_tokens(options.price) if found.fits else None
            report["cost_per_million_tokens"] = cost
        report["chosen"] = reasons
        report["suggestions"] = [{"change": s.change} | s.estimate.as_dict() for s in changes]
        if changed is not None:
            report["largest_tokens_changed"] = {"change": changed.change, "tokens": changed.estimate.job.tokens}
        if near:
            report["nearest"] = near
        print(json.dumps(report, indent=2))
    else:
        print(estimate_report(found, longest, changes, options.price, reasons, changed, near))
    return 0 if found.fits else 1


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, OombConfig, dict[str, Any] | None]:
    """The options, those of a recipe or the environment over the defaults and those of the command line over all; the
    settings of the recurrence, of which some are no options here; and the recipe's ``rope_parameters``.

    Raises:
        ValueError: as reading a recipe, or a recipe without a length.
    """
    parser = estimate_parser(_defaults(OombConfig()))
    path = arguments[0] if arguments and is_recipe(arguments[0]) else None
    if path is None:
        check_recipe_is_first("oomb estimate", arguments)
        config = _enabled(resolve(*gather()).config)
        parser.set_defaults(**_defaults(config))
        return parser.parse_args(arguments), config, None
    _, others = parser.parse_some(arguments)
    unused = [f"--{name}=unused" for name in ("data_path", "output_dir") if name not in _names(others)]
    recipe = Recipe.from_yaml(path, [*others, *unused])
    config = _enabled(resolve(*gather(None, *recipe.oomb_sources())).config)
    # As oomb train --dry_run: the documents of a micro-batch count as one.
    tokens = None if recipe.max_length is None else recipe.max_length * recipe.per_device_train_batch_size
    parser.set_defaults(
        length=None if tokens is None else str(tokens),
        lora_r=recipe.lora_r,
        adapters=recipe.adapters,
        revision=recipe.revision,
        torch_dtype=recipe.torch_dtype,
        mixed_precision=recipe.mixed_precision,
        **_defaults(config),
    )
    options, _ = parser.parse_some(arguments)
    if options.length is None:
        raise ValueError(
            f"The recipe does not say how long documents are.\n  max_length is not set in {path}.\n"
            f"  Add --length 128K; or let oomb train {shlex.quote(path)} --dry_run read the data."
        )
    _check_both(options, recipe, _defaults(config), _names(arguments))
    options.model = recipe.model_name_or_path
    return options, config, recipe.rope_parameters


def _enabled(config: OombConfig) -> OombConfig:
    """Refuse settings that switch chunk recurrence off."""
    if not config.enabled:
        place = around().get("enabled")
        remedy = "Add --oomb.enabled true" if place is None else f"Take it out of {place}"
        raise ValueError(
            f"There are no chunks to estimate.\n  Got oomb.enabled=false.\n  {remedy} to see what they take."
        )
    return config


def _check_both(options: argparse.Namespace, recipe: Recipe, of_recipe: Mapping[str, Any], typed: set[str]) -> None:
    """Refuse what was typed under two names with different values: neither may win unseen.

    Args:
        of_recipe: settings by the names of options, those typed as a recipe's among them.
    """
    batch = recipe.per_device_train_batch_size
    if {"length", "max_length"} <= typed and recipe.max_length is not None:
        tokens = recipe.max_length * batch
        if tokens_of(options.length) != tokens:
            documents = f" with {batch} documents in a batch" if batch > 1 else ""
            raise ValueError(
                "Two options say how long documents are.\n"
                f"  Got --length {options.length}, and --max_length {recipe.max_length:,}{documents}.\n"
                f"  Keep one of them: --length counts all documents of a batch, here {tokens}."
            )
    for name, value in of_recipe.items():
        asked = getattr(options, name)
        if name == "chunk_tokens":
            asked = str(tokens_of(asked) or asked)
        if {name, f"oomb.{name}"} <= typed and asked != value:
            flag = f"--{name}"
            raise ValueError(
                f"{flag} stands twice on the command line.\n  Got {flag} {asked} and --oomb.{name} {value}.\n"
                "  Keep one of them."
            )


def _names(arguments: Sequence[str]) -> set[str]:
    """Of the options that were typed."""
    return {part.partition("=")[0][2:].replace("-", "_") for part in arguments if part.startswith("--")}


def _check_typed(options: argparse.Namespace, typed: set[str]) -> None:
    """Refuse options that others leave without a meaning."""
    if options.full and "lora_r" in typed and options.lora_r:
        raise ValueError(
            "Either all weights are trained, or adapters.\n"
            f"  Got --full with --lora_r {options.lora_r}.\n  Leave one of them out."
        )
    for name in ("top_k", "page_budget", "distinct"):
        if options.attention == "dense" and name in typed:
            raise ValueError(
                f"--{name} has no meaning with dense attention.\n"
                f"  Got --{name} {getattr(options, name)} with --attention dense.\n"
                f"  Use --attention sparse, or leave --{name} out."
            )
    OombConfig(  # refuses what contradicts each other
        keep_outputs=SWITCH[options.keep_outputs],
        offload=SWITCH[options.offload],
        device_pages_gib=options.device_pages_gib or "auto",
        host_memory_gib=options.host_memory_gib or "auto",
    )


def _check_machine(job: Job) -> None:
    """Refuse sizes that the machine does not have."""
    asked = job.device_pages_bytes or 0
    larger = f"set --gpu_gib {-(-asked // GIB)} or more where the GPU has it"
    check_device_pages(asked, job.gpu.name, job.gpu.memory_bytes, other=larger)
    asked = job.host_memory_bytes or 0
    check_host_memory(
        asked,
        available_bytes=job.host_bytes,
        margin_bytes=host_margin(job.host_bytes),
        ranks_on_host=job.num_gpus,
        scarce=f"the machine has {job.host_bytes / GIB:g} GiB",
        other=f"set --host_gib {-(-with_host_margin(asked * job.num_gpus) // GIB)} or more where the machine has it",
    )


def _defaults(config: OombConfig) -> dict[str, Any]:
    """Settings as the defaults of the options of the same names."""
    words = {value: word for word, value in SWITCH.items()}
    same = ("attention", "top_k", "page_budget", "page_tokens", "page_dtype", "page_grad_dtype", "base_dtype")
    return {name: getattr(config, name) for name in same} | {
        "chunk_tokens": str(config.chunk_tokens),
        "keep_outputs": words[config.keep_outputs],
        "offload": words[config.offload],
        "device_pages_gib": None if config.device_pages_gib == "auto" else config.device_pages_gib,
        "host_memory_gib": None if config.host_memory_gib == "auto" else config.host_memory_gib,
    }


def _chosen(job: Job, options: argparse.Namespace) -> tuple[Job, tuple[str, ...]]:
    """The job with what is "auto", and why."""
    auto = {name: getattr(options, name) == "auto" for name in ("chunk_tokens", "page_grad_dtype")}
    if not any(auto.values()):
        return job, ()
    choice = choose(job, **auto)
    chosen = replace(job, chunk_tokens=choice.chunk_tokens, page_grad_dtype=choice.page_grad_dtype)
    return chosen, choice.reasons


def token_count(text: str, name: str = "--length") -> int:
    """``131072``, ``131,072``, ``128K`` or ``1.5M`` as a number; K and M are 1,024 and 1,048,576.

    Raises:
        ValueError: something else, less than two, or more of them than chunks are counted for.
    """
    return check_tokens(name, tokens_of(text), text)


def _job(options: argparse.Namespace, config: OombConfig, rope_parameters: dict[str, Any] | None) -> Job:
    model = read_shape(options.model, rope_parameters, revision=options.revision)
    gpu = gpu_named(options.gpu)
    if options.gpu_gib is not None or options.tflops is not None:
        gpu = other_gpu(options.gpu_gib or gpu.memory_bytes / GIB, options.tflops, gpu)
    chunk_tokens = 8192 if options.chunk_tokens == "auto" else token_count(options.chunk_tokens, "--chunk_tokens")
    _check_range(options, chunk_tokens)
    lora_r = 0 if options.full else options.lora_r
    zero_stage = options.zero or None
    asked = {
        "attention": options.attention,
        "top_k": options.top_k,
        "page_budget": options.page_budget,
        "chunk_tokens": chunk_tokens,
        "page_tokens": options.page_tokens,
        "page_dtype": options.page_dtype,
        "base_dtype": options.base_dtype,
        "page_grad_dtype": "float32" if options.page_grad_dtype == "auto" else options.page_grad_dtype,
        "keep_outputs": SWITCH[options.keep_outputs],
        "offload": SWITCH[options.offload],
        "device_pages_bytes": None if options.device_pages_gib is None else int(options.device_pages_gib * GIB),
        "host_memory_bytes": None if options.host_memory_gib is None else int(options.host_memory_gib * GIB),
    }
    dtypes = dtypes_of(
        options.torch_dtype,
        lora_r=lora_r,
        zero_stage=zero_stage,
        mixed_precision=options.mixed_precision,
        stored_dtype=model.stored_dtype,
    )
    return Job(
        model=model,
        tokens=token_count(options.length),
        lora_r=lora_r,
        adapters=options.adapters,
        distinct=options.distinct,
        gpu=gpu,
        num_gpus=options.gpus,
        zero_stage=zero_stage,
        zero_offload=options.optimizer_offload,
        host_bytes=int(options.host_gib * GIB),
        **dtypes,
        **settings_of(config) | asked,
    )


def _check_range(options: argparse.Namespace, chunk_tokens: int) -> None:
    least = {"top_k": 1, "page_tokens": 1, "gpus": 1, "lora_r": 0, "host_gib": 0.0, "distinct": 0.0}
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise ValueError(f"--{name} is too small.\n  Got {value}.\n  Use {smallest} or more.")
        if isinstance(value, int) and value > LONGEST:
            raise ValueError(f"--{name} is too large.\n  Got {shown(value)}.\n  Use {LONGEST:,} or less.")
    if chunk_tokens < options.page_tokens:
        raise ValueError(
            "A chunk must hold at least one page.\n"
            f"  Got --chunk_tokens {chunk_tokens} with --page_tokens {options.page_tokens}.\n"
            f"  Use --chunk_tokens {options.page_tokens} or more."
        )
    if options.optimizer_offload and not options.zero:
        raise ValueError(
            "The optimizer goes to the host under DeepSpeed only.\n"
            f"  Got --optimizer_offload with --zero {options.zero}.\n  Use --zero 2 --optimizer_offload."
        )
    if options.distinct is not None and not options.distinct <= 1:
        raise ValueError(f"--distinct is a share.\n  Got {options.distinct}.\n  Use 0.25, for example.")
    if options.page_budget is not None and options.page_budget < options.top_k:
        raise ValueError(
            "The pages that one block selects must fit the budget of its chunk.\n"
            f"  Got --page_budget {options.page_budget} with --top_k {options.top_k}.\n"
            f"  Use --page_budget {options.top_k} or more."
        )
