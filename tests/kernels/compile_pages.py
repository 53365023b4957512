"""Compiles the page kernels for devices that are not there, and says how much shared memory they take, and what they
spill.

A script, because kernels are interpreted objects in the test process: JSON of `Build` fields comes in by standard
input, pairs of bytes go out.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oomb_kernels import page_dkv, page_dq, page_forward
from oomb_kernels.page_tiles import Kernel, Tiles
from tests.kernels.ptxas import resources

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_FUNCTIONS: dict[Kernel, Any] = {
    "forward": page_forward._page_forward_kernel,
    "backward_q": page_dq._page_dq_kernel,
    "backward_kv": page_dkv._page_owner_kernel,
    "backward_sum": page_dq._page_dq_sum_kernel,
}
_LIKE_Q = {"q", "out", "dout", "dq", "other_out", "other_dq"}
_TILES = {"records", "ds_tiles", "dout_rows", "q_rows"}
_FP32 = {"lse", "stats", "other_lse", "partials", "scales"}
_INT32 = {"slots", "counts", "grad_slots", "block_counts", "units", "ends", "next_piece", "visits"}
_SCALARS = {"scale": "fp32", "factor": "fp32", "cap": "fp32", "seed": "i64"}


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel for one device and one kind of call."""

    kernel: Kernel
    arch: int
    """Compute capability times ten."""
    dtype: str
    """Of q, as Triton writes it."""
    head_dim: int
    page_tokens: int
    block_tokens: int
    tiles: Tiles
    group: int = 4
    others: bool = True
    softcap: bool = False
    stochastic: bool = False
    float8: bool = False
    """Pages in e4m3; otherwise they are as q."""


class Taken(NamedTuple):
    """Bytes."""

    shared: int
    """Of shared memory, by a program."""
    spilled: int
    """Stored by a thread whose registers have no room."""


def taken_by(builds: Sequence[Build]) -> list[Taken]:
    """What each build takes, from a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_pages"]
    text = json.dumps([asdict(build) for build in builds])
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Taken(*sizes) for sizes in json.loads(done.stdout)]


def _compile(build: Build) -> Taken:
    function = _FUNCTIONS[build.kernel]
    constants = {name: value for name, value in _constants(build).items() if name in function.arg_names}
    signature = {name: "constexpr" if name in constants else _type(name, build) for name in function.arg_names}
    # As a launch finds them: addresses and strides of whole rows are multiples of 16.
    divisible = [
        name for name, kind in signature.items() if kind[0] == "*" or ("_stride_" in name and "lse" not in name)
    ]
    source = ASTSource(
        function,
        signature,
        {(function.arg_names.index(name),): value for name, value in constants.items()},
        {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": build.tiles.num_warps, "num_stages": build.tiles.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", build.arch, 32), options=options)
    return Taken(int(compiled.metadata.shared), resources(compiled.asm["ptx"], build.arch).spilled_bytes)


def _constants(build: Build) -> dict[str, Any]:
    return {
        "GROUP": build.group,
        "Q_BLOCK": build.block_tokens,
        "OTHERS": build.others,
        "LIMIT": 2.0**15 if build.dtype == "fp16" else 2.0**100,
        "SCALED": build.float8,
        "SOFTCAP": build.softcap,
        "KEEP": True,
        "HEADS": min(build.tiles.num_heads, build.group),
        "STOCHASTIC": build.stochastic,
        "P": build.page_tokens,
        "D": build.head_dim,
        "BLOCK_M": build.tiles.block_m,
        "BLOCK_N": build.tiles.block_n,
        "BLOCK_D": triton.next_power_of_2(build.head_dim),
        "UP": False,
        "TMA": build.arch >= 90,
        "PRECISION": "ieee" if build.dtype == "fp32" else "tf32",
    }


def _type(name: str, build: Build) -> str:
    block_d = triton.next_power_of_2(build.head_dim)
    if build.arch < 90 and name in _TILES:
        return "*fp8e4nv" if build.float8 and name == "records" else "*" + build.dtype
    if name == "records":
        stored = "fp8e4nv" if build.float8 else build.dtype
        return f"tensordesc<{stored}[{build.tiles.block_n}, {block_d}]>"
    if name == "ds_tiles":
        return f"tensordesc<{build.dtype}[{build.tiles.block_n}, {build.tiles.block_m}]>"
    if name in ("dout_rows", "q_rows"):
        return f"tensordesc<{build.dtype}[1, {build.tiles.block_m}, {block_d}]>"
    if name in _LIKE_Q:
        return "*" + build.dtype
    if name in _FP32:
        return "*fp32"
    if name in _INT32:
        return "*i32"
    if name == "grad_pool":
        return "*bf16" if build.stochastic else "*fp32"
    assert (
        name in _SCALARS or "_stride_" in name or name.startswith(("num_", "list_", "max_", "first_", "end_", "room"))
    ), name
    return _SCALARS.get(name, "i32")


if __name__ == "__main__":
    requests = [Build(**fields | {"tiles": Tiles(**fields["tiles"])}) for fields in json.load(sys.stdin)]
    json.dump([_compile(request) for request in requests], sys.stdout)
