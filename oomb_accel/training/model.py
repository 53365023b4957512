"""Loading a model and its tokenizer, and choosing what of it is trained."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from oomb_accel.config import unknown_key_message
from oomb_accel.hub import cached_folder, unreachable
from oomb_accel.integrations.liger import use_liger
from oomb_accel.reading import Unreadable, in_a_line, json_object, shown
from oomb_accel.spelling import called
from oomb_accel.training.recipe import Recipe

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MORE_OF_ROPE = ("mscale", "mscale_all_dim", "truncate")
"""Keys that scalings of transformers read beside those of `RopeParameters`."""
_OF_DEFAULT_ROPE = {"rope_type", "rope_theta", "partial_rotary_factor"}
_OF_FILES = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)
"""What transformers raises on files that are broken, or hold something else than it expects."""


def load_model(recipe: Recipe) -> nn.Module:
    """The model of a recipe in host memory, with its RoPE overrides; all parameters trainable.

    Raises:
        ValueError: as `load_config` and `load_weights`.
    """
    return load_weights(
        recipe.model_name_or_path,
        load_config(recipe),
        _load_dtype(recipe),
        revision=recipe.revision,
        trust_remote_code=recipe.trust_remote_code,
    )


def _is_away(name: str) -> bool:
    """Whether a model of the hub can only be one that was loaded before. Nobody asks for a folder."""
    return not Path(name).is_dir() and unreachable() is not None


def load_weights(
    name: str, config: Any, dtype: str | torch.dtype, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model with all its weights, from safetensors only.

    Raises:
        ValueError: no model folder and no model that the hub serves; weights that are broken, missing, or of another
            shape; or code that would have to run.
    """
    with _says_what_is_wrong(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # they are told below, by name
            output_loading_info=True,
            local_files_only=_is_away(name),
        )
    model, found = loaded
    if found["mismatched_keys"]:
        key, theirs, ours = min(found["mismatched_keys"])
        raise load_error(name, f"{key} has shape {list(theirs)} in its files, and {list(ours)} by its config.")
    if missing := sorted(found["missing_keys"]):
        raise load_error(name, f"Its files lack {len(missing)} weights: {', '.join(missing[:3])}.")
    assert isinstance(model, PreTrainedModel)
    return model


def load_config(recipe: Recipe) -> Any:
    """The config of the model of a recipe, with its RoPE overrides.

    Raises:
        ValueError: as `read_config`, or RoPE settings that do not fit it.
    """
    config = read_config(
        recipe.model_name_or_path, revision=recipe.revision, trust_remote_code=recipe.trust_remote_code
    )
    if recipe.rope_parameters is not None:
        override_rope(config, recipe.rope_parameters)
    return config


def read_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of a model.

    Raises:
        ValueError: no model folder and no model that the hub serves; a config that is broken or of no language model;
            or code that would have to run.
    """
    check_folder(name, revision)
    with _says_what_is_wrong(name):
        config = AutoConfig.from_pretrained(
            name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=_is_away(name),
        )
    return config


def load_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer beside the model.

    Raises:
        ValueError: there is none.
    """
    name = recipe.model_name_or_path
    check_folder(name, recipe.revision)
    with _says_what_is_wrong(name, of_tokenizer=True):
        return AutoTokenizer.from_pretrained(
            name,
            revision=recipe.revision,
            trust_remote_code=recipe.trust_remote_code,
            local_files_only=_is_away(name),
        )


