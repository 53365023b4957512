"""What a run trains and on what, so that a checkpoint of something else is noticed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shlex
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from oomb_accel.config import SPARSE_SETTINGS, OombConfig
from oomb_accel.integrations.support import whole_numel
from oomb_accel.training.data import Document
from oomb_accel.training.recipe import Recipe

SAMPLED_PARAMETERS = 64
ADAPTER_SETTINGS = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save"),
    *("use_rslora", "use_dora"),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests of what must be the same when a run goes on."""

    model: str
    """Names and shapes of all parameters, and the values of some, as loaded."""
    adapter: str
    """What is trained: settings of the adapter, names and shapes."""
    data: str
    """All tokens and labels, in order."""

    def to_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def model_digest(model: nn.Module) -> str:
    """Digest of a model that was just loaded: names, shapes, and the values of its smallest parameters (norms and
    biases, which fine-tuning changes too) and of its smallest matrix. The same for any number of ranks."""
    parameters = sorted(model.named_parameters(), key=lambda item: (whole_numel(item[1]), item[0]))
    matrices = (item for item in parameters if len(_shape(item[1])) > 1)
    sampled = dict([*parameters[:SAMPLED_PARAMETERS], *itertools.islice(matrices, 1)])
    digest = hashlib.sha256(_layout(parameters))
    with whole(sampled.values()):
        for parameter in sampled.values():
            values = parameter.detach().to(torch.bfloat16).contiguous().cpu()  # whatever type it was loaded in
            digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def adapter_digest(model: nn.Module, recipe: Recipe) -> str:
    """Digest of what is trained."""
    settings = {name: getattr(recipe, name) for name in ADAPTER_SETTINGS}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return hashlib.sha256(repr(settings).encode() + _layout(trained)).hexdigest()


def data_digest(documents: Iterable[Document]) -> str:
    """Digest of tokens and labels."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document.input_ids).to_bytes(8, "little"))
        digest.update(document.input_ids.numpy().tobytes())
        digest.update(document.labels.numpy().tobytes())
        digest.update(repr(document.starts[1:]).encode() if len(document.starts) > 1 else b"")
    return digest.hexdigest()


def check_same_on_all_ranks(accelerator: Accelerator, identity: Identity, recipe: Recipe) -> None:
    """Ranks plan on their own, so they must agree on what there is.

    Raises:
        ValueError: ranks read different data, models or recipes.
    """
    if accelerator.num_processes == 1:
        return
    settings = {name: value for name, value in recipe.to_dict().items() if name != "output_dir"}
    ours = {**identity.to_dict(), "recipe": hashlib.sha256(repr(settings).encode()).hexdigest()}
    for what, first in ours.items():
        said = gather_object([first])
        odd = [rank for rank, value in enumerate(said) if value != said[0]]
        if odd:
            raise ValueError(
                f"The processes of this run do not have the same {what}.\n"
                f"  Process {odd[0]} differs from process 0.\n"
                "  Give every machine the same recipe, data and model files."
            )


def function_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide which function of tokens and weights a step differentiates, by the names that a user
    types. Others may change when a run goes on: they change results by rounding at most (memory, kernels, chunks of
    dense attention), or are the schedule, which is the user's to change.

    Args:
        recipe: as `Recipe.to_dict`, perhaps of an earlier version, which had fewer settings.
    """
    block = OombConfig().to_dict() | recipe["oomb"]
    plain = {"attention": "dense", "page_dtype": "model", "base_dtype": "model"}
    found = {"rope_parameters": recipe.get("rope_parameters")} | {f"oomb.{name}": plain[name] for name in plain}
    if not block["enabled"]:
        return found
    names = list(plain)
    if block["attention"] == "sparse":
        names += [*SPARSE_SETTINGS, "page_tokens"]
    return found | {f"oomb.{name}": block[name] for name in names}


def check_same_function(recipe: Recipe, checkpoint: Path, before: Mapping[str, Any]) -> None:
    """Refuse to go on with another gradient than the one that a run began with.

    Args:
        before: the checkpoint's recipe, as plain values.

    Raises:
        ValueError: with all settings that differ.
    """
    now, then = function_of(recipe.to_dict()), function_of(before)
    # With another attention, its further settings have nothing to be compared with.
    changed = [name for name in then if name in now and now[name] != then[name]]
    if not changed:
        return
    place = shlex.quote(str(checkpoint))
    anew = f"model_name_or_path: {place}"
    if before["lora_r"]:
        anew = f"oomb merge {place} --output_dir MERGED, then model_name_or_path: MERGED"
    raise ValueError(
        f"{str(checkpoint)!r} belongs to a run with another {changed[0]}, and so with other gradients.\n"
        f"  It has {_spell(changed, then)}; this run has {_spell(changed, now)}.\n"
        f"  Set {_spell(changed, then)} to go on; or begin a new run with its weights, in another output_dir: {anew}."
    )


def _spell(names: Iterable[str], values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {_yaml(values[name])}" for name in names)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("\n").removesuffix("\n...")


def whole(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
    """Inside, parameters that ZeRO 3 has in shards are whole; every rank has to enter."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(sharded)
    return context


def _layout(parameters: Iterable[tuple[str, nn.Parameter]]) -> bytes:
    return repr([(name, _shape(parameter)) for name, parameter in parameters]).encode()


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
