"""GPUs by name: memory and peak rates, from the makers' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oomb_accel.config import unknown_message
from oomb_accel.plan.sizes import GIB
from oomb_accel.reading import shown


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the estimates know of a GPU."""

    name: str
    memory_bytes: int
    """As the driver reports it."""
    flops_per_second: float
    """Peak of dense bf16 matrix products summed in fp32."""
    memory_bytes_per_second: float
    host_bytes_per_second: float
    """Reached in one direction over PCIe, from and to pinned memory."""
    link_bytes_per_second: float
    """Reached in a gather between GPUs of one host."""
    compute_capability: tuple[int, int]


def _gpu(
    name: str,
    gib: float,
    tflops: float,
    memory_tb: float,
    host_gb: float,
    link_gib: float,
    capability: tuple[int, int],
) -> Gpu:
    rates = tflops * 1e12, memory_tb * 1e12, host_gb * 1e9, link_gib * GIB
    return Gpu(name, int(gib * GIB), *rates, compute_capability=capability)


H200 = _gpu("H200", 139.8, 989, 4.8, 50, 200, (9, 0))
"""Host and link rates were measured on this one (docs/benchmarks.md, notes on transfers in benchmarks/copies.py); those
of other PCIe 5 devices are the same, of PCIe 4 devices in proportion."""

GPUS = {
    "h200": H200,
    "h100": _gpu("H100 80 GB", 79.1, 989, 3.35, 50, 200, (9, 0)),
    "a100": _gpu("A100 80 GB", 79.2, 312, 2.04, 22, 130, (8, 0)),
    "b200": _gpu("B200", 178.4, 2250, 8.0, 50, 400, (10, 0)),
    "l40s": _gpu("L40S", 44.4, 362, 0.864, 22, 20, (8, 9)),
    "rtx4090": _gpu("RTX 4090", 23.5, 165, 1.008, 22, 18, (8, 9)),
    "rtx3090": _gpu("RTX 3090", 23.6, 71, 0.936, 22, 18, (8, 6)),
}


_GIB_OF_GB = 0.98
"""What a driver leaves of the size in a GPU's name, at least."""
_SOME_GIB = 48
"""For an example."""


def gpu_named(name: str) -> Gpu:
    """The GPU that a user means, such as ``H100``, ``rtx 4090`` or what ``nvidia-smi`` prints.

    Raises:
        ValueError: it is not in the table.
    """
    key = re.sub(r"[\s_-]+", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
    if key[:4] in ("h100", "a100", "h200", "b200"):
        key = re.sub(r"(sxm\d?|hbm3)", "", key)
    key = key.removesuffix("80gb").removesuffix("80") if key[:4] in ("h100", "a100") else key
    for known in (key, f"rtx{key}"):
        if known in GPUS:
            return GPUS[known]
    size = re.search(r"(?<!\d)(\d{1,3})\s?gb", name.lower())
    gib = int(int(size[1]) * _GIB_OF_GB) if size else _SOME_GIB
    same = GPUS["a100"] if key == "a10040gb" else gpu_of_device(name)
    if same is not None and abs(gib * GIB - same.memory_bytes) < 2 * GIB:
        return same
    if same is not None:
        short = next(known for known, gpu in GPUS.items() if gpu is same)
        raise ValueError(
            f"Unknown GPU {shown(name)} in --gpu.\n  It has the rates of the {same.name}, but other memory.\n"
            f"  oomb estimate takes --gpu {short} --gpu_gib {gib} for it."
        )
    near = next((known for known in GPUS if key.startswith(known)), None)
    what, _, remedy = unknown_message("GPU", name, list(GPUS), "in --gpu", nearest=near).splitlines()
    raise ValueError(
        f"{what}\n{remedy}\n  For another one oomb estimate takes --gpu_gib {gib} --tflops 300, from its data sheet."
    )


_SAME_CHIP = {
    "h200": ("h200",),
    "h100": ("h100 80gb hbm3", "h100 sxm5 80gb"),
    "a100": ("a100-sxm4-80gb", "a100-sxm4-40gb", "a100 80gb pcie", "a100-pcie-40gb"),
    "b200": ("b200",),
    "l40s": ("l40s",),
    "rtx4090": ("geforce rtx 4090",),
    "rtx3090": ("geforce rtx 3090",),
}
"""Names that drivers give to GPUs with these peak rates. Not those of variants with others (H100 PCIe, H200 NVL)."""


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU of which the driver speaks, as in ``torch.cuda.get_device_name()``; None where it is not in the table."""
    name = device_name.lower().removeprefix("nvidia ").strip()
    return next((GPUS[key] for key, names in _SAME_CHIP.items() if name in names), None)


def other_gpu(gib: float, tflops: float | None, base: Gpu) -> Gpu:
    """A GPU that is not in the table; what is not given is as in ``base``."""
    flops = base.flops_per_second if tflops is None else tflops * 1e12
    scale = flops / base.flops_per_second
    return Gpu(
        f"GPU with {gib:.4g} GiB and {flops / 1e12:.4g} TFLOP/s",
        int(gib * GIB),
        flops,
        base.memory_bytes_per_second * scale,
        base.host_bytes_per_second,
        base.link_bytes_per_second,
        base.compute_capability,
    )
