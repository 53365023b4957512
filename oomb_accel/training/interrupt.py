"""Ctrl-C and SIGTERM in a run: the first one stops it where nothing is left half done, the second one at once."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from oomb_accel.reading import in_a_line

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what clusters send some time before they kill."""
SAME_SECONDS = 1.0
"""A launcher passes on what the terminal has sent to everybody already: so close together, they are one."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.cause = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.exit_code = 128 + number


def reason(error: BaseException) -> str:
    """Why a run stopped, in a few words."""
    if isinstance(error, Stopped):
        return error.cause
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    if getattr(error, "errno", None) in _FULL or getattr(error.__cause__, "errno", None) in _FULL:
        return "the disk is full"
    return in_a_line(error).rstrip(".:")


class StopSignals:
    """While entered, the first signal raises `Stopped`: at once, or where the run is busy at the next `check`.

    The backward sweep runs in a thread of autograd, for which the main thread waits without running Python: no handler
    is called before the sweep is over. So the interpreter also writes signals into a pipe, and `check`, which any
    thread may call, looks there.

    Args:
        is_busy: whether something is going on that must not be left half done, such as an update.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._got: int | None = None
        self._at = 0.0
        self._raised = False
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            # None is a handler of other code that Python cannot put back; ignored are those of nohup.
            wanted = [number for number in SIGNALS if signal.getsignal(number) not in (None, signal.SIG_IGN)]
            self._before = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup)
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def check(self, event: object = None) -> None:
        """To be called where the run may stop; costs microseconds.

        Args:
            event: anything, so that this can listen to chunks.

        Raises:
            Stopped: a signal has come, and nothing is half done.
        """
        if self._got is None:
            self._note(self._arrived())
        if self._got is not None and not self._raised and not self._is_busy():
            self._raised = True
            raise Stopped(self._got)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._got is not None and self._raised and number == signal.SIGINT:
            if time.monotonic() - self._at > SAME_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._note(number)
        self.check()

    def _note(self, number: int | None) -> None:
        if self._got is None and number is not None:
            self._got, self._at = number, time.monotonic()

    def _arrived(self) -> int | None:
        """A signal whose handler was not called yet."""
        if self._pipe is None:
            return None
        with contextlib.suppress(BlockingIOError):
            return next((number for number in os.read(self._pipe[0], 256) if number in self._before), None)
        return None