def override_rope(config: Any, override: dict[str, Any]) -> None:
    """Lay a recipe's ``rope_parameters`` over those of a model's config.

    Raises:
        ValueError: the model has none, has one set per kind of layer, or refuses the result; a key is unknown or
            changes nothing.
    """
    current = getattr(config, "rope_parameters", None)
    if not current:
        raise ValueError(
            f"rope_parameters cannot be set for this model.\n  {type(config).__name__} has none.\n"
            "  Leave rope_parameters out."
        )
    if any(isinstance(value, dict) for value in current.values()):
        raise ValueError(
            f"{type(config).__name__} has RoPE settings for each kind of layer.\n"
            f"  Got kinds {', '.join(current)}.\n"
            "  Edit rope_parameters in the model's config.json instead."
        )
    known = {*RopeParameters.__annotations__, *_MORE_OF_ROPE, *current}
    for key in map(str, override):
        if key not in known:
            near = key.partition(":")[0]  # yaml takes {a:b} for a key without a value
            meant = near if near in known else None
            raise ValueError(unknown_key_message(key, sorted(known), "rope_parameters", nearest=meant))
    kind = override.get("rope_type", current.get("rope_type", "default"))
    if kind == "default" and (idle := sorted(override.keys() - _OF_DEFAULT_ROPE)):
        raise ValueError(
            "rope_parameters has settings of a scaling, and scales nothing.\n"
            f"  Got {', '.join(idle)}, and rope_type is default.\n"
            "  Example: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}"
        )
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"rope_parameters has a rope_type that transformers does not know.\n  Got {kind!r}.\n"
            f"  Use one of {', '.join(sorted({'default', *ROPE_INIT_FUNCTIONS}))}."
        )
    if kind != "default":
        # transformers fills this in from the config when it is missing; here it is written down, to be seen.
        current = {"original_max_position_embeddings": config.max_position_embeddings} | current
    config.rope_parameters = {**current, **override}
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"rope_parameters does not fit this model.\n  {in_a_line(error)}\n"
            "  Example: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}"
        ) from error


