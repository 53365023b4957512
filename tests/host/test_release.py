"""Host memory after use: given back by close, by forgetting the arena, at the end of the interpreter."""

import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import oomb_accel
from oomb_accel.host import HostArena, Pinner
from oomb_accel.progress import host_bytes
from tests.host.machines import MIB, WAIT_S, FakeCuda, make_arena, wait_for, wait_until


def test_close_during_background_work() -> None:
    """Nothing is left registered or resident, and those who wait are told."""
    before = host_bytes()
    at_work = threading.Event()

    def slowly(number: int) -> None:
        at_work.set()
        time.sleep(0.05)

    cuda = FakeCuda(slowly)
    arena = make_arena(64, cuda, slab_bytes=2 * MIB)
    arena.reserve(64 * 2 * MIB)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: [arena.take() for _ in range(65)])
        wait_for(at_work)
        arena.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(WAIT_S)
    assert 0 < len(cuda.unpinned) < 64 and cuda.pinned == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "oomb-host-memory"]
    gc.collect()
    assert host_bytes() - before < 8 * MIB


def test_after_close() -> None:
    cuda = FakeCuda()
    arena = make_arena(2, cuda)
    slab = arena.take()
    arena.close()
    arena.close()
    arena.give(slab)
    assert len(cuda.unpinned) == 1
    with pytest.raises(RuntimeError, match="closed"):
        arena.take()
    with pytest.raises(RuntimeError, match="closed"):
        arena.reserve(1)


def test_an_arena_that_nobody_holds_is_released() -> None:
    cuda = FakeCuda()
    arena = make_arena(2, cuda)
    arena.take()
    del arena
    wait_until(lambda: len(cuda.unpinned) == 1)
    assert cuda.pinned == {}


def test_a_device_that_failed_does_not_stop_the_release() -> None:
    def fail(addresses: object) -> None:
        raise RuntimeError("CUDA error 700: an illegal memory access was encountered")

    before = host_bytes()
    arena = HostArena(32 * MIB, slab_bytes=32 * MIB, pin=True, pinner=Pinner(lambda address, size: None, fail))
    arena.take()
    arena.close()
    assert host_bytes() - before < 8 * MIB


AT_EXIT = """
import os, sys, time, types
package = types.ModuleType("oomb_accel")  # without all that its __init__ imports
package.__path__ = [sys.argv[1]]
sys.modules["oomb_accel"] = package
from oomb_accel.host import HostArena, Pinner

def register(address, size):
    time.sleep(0.01)
    os.write(1, b"pinned ")

arena = HostArena(1 << 30, slab_bytes=1 << 21, pin=True,
                  pinner=Pinner(register, lambda addresses: os.write(1, b"unpinned " * len(addresses))))
slab = arena.take()
child = os.fork()
if child:
    arena.reserve(1 << 30)
    status = os.waitpid(child, 0)[1]
    os.write(1, b"child %d " % os.waitstatus_to_exitcode(status))
    sys.exit(0)
for line in open("/proc/self/maps"):
    start, end = (int(border, 16) for border in line.split()[0].split("-"))
    if start <= slab.address and slab.address + (1 << 21) <= end:  # smaller ones may have come into the gap
        sys.exit(5)
"""


def test_end_of_the_interpreter_and_of_a_forked_one() -> None:
    """The background does not keep the interpreter alive; what is pinned is unpinned; a child has none of it."""
    folder = str(Path(oomb_accel.__file__).parent)
    done = subprocess.run([sys.executable, "-c", AT_EXIT, folder], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stderr == ""
    words = done.stdout.split()
    assert "child 0" in done.stdout
    assert 0 < words.count("pinned") == words.count("unpinned") < 512
