"""Where the sizes of a model are read from: a config.json, a folder, the hub or its cache, a config object."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oomb_accel.hub import cached_folder, unreachable
from oomb_accel.plan.known import KNOWN, known_name
from oomb_accel.plan.shape import ModelShape, shape_of
from oomb_accel.reading import kind_of

_MAIN = "main"


def read_shape(
    source: Any, rope_parameters: Mapping[str, Any] | None = None, *, revision: str | None = None
) -> ModelShape:
    """The sizes of a model.

    Args:
        source: a config.json, a folder with one, a hub id, the name of a known model, a mapping with the fields of a
            config, or a config object of transformers. A hub id is looked for in the cache of this machine first, then
            among the known models, then on the hub.
        rope_parameters: over those of its config.
        revision: branch, tag or commit of a model of the hub; nothing is known of others than main.

    Raises:
        ValueError: there is no such model, a folder has a revision, or its config does not say how large it is.
    """
    fields, name = _fields_of(source, revision)
    return shape_of(fields, name, rope_parameters)


def _fields_of(source: Any, revision: str | None) -> tuple[Mapping[str, Any], str]:
    """The fields of a model's config, and what it is called."""
    if hasattr(source, "to_dict"):
        source = source.to_dict()
    if isinstance(source, Mapping):
        return source, str(source.get("_name_or_path") or source.get("model_type") or "this model")
    name = str(source)
    path = Path(name).expanduser()
    if revision is not None and path.exists():
        raise ValueError(
            f"A folder has no revisions.\n  Got revision={revision!r} with the model in {name!r}.\n"
            "  Leave revision out, or name the model by its hub id."
        )
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{name} is no model folder.\n  It has no config.json.\n  Pass a model's folder or hub id."
            )
    if path.is_file():
        return _fields(path), name
    if path.suffix == ".json" or name.startswith((".", "/", "~")):
        raise ValueError(
            f"There is no file {name}.\n  Looked in {os.getcwd()}.\n"
            "  Pass a config.json, a model's folder, or a hub id such as Qwen/Qwen2.5-7B."
        )
    revision = revision or _MAIN
    cached = _cached(name, revision)
    if cached is not None:
        return _fields(cached), name
    if revision == _MAIN and known_name(name) in KNOWN:
        return KNOWN[known_name(name)], name
    return _fields(_from_hub(name, revision)), name


def _fields(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON.\n  {error}.\n  Pass the config.json of a model.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no config.\n  It holds {kind_of(fields)}.\n  Pass a model's config.json.")
    return fields


def _cached(name: str, revision: str) -> Path | None:
    """The config of a model that was loaded on this machine before."""
    folder = cached_folder(name)
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    path = folder / "snapshots" / commit / "config.json"
    return path if path.is_file() else None


def _from_hub(name: str, revision: str) -> Path:
    if name.count("/") != 1:
        reason = "the hub has models as ORGANISATION/NAME"
    elif away := unreachable():
        reason = f"the hub was not reached: {away}"
    else:
        try:
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(name, "config.json", revision=revision, etag_timeout=10))
        except Exception as error:  # whatever network, hub and its client raise: the remedy is the same
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    if revision != _MAIN:
        raise ValueError(
            f"The model {name!r} was not found in revision {revision!r}.\n  It is not in the cache of this machine; "
            f"{reason}.\n  Load it once where the hub is reached, or leave revision out."
        )
    near = difflib.get_close_matches(known_name(name), KNOWN, n=1, cutoff=0.5)
    remedy = f"Did you mean {near[0]}?" if near else f"Known without download: {', '.join(KNOWN)}."
    raise ValueError(f"The model {name!r} was not found.\n  No such folder here; {reason}.\n  {remedy}")