def add_adapters(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Freeze the model and put LoRA on it, as the recipe says; with ``lora_r: 0`` everything stays trainable.

    Adapters are fp32 whatever the base is (PEFT's own rule).

    Raises:
        ValueError: target modules that the model does not have.
    """
    if recipe.lora_r == 0:
        return model
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]  # PEFT only divides it
        lora_dropout=recipe.lora_dropout,
        target_modules=recipe.lora_target_modules,
        modules_to_save=recipe.lora_modules_to_save,
        use_rslora=recipe.use_rslora,
        use_dora=recipe.use_dora,
        revision=recipe.revision,
    )
    wanted = recipe.lora_target_modules
    _check_modules(model, "lora_target_modules", [] if wanted == "all-linear" else wanted, ", or to all-linear")
    _check_modules(model, "lora_modules_to_save", recipe.lora_modules_to_save or [], ", or leave it out")
    return get_peft_model(model, config)


def _check_modules(model: nn.Module, setting: str, wanted: Sequence[str], otherwise: str) -> None:
    missing = [name for name in wanted if not _has_module(model, name)]
    if missing:
        linears = {path.rsplit(".", 1)[-1] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        names = linears | {path.rsplit(".", 1)[-1] for path, _ in model.named_modules()}
        near = difflib.get_close_matches(missing[0][:100], sorted(names), n=1)
        remedy = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"The model has no module called {missing[0]!r}.\n"
            f"  Its linear layers are {', '.join(sorted(linears))}.\n"
            f"  {remedy}Set {setting} to modules of the model{otherwise}."
        )


def apply_liger(model: nn.Module, recipe: Recipe, device: torch.device) -> bool:
    """Use Liger's kernels for norms, RoPE and MLP (not for the loss, which is chunked here).

    Returns: whether they are used.

    Raises:
        ValueError: the recipe demands them and they cannot run.
    """
    if recipe.use_liger is False:
        return False
    obstacle = use_liger(model, device, fused_loss=False)
    if obstacle is not None and recipe.use_liger is True:
        raise ValueError(f"use_liger is on, but Liger cannot run here.\n  {obstacle}\n  Set use_liger: auto.")
    return obstacle is None


def _load_dtype(recipe: Recipe) -> str | torch.dtype:
    if recipe.torch_dtype != "auto":
        return getattr(torch, recipe.torch_dtype)
    # AdamW's steps are smaller than the spacing of bf16 weights: full fine-tuning needs fp32 ones.
    return "auto" if recipe.lora_r > 0 else torch.float32


def load_error(name: str, reason: object) -> ValueError:
    """The error for a model that cannot be loaded."""
    return ValueError(
        f"The model {shown(name)} cannot be loaded.\n  {in_a_line(reason)}\n"
        f"  Set {called('model_name_or_path')} to a folder with config.json and weights as .safetensors, "
        "or to a hub id that is reachable from here."
    )


def _broken_file(name: str) -> Path | None:
    """A file of weights in a model's folder that cannot be opened."""
    for path in sorted(Path(name).glob("*.safetensors")):
        try:
            safe_open(path, framework="pt").keys()
        except SafetensorError:
            return path
    return None


@contextmanager
def _says_what_is_wrong(name: str, *, of_tokenizer: bool = False) -> Iterator[None]:
    """Around a call that reads what a user has as a model: whatever it raises is about that."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _OF_FILES as error:
        if "trust_remote_code" in str(error):
            switch = called("trust_remote_code")
            change = f"add {switch}" if switch.startswith("--") else f"set {switch}: true"
            raise ValueError(
                f"{shown(name)} comes with Python code that would have to run here.\n"
                "  No code of a model or tokenizer runs unless you say so.\n"
                f"  Read that code, and if you trust it {change}; or use a model without any."
            ) from error
        if of_tokenizer and Path(name).is_dir():
            raise ValueError(
                f"The tokenizer of {shown(name)} cannot be loaded.\n  {in_a_line(error)}\n"
                "  Save it beside the model, with tokenizer.save_pretrained(folder)."
            ) from error
        broken = _broken_file(name) if isinstance(error, SafetensorError) else None
        if isinstance(error, OSError) and not Path(name).exists():
            raise load_error(name, _neither_here_nor_there(name, error)) from error
        raise load_error(name, error if broken is None else f"{broken}: {error}; copy it again") from error


def _neither_here_nor_there(name: str, error: OSError) -> str:
    """That a name is no folder, with one that is called like it, and what the hub said."""
    if away := unreachable():
        return f"{_no_folder(name)}, and the hub was not reached: {away}; it is not in the cache of this machine either"
    reached = "was not reached" if "connect" in str(error) else "did not give it"
    return f"{_no_folder(name)}, and the hub {reached}: {in_a_line(error)}"


def _no_folder(name: str) -> str:
    parent = Path(name).parent
    folders = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(Path(name).name[:100], folders, n=1, cutoff=0.5)
    meant = f" (did you mean {str(parent / near[0])!r}?)" if near else ""
    return f"There is no folder {name!r} in {os.getcwd()}{meant}"


def check_folder(name: str, revision: str | None = None) -> None:
    """Say at once what is wrong with a local path, before the hub is asked for it.

    Args:
        revision: of a model of the hub; a folder has none.
    """
    path = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    if looks_local and not (path / "config.json").is_file():
        state = "has no config.json" if path.is_dir() else "is not a folder"
        raise ValueError(
            f"The model {name!r} cannot be loaded.\n  {path.absolute()} {state}.\n"
            f"  Set {called('model_name_or_path')} to a model folder or a hub id; "
            "launch/prepare_demo.py makes a small model."
        )
    if looks_local and revision is not None:
        raise ValueError(
            f"A folder has no revisions.\n  Got revision={revision!r} with the model in {name!r}.\n"
            f"  Leave revision out, or set {called('model_name_or_path')} to a hub id."
        )
    if looks_local:
        _check_sizes(name, path / "config.json")
    elif not _HUB_ID.fullmatch(name) and not cached_folder(name).is_dir():
        raise load_error(name, f"{_no_folder(name)}, and ids of the hub are ORGANISATION/NAME, as in Qwen/Qwen2.5-7B.")


def _check_sizes(name: str, path: Path) -> None:
    """Whether a config is one at all; what is odd in it otherwise, transformers knows better."""
    try:
        fields = json_object(path)
    except Unreadable as error:
        raise load_error(name, f"{path}: {error}") from None
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        for size in _SIZES:
            value = part.get(size)
            if value is not None and not (type(value) is int and value > 0):
                raise load_error(name, f"{path} has {size}={shown(value)}.")


def _has_module(model: nn.Module, name: str) -> bool:
    return any(path == name or path.endswith(f".{name}") for path, _ in model.named_modules())
