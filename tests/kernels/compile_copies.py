"""Prints the PTX of the copy kernel for an H100 or H200; needs no GPU.

A script, because kernels are interpreted objects in the test process.
"""

import os
import subprocess
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oomb_kernels.copy_kernel import _BLOCK_WORDS, _NUM_WARPS, _copy_records_kernel


def copy_ptx() -> str:
    """PTX of the kernel, from a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_copies"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _compile() -> str:
    names = _copy_records_kernel.arg_names
    kinds = {"addresses": "*i64", "num_records": "i32", "record_pairs": "i32"}
    source = ASTSource(
        _copy_records_kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index("BLOCK_WORDS"),): _BLOCK_WORDS},
    )
    target = GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options={"num_warps": _NUM_WARPS}).asm["ptx"])


if __name__ == "__main__":
    print(_compile())
