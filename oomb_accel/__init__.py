"""Training of transformers language models on very long documents, in memory that does not grow with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomb_accel import deepspeed
    from oomb_accel.config import OombConfig
    from oomb_accel.integrations.banner import banner
    from oomb_accel.integrations.callback import OombCallback
    from oomb_accel.integrations.memory_watch import watch_memory
    from oomb_accel.integrations.plugin import OombPlugin
    from oomb_accel.integrations.prepare import prepare
    from oomb_accel.integrations.stream import count_targets
    from oomb_accel.integrations.transformers import disable, enable
    from oomb_accel.memory_report import MemoryReport
    from oomb_accel.sampler import LengthBalancedSampler

__version__ = "0.1.0"

__all__ = [
    "LengthBalancedSampler",
    "MemoryReport",
    "OombCallback",
    "OombConfig",
    "OombPlugin",
    "__version__",
    "banner",
    "count_targets",
    "deepspeed",
    "disable",
    "enable",
    "prepare",
    "watch_memory",
]

_HOMES = {
    "LengthBalancedSampler": "sampler",
    "MemoryReport": "memory_report",
    "OombCallback": "integrations.callback",
    "OombConfig": "config",
    "OombPlugin": "integrations.plugin",
    "banner": "integrations.banner",
    "count_targets": "integrations.stream",
    "disable": "integrations.transformers",
    "enable": "integrations.transformers",
    "prepare": "integrations.prepare",
    "watch_memory": "integrations.memory_watch",
}
"""Module of each name. Imported at its first use: `oomb estimate` and `oomb --help` need no torch, which takes
seconds."""


def __getattr__(name: str) -> Any:
    if name == "deepspeed":
        return importlib.import_module("oomb_accel.deepspeed")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
