"""Processes that tokenise, and results in the order of the tasks."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from oomb_accel.data.worker import Done, Task, encode, make_tokenizer

MAX_WORKERS = 32
GROUP_CHARS = 1 << 18
"""Characters that are sent to a process at a time."""
GROUP_TASKS = 256
LEAST_GROUPS = 4
"""With less to do, starting processes takes longer than doing it here."""


def num_workers() -> int:
    """Processes to start: one per core that this process may use."""
    return max(min(len(os.sched_getaffinity(0)), MAX_WORKERS), 1)


def encode_all(description: str, tasks: Iterable[Task], workers: int | None = None) -> Generator[Done, None, None]:
    """Tokenise in parallel.

    Each process is a plain program with pipes: nothing of this one is forked (it may have threads, and a GPU), and
    no script is imported again. A few groups of tasks per process are under way at a time.

    Args:
        description: JSON of the tokenizer.
        tasks: read as they are needed.
        workers: number of processes; :func:`num_workers` if left out.

    Yields: results in the order of the tasks.

    Raises:
        RuntimeError: a process was killed.
    """
    workers = num_workers() if workers is None else workers
    groups = _groups(tasks)
    first = list(itertools.islice(groups, LEAST_GROUPS))
    if workers == 1 or len(first) < LEAST_GROUPS:
        tokenizer = make_tokenizer(description)
        for group in itertools.chain(first, groups):
            yield from (encode(tokenizer, task) for task in group)
        return
    local = threading.local()
    started: list[subprocess.Popen[bytes]] = []

    def run(group: list[Task]) -> list[Done]:
        if hasattr(local, "process"):
            return _ask(local.process, group)
        local.process = _start()
        started.append(local.process)
        return _ask(local.process, description, group)

    pool = ThreadPoolExecutor(workers)
    under_way: deque[Future[list[Done]]] = deque()
    try:
        for group in itertools.chain(first, groups):
            under_way.append(pool.submit(run, group))
            if len(under_way) > 2 * workers:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
        for process in started:
            process.kill()  # what it still did is not wanted
        pool.shutdown(cancel_futures=True)
        for process in started:
            process.kill()  # one that was just being started, too
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # what was not sent goes nowhere
                    pipe.close()


def _groups(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    group: list[Task] = []
    chars = 0
    for task in tasks:
        group.append(task)
        chars += len(task.text)
        if chars >= GROUP_CHARS or len(group) == GROUP_TASKS:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _start() -> subprocess.Popen[bytes]:
    # Each process has one core; modules are found where this process finds them.
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",  # nothing of the current folder, unless this process has it too
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-c", "from oomb_accel.data.worker import main; main()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _ask(process: subprocess.Popen[bytes], *words: str | list[Task]) -> list[Done]:
    """Send the tokenizer or tasks, and wait for the results of the last ones."""
    assert process.stdin is not None and process.stdout is not None
    try:
        for word in words:
            pickle.dump(word, process.stdin, protocol=5)
        process.stdin.flush()
        done: list[Done] = pickle.load(process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
        raise RuntimeError(
            "A process that tokenises has ended.\n"
            f"  Exit code {process.wait()} (-9: killed, for memory perhaps; its own words are above).\n"
            "  Free memory and start again, or tokenise with fewer cores: taskset -c 0-1 oomb data RECIPE.yaml."
        ) from None
    return done
