"""What NVIDIA's assembler says of a kernel for a device that is not there."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from triton import knobs


class Resources(NamedTuple):
    """Of one thread."""

    registers: int
    spilled_bytes: int
    """Stored because registers have no room."""


def resources(ptx: str, arch: int) -> Resources:
    """What a kernel takes.

    Args:
        arch: compute capability times ten.
    """
    assembler = knobs.nvidia.ptxas if arch < 100 else knobs.nvidia.ptxas_blackwell
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [assembler.path, "-v", f"--gpu-name=sm_{arch}{'a' * (arch >= 90)}", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None and spilled is not None, said
    return Resources(int(registers[1]), int(spilled[1]))


def need_ptxas() -> None:
    """Skip where nothing can be compiled without a GPU."""
    try:
        # Both are looked up: Triton takes the second one from sm_100 on.
        assert knobs.nvidia.ptxas.path and knobs.nvidia.ptxas_blackwell.path
    except RuntimeError as error:
        pytest.skip(f"compiling without a GPU needs ptxas of Triton's wheel: {error}")
