"""The device that a command works on."""

from __future__ import annotations

import torch

from oomb_accel.reading import shown


def device_named(name: str | None) -> torch.device:
    """The device of ``--device``; the GPU where there is one, if left out.

    Raises:
        ValueError: there is no such device here.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"There is no such device.\n  Got --device {shown(name)}.\n  Use --device cpu.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"There is no CUDA device here.\n  Got --device {name}.\n  Use --device cpu.")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"This kind of device is not supported.\n  Got --device {name}.\n  Use --device cpu.")
    return device


def has_nvidia_gpu() -> bool:
    """Whether torch can use one."""
    return torch.cuda.is_available() and torch.version.hip is None


def what_torch_sees() -> str:
    """A line for messages about a GPU that is missing."""
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees {torch.cuda.device_count()} CUDA devices."
