"""Fine-tuning from a recipe: flat settings, one loop on Accelerate, an adapter that plain PEFT loads."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oomb_accel.training.recipe import Recipe

if TYPE_CHECKING:
    from oomb_accel.training.loop import Summary, train

__all__ = ["Recipe", "Summary", "train"]


def __getattr__(name: str) -> Any:
    """The loop comes with torch and transformers, which a recipe can be read and estimated without."""
    if name not in ("Summary", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.loop"), name)
    return value
