"""A forked process has a hole where the parent's slabs are. What it maps there is its own, and stays."""

import subprocess
import sys
from pathlib import Path

import pytest

import oomb_accel

PACKAGE = """
import ctypes, gc, mmap, os, signal, sys, threading, types
package = types.ModuleType("oomb_accel")  # without all that its __init__ imports
package.__path__ = [sys.argv[1]]
sys.modules["oomb_accel"] = package
"""
IN_A_CHILD = """
from oomb_accel.host.mapping import HostMapping

SIZE, PATTERN = 1 << 21, b"mine"
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + 4 * [ctypes.c_long]
mapping = HostMapping(SIZE)
mapping.touch(0, SIZE)
mapping.memory.fill_(7)
size, flags = SIZE + mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
child = os.fork()
if child:
    status = os.waitpid(child, 0)[1]
    assert mapping.memory.eq(7).all(), "the parent's memory"
    sys.exit(os.waitstatus_to_exitcode(status))
address = libc.mmap(mapping.address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
assert address == mapping.address, "there is no hole"
ctypes.memmove(address, PATTERN * (size // len(PATTERN)), size)
ctypes.memset(address + len(PATTERN), 0, 1)
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(address), None)  # printed when the interpreter has ended
"""
WAYS = {
    "closed": "mapping.close()",
    "closed while a tensor over it lives": "tensor = mapping.memory[5:]; mapping.close(); gc.collect(); del tensor",
    "collected": "del mapping",
    "collected after its tensor": "tensor = mapping.memory[5:]; del mapping; gc.collect(); del tensor",
    "left to the end of the interpreter": "",
}
UNTOUCHED = """
gc.collect()
assert ctypes.string_at(address + 5, size - 5) == (PATTERN * (size // len(PATTERN)))[5:], "somebody wrote to it"
"""


@pytest.mark.parametrize("way", WAYS)
def test_what_a_child_has_in_the_hole_is_left_alone(way: str) -> None:
    assert run(IN_A_CHILD + WAYS[way] + UNTOUCHED) == (0, "mine\n", "")


WHILE_A_THREAD_IS_IN_THE_ARENA = """
from oomb_accel.host import HostArena

arena = HostArena(1 << 22, slab_bytes=1 << 21, pin=False)
slab, inside, leave = arena.take(), threading.Event(), threading.Event()

def stay():
    with arena._changed:
        inside.set()
        leave.wait()

thread = threading.Thread(target=stay)
thread.start()
inside.wait()
child = os.fork()
if child:
    leave.set()
    thread.join()
    status = os.waitpid(child, 0)[1]
    sys.exit(os.waitstatus_to_exitcode(status))
signal.alarm(20)
arena.give(slab)
arena.close()
"""


def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """Whoever held a slab gives it back when it dies, in the child too; the arena's lock may be held there for good."""
    assert run(WHILE_A_THREAD_IS_IN_THE_ARENA) == (0, "", "")


def run(script: str) -> tuple[int, str, str]:
    folder = str(Path(oomb_accel.__file__).parent)
    done = subprocess.run([sys.executable, "-c", PACKAGE + script, folder], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr
