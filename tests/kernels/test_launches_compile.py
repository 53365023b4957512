"""What is launched on a GPU compiles for it, registers have room, and lengths need no builds of their own.

Kernels of attention to pages are in `test_page_tiles`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.kernels.compile_launches import LAUNCHES, Build, builds_of
from tests.kernels.ptxas import need_ptxas

FLOAT8 = {"quantized rows", "float8 pages"}
"""Not for devices before Ada, which have no 8-bit floats."""
KERNELS = [name for name in LAUNCHES if name != "lengths"]
_MOST_SHARED_BYTES = 48 * 1024
"""What a program may take of any device without being asked."""


@pytest.fixture(autouse=True)
def needs_ptxas() -> None:
    need_ptxas()


def check(builds: Iterable[Build]) -> None:
    wrong = [str(build) for build in builds if build.spilled_bytes or build.shared_bytes > _MOST_SHARED_BYTES]
    assert not wrong, "\n".join(wrong)


def test_an_h200() -> None:
    check(builds_of(KERNELS, 90))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch in (80, 89, 90) for name in KERNELS if arch >= 89 or name not in FLOAT8]
)
def test_devices_and_sizes(arch: int, name: str) -> None:
    check(builds_of([name], arch, (64, 80, 128, 256)))


def test_lengths_need_few_builds() -> None:
    """Two where rows may begin on a border of 16 bytes or not, however many lengths come; else one."""
    counts = Counter(build.kernel for build in builds_of(["lengths"], 90))
    assert counts.pop("_move_pages_kernel") == 3  # stored, loaded, added
    assert counts and max(counts.values()) <= 2, counts
