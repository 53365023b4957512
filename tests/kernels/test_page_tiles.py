"""Launch configurations: the measured ones where they fit, smaller ones on devices with less shared memory."""

from itertools import product
from typing import Any, get_args

import pytest
import torch
from triton.runtime import driver

from oomb_kernels.page_tiles import Kernel, Tiles, choose_tiles, shared_estimate, shared_memory_of
from tests.kernels.compile_pages import ITEMSIZE, Build, taken_by
from tests.kernels.pairwise import pairwise
from tests.kernels.ptxas import need_ptxas

# Most shared memory of one program, by compute capability: the CUDA programming guide, "Technical specifications".
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
KERNELS = get_args(Kernel)
SIZES: dict[str, Any] = {
    "head_dim": [64, 80, 96, 128, 256],
    "page_tokens": [32, 64, 128, 256],
    "block_tokens": [64, 128],
    "dtype": list(ITEMSIZE),
}
WAYS: dict[str, Any] = {
    "group": [1, 4, 7],
    "others": [True, False],
    "softcap": [False, True],
    "stochastic": [False, True],
    "float8": [False, True],
}


def chosen(
    arch: int,
    kernel: Kernel,
    *,
    head_dim: int,
    page_tokens: int,
    block_tokens: int,
    dtype: str,
    float8: bool = False,
) -> Tiles:
    return choose_tiles(kernel, head_dim, page_tokens, block_tokens, ITEMSIZE[dtype], SHARED_BYTES[arch], float8=float8)


def build_of(arch: int, kernel: Kernel, *, group: int = 4, **case: Any) -> Build:
    case["float8"] = case.get("float8", False) and arch >= 89  # older devices have no such numbers
    tiles = chosen(arch, kernel, **{name: case[name] for name in (*SIZES, "float8")})
    return Build(kernel, arch, tiles=tiles, group=group, **case)


def check_builds(builds: list[Build]) -> None:
    """Every build fits its device, and the estimate is not below what it takes."""
    need_ptxas()
    wrong = []
    for build, (size, _) in zip(builds, taken_by(builds), strict=True):
        itemsize = ITEMSIZE[build.dtype]
        estimate = shared_estimate(build.kernel, build.tiles, build.head_dim, itemsize, float8=build.float8)
        if not size <= min(SHARED_BYTES[build.arch], estimate):
            wrong.append(f"{size} bytes, estimated {estimate}, there are {SHARED_BYTES[build.arch]}: {build}")
    assert not wrong, "\n".join(wrong)


def test_measured_configurations_on_an_h200() -> None:
    """What head_dim 128 was measured with is what runs."""
    usual: dict[str, Any] = {"head_dim": 128, "page_tokens": 128, "block_tokens": 128, "dtype": "bf16"}
    assert chosen(90, "forward", **usual) == Tiles(128, 64, 4, 2)
    assert chosen(90, "backward_q", **usual) == Tiles(128, 128, 8, 2)
    assert chosen(90, "backward_kv", **usual) == Tiles(32, 64, 4, 4)
    assert chosen(90, "backward_sum", **usual) == Tiles(128, 64, 8, 4, num_heads=2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", SIZES["head_dim"])
@pytest.mark.parametrize("float8", [False, True])
def test_an_h200_runs_16_bits_as_measured(kernel: Kernel, head_dim: int, float8: bool) -> None:
    assert choose_tiles(kernel, head_dim, 128, 128, 2, SHARED_BYTES[90], float8=float8) == choose_tiles(
        kernel, head_dim, 128, 128, 2, 2**30
    )


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_chosen_tiles_fit_and_divide(arch: int, kernel: Kernel) -> None:
    for *values, float8 in product(*SIZES.values(), (False, True)):
        case: dict[str, Any] = {**dict(zip(SIZES, values, strict=True)), "float8": float8}
        tiles = chosen(arch, kernel, **case)
        estimate = shared_estimate(kernel, tiles, case["head_dim"], ITEMSIZE[case["dtype"]], float8=float8)
        assert estimate <= SHARED_BYTES[arch], case
        assert case["block_tokens"] % tiles.block_m == 0 and case["page_tokens"] % tiles.block_n == 0, case
        assert min(tiles.block_m, tiles.block_n) >= 16 and tiles.num_stages >= 1, case


def test_block_n_goes_first_then_block_m_then_copies_ahead() -> None:
    steps = [choose_tiles("forward", 128, 128, 128, 2, kib * 1024) for kib in (114, 112, 72, 52, 36, 25)]
    sizes = [(tiles.block_m, tiles.block_n, tiles.num_stages) for tiles in steps]
    assert sizes == [(128, 64, 2), (128, 32, 2), (128, 16, 2), (64, 16, 2), (32, 16, 2), (32, 16, 1)]


def test_with_the_memory_of_an_h200_stages_go_first() -> None:
    tiles = choose_tiles("forward", 256, 128, 128, 2, SHARED_BYTES[90])
    assert (tiles.block_m, tiles.block_n, tiles.num_stages) == (128, 64, 2)
    tiles = choose_tiles("forward", 512, 128, 128, 2, SHARED_BYTES[90])
    assert (tiles.block_m, tiles.block_n, tiles.num_stages) == (128, 32, 1)


def test_smallest_tiles_where_nothing_fits() -> None:
    tiles = choose_tiles("backward_q", 256, 128, 128, 4, 1024)
    assert (tiles.block_m, tiles.block_n, tiles.num_stages) == (16, 16, 1)


def test_pages_of_an_odd_multiple_of_16_tokens() -> None:
    tiles = choose_tiles("forward", 128, 48, 80, 2, SHARED_BYTES[90])
    assert (tiles.block_m, tiles.block_n) == (16, 16)


@pytest.mark.gpu
def test_limit_of_this_device() -> None:
    """The one that Triton holds a launch against."""
    expected = driver.active.utils.get_device_properties(0)["max_shared_mem"]
    assert shared_memory_of(torch.device("cuda", 0)) == expected


def test_kernels_fit_devices_with_little_shared_memory() -> None:
    """Those that do not with the configurations of an H200, and the largest of other devices."""
    usual: dict[str, Any] = {"head_dim": 128, "page_tokens": 128, "block_tokens": 128, "dtype": "bf16"}
    wide = usual | {"head_dim": 256}
    check_builds(
        [
            build_of(89, "backward_q", **usual),
            build_of(120, "backward_q", **usual),
            build_of(89, "forward", **wide),
            build_of(89, "backward_kv", **usual | {"dtype": "fp32"}),
            build_of(120, "backward_kv", **usual | {"dtype": "fp32"}, stochastic=True),
            build_of(90, "backward_q", **usual),
            build_of(80, "forward", **wide | {"dtype": "fp16"}),
            *(build_of(90, kernel, float8=True, **usual) for kernel in KERNELS),
            build_of(89, "backward_q", float8=True, **usual),
            build_of(90, "forward", float8=True, **wide),
        ]
    )


def test_registers_have_room_before_hopper() -> None:
    """Of these sizes the forward spills 72 bytes of a thread; with tiles and descriptors of an H200 all spill, up to
    15,000 bytes."""
    usual: dict[str, Any] = {"head_dim": 128, "page_tokens": 128, "block_tokens": 128, "dtype": "bf16"}
    need_ptxas()
    taken = taken_by([build_of(80, kernel, **usual) for kernel in KERNELS])
    assert max(sizes.spilled for sizes in taken) <= 128, taken


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_fit_every_device(arch: int, kernel: Kernel) -> None:
    check_builds([build_of(arch, kernel, **case) for case in pairwise(SIZES | WAYS)])
