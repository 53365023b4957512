"""Switching a model on with settings from several places, once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch import nn

from oomb_accel.integrations.attachment import STATE, Attachment, attachment_of
from oomb_accel.integrations.transformers import enable_resolved
from oomb_accel.progress import ChunkEvent
from oomb_accel.sources import Resolved, Source, resolve

Model = TypeVar("Model", bound=nn.Module)

_SETTLED: weakref.WeakKeyDictionary[nn.Module, Resolved] = weakref.WeakKeyDictionary()
"""Where the settings of a model came from, for a later contradiction."""


def switch_on(model: Model, resolved: Resolved, *, on_progress: Callable[[ChunkEvent], None] | None = None) -> Model:
    """Enable a model, or find it enabled with these settings.

    Several entry points may meet on one model (a plugin, a callback, ``enable`` itself): the first one switches on,
    the others check.

    Args:
        model: as for :func:`oomb_accel.enable`.
        resolved: the settings, and their places for the banner and for messages.
        on_progress: as for :func:`oomb_accel.enable`, where the model is switched on here.

    Returns: the same model.

    Raises:
        ValueError: the model is not supported, or is on already with other settings; both places are named.
    """
    state: Attachment | None = getattr(model, STATE, None)
    if state is None:
        _SETTLED.pop(model, None)  # it was switched off meanwhile
        enable_resolved(model, resolved.config, on_progress=on_progress)
        state = getattr(model, STATE, None)
    else:
        resolved = replace(_merged(model, state, resolved), notes=resolved.notes)
    if state is not None and model not in _SETTLED:  # None: enabled=False, which enable has said
        state.notes.extend(resolved.notes)
        _SETTLED[model] = resolved
    return model


def sources_of(model: nn.Module) -> tuple[Source, ...]:
    """Where the settings of a model that is switched on come from."""
    if model in _SETTLED:
        return _SETTLED[model].sources
    return (Source.of_python(attachment_of(model).config, "enable(model, ...)"),)


def _merged(model: nn.Module, state: Attachment, wanted: Resolved) -> Resolved:
    """Both together. What only one of them wrote down must have the value that the model was switched on with."""
    earlier = sources_of(model)
    both = resolve(*wanted.sources, *(source for source in earlier if source not in wanted.sources))
    now, merged = state.config.to_dict(), both.config.to_dict()
    for name in now:
        if now[name] != merged[name]:
            raise ValueError(
                "oomb_accel is already on for this model, without a setting that came later.\n"
                f"  Got {name}={now[name]!r} by default in {', '.join(source.place for source in earlier)}, "
                f"and {name}={merged[name]!r} in {both.origins[name]}.\n"
                f"  Write {name}={merged[name]!r} in the first place too, or remove it from the second."
            )
    return both
