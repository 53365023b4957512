"""``oomb env [--json]``: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomb_accel.host import host_limits
from oomb_accel.progress import GIB
from oomb_accel.reading import shown

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "trl",
    "liger-kernel",
    "oomb-accel",
)
USAGE = "usage: oomb env [--json]"


def main(arguments: Sequence[str]) -> int:
    """Print the environment as text, or with ``--json`` as one JSON object."""
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if list(arguments) not in ([], ["--json"]):
        raise ValueError(
            f"oomb env takes no such words.\n  Got {shown(' '.join(arguments))}.\n  Use oomb env, or oomb env --json."
        )
    report = collect()
    if arguments:
        print(json.dumps(report, indent=2))
    else:
        for section, values in report.items():
            print(f"{section}:")
            for key, value in values.items():
                print(f"  {key}: {_show(value)}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """The report by section. Sizes in GiB; what is not there, or not limited, is None."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "install": {"kind": _install_kind(), "platform": platform.platform()},
        "host": _host(),
        "devices": _devices(),
        "attention backends": _backends(),
    }


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_show(part)}" for name, part in value.items())
    return str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install_kind() -> str:
    """``editable``, ``installed``, or ``source tree`` when it is imported without being installed."""
    try:
        distribution = importlib.metadata.distribution("oomb-accel")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return "editable" if origin.get("dir_info", {}).get("editable") else "installed"


def _host() -> dict[str, Any]:
    memory = host_limits()
    shared = Path("/dev/shm")
    return {
        "cpus": os.cpu_count(),
        "usable cpus": len(os.sched_getaffinity(0)),
        "ram total GiB": _gib(memory.total_bytes),
        "ram available GiB": _gib(memory.available_bytes),
        "cgroup limit GiB": None if memory.limit_bytes is None else _gib(memory.limit_bytes),
        "memlock limit GiB": None if memory.memlock_bytes is None else _gib(memory.memlock_bytes),
        "/dev/shm GiB": _gib(shutil.disk_usage(shared).total) if shared.is_dir() else None,
    }


def _devices() -> dict[str, Any]:
    import torch

    devices: dict[str, Any] = {"cuda of torch": torch.version.cuda, "driver": _driver()}
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices[f"cuda:{index}"] = (
            f"{found.name}, capability {found.major}.{found.minor}, {_gib(free)} of {_gib(total)} GiB free"
        )
    return devices


def _driver() -> str | None:
    """Version of the NVIDIA driver, which torch does not tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.split()), None)


def _backends() -> dict[str, Any]:
    import torch

    names = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    try:
        from oomb_kernels import available_backends
    except ImportError as error:  # a report on a broken installation is when it is needed most
        return dict.fromkeys(names, f"not importable: {error}")
    found = {name: available_backends(torch.device(name)) for name in names}
    return {name: {backend: refusal or "yes" for backend, refusal in of.items()} for name, of in found.items()}


def _gib(size: int) -> float:
    return round(size / GIB, 2)
