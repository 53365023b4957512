"""Settings of every test run: devices, the Triton interpreter, offline hub, hypothesis profile."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

# Token ids of the tests' data do not outlive the tests; processes that tests start use the same folder.
if "OOMB_CACHE" not in os.environ:
    os.environ["OOMB_CACHE"] = tempfile.mkdtemp(prefix="oomb-cache-")
    atexit.register(shutil.rmtree, os.environ["OOMB_CACHE"], ignore_errors=True)

# A shell that starts something in the background has it ignore Ctrl-C, and runs honour that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before transformers or Triton is imported by anything: both read these when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

gc.disable()  # until all test files are imported, which leaves little to collect

HAS_CUDA = torch.cuda.is_available()
NUM_CUDA_DEVICES = torch.cuda.device_count() if HAS_CUDA else 0

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
    # Tiny shapes: more threads only contend with the other test workers.
    torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine has not the devices for, and say so."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    too_few = pytest.mark.skip(reason=f"needs two CUDA devices, this machine has {NUM_CUDA_DEVICES}")
    for item in items:
        if "multigpu" in item.keywords and NUM_CUDA_DEVICES < 2:
            item.add_marker(too_few)
        elif "gpu" in item.keywords and not HAS_CUDA:
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Keep what has been imported from the garbage collector, which Accelerate and DeepSpeed call in every training.

    Each call would walk more than half a million objects of torch, transformers and pytest. What a test makes is
    collected as ever.
    """
    gc.freeze()
    gc.enable()
