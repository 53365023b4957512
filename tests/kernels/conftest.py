"""Set-up of the kernel tests: without a CUDA device Triton kernels run in the interpreter, on CPU tensors."""

import os
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it has to be set before oomb_kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """`torch.empty` returns NaN, so that reading memory nobody wrote fails a test. Not in GPU tests: it would
    change which algorithms they run."""
    if request.node.get_closest_marker("gpu") is not None:
        yield
        return
    memory = cast(Any, torch.utils.deterministic)
    was_enabled, was_filling = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = True
    yield
    memory.fill_uninitialized_memory = was_filling
    torch.use_deterministic_algorithms(was_enabled)
