"""What a step is doing while it runs: events of the recurrence, and one rewritten terminal line made of them.

A step on a long document takes minutes. CUDA work is asynchronous, so the host clock at the time of an event
says when a chunk was *queued*, not when it was done. The line therefore marks every chunk with a device event
and computes its rates from those.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TextIO

GIB = 1024**3
BACKWARD_COST = 3.0
"""Backward sweep over forward sweep (recompute, dQ, dK, dV), assumed until this run has measured it."""


_LEAST_CHUNKS = 3
"""Chunks that must be measured to see how cost grows with the position."""


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """One chunk pass was queued on the device (on the CPU: has run)."""

    sweep: Literal["forward", "backward"]
    chunk: int
    """1-based, in the order of processing: the backward sweep counts from the document's end."""
    num_chunks: int
    tokens_done: int
    """Tokens of this sweep up to and including this chunk."""
    total_tokens: int
    device: str
    """Where the work runs, as ``str(torch.device)``."""
    with_backward: bool = True
    """False where no backward sweep follows, as in evaluation."""
    kept: Callable[[], dict[str, int]] | None = None
    """Device bytes of what is kept from chunk to chunk, by tier: for who wants to know, at the time of the event."""


class DeviceClock:
    """Time stamps that are true for queued work: CUDA events on a GPU, the host clock elsewhere."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device.startswith("cuda")

    def mark(self) -> Any:
        """A stamp behind all work queued so far on the current stream."""
        if not self._is_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Block the host until the work in front of ``mark`` is done."""
        if self._is_cuda:
            mark.synchronize()

    def seconds(self, earlier: Any, later: Any) -> float:
        """Time between two stamps that both have been reached."""
        if self._is_cuda:
            return float(earlier.elapsed_time(later)) / 1e3
        return float(later - earlier)


class StepEstimate:
    """Seconds left in a step, from the marks of the chunks that are done.

    The cost of a token grows with its position, because it attends to all earlier ones: seconds per token are
    fitted as ``a + b * position`` on the forward sweep. The backward sweep has the same shape, mirrored. How cost grows
    takes a few chunks to see; an earlier sweep of this run has shown it too.
    """

    def __init__(self) -> None:
        self.backward_cost = BACKWARD_COST
        self.has_measured_backward = False
        """Whether a backward sweep has been seen in this run; until then its cost is assumed."""
        self._line = (0.0, 0.0)
        self._earlier: tuple[float, float] | None = None
        """The line of the last sweep on which one could be fitted."""

    def knows_growth(self, num_seconds: int) -> bool:
        """Whether it can be told how cost grows with the position, with so many chunks measured in this sweep."""
        return num_seconds >= _LEAST_CHUNKS or self._earlier is not None

    def fit(self, ends: list[int], seconds: list[float]) -> None:
        """Fit the forward sweep.

        Args:
            ends: ascending token positions, one more than ``seconds``.
            seconds: time between two neighbouring positions.
        """
        widths = [end - start for start, end in itertools.pairwise(ends)]
        middles = [(end + start) / 2 for start, end in itertools.pairwise(ends)]
        total = sum(widths)
        mean_middle = sum(w * m for w, m in zip(widths, middles, strict=True)) / total
        mean_rate = sum(seconds) / total
        spread = sum(w * (m - mean_middle) ** 2 for w, m in zip(widths, middles, strict=True))
        slope = 0.0
        if len(seconds) < _LEAST_CHUNKS and self._earlier is not None:  # its shape, at the speed of now
            a, b = self._earlier
            slope = b * mean_rate / max(a + b * mean_middle, 1e-12)
        elif len(seconds) >= _LEAST_CHUNKS and spread > 0:
            moment = sum((m - mean_middle) * s for m, s in zip(middles, seconds, strict=True))
            # Never below zero, and never so steep that the first token would cost less than nothing.
            slope = min(max(moment / spread, 0.0), mean_rate / max(mean_middle, 1.0))
        self._line = (mean_rate - slope * mean_middle, slope)
        if len(seconds) >= _LEAST_CHUNKS:
            self._earlier = self._line

    def forward_seconds(self, start: int, end: int) -> float:
        """Fitted time of the forward sweep over tokens ``[start, end)``; 0 before the first fit."""
        a, b = self._line
        return a * (end - start) + b * (end**2 - start**2) / 2

    def forget_forward(self) -> None:
        """A new document: its forward sweep is fitted anew, the ratio of the sweeps and the growth are kept."""
        self._line = (0.0, 0.0)

    def learn_backward(self, done: int, total: int, elapsed: float) -> None:
        """Measure the ratio of the sweeps: ``done`` tokens from the document's end took ``elapsed`` seconds."""
        spent = self.forward_seconds(total - done, total)
        if spent > 0:
            self.backward_cost = elapsed / spent
            self.has_measured_backward = True

    def left_in_forward(self, done: int, total: int, with_backward: bool) -> float:
        rest = self.forward_seconds(done, total)
        return rest + (self.backward_cost * self.forward_seconds(0, total) if with_backward else 0.0)

    def left_in_backward(self, done: int, total: int, elapsed: float) -> float:
        """``done`` tokens counted from the document's end took ``elapsed`` seconds."""
        spent = self.forward_seconds(total - done, total)
        if spent <= 0:
            return elapsed * (total - done) / done
        return elapsed * self.forward_seconds(0, total - done) / spent


class ProgressLine:
    """One terminal line, rewritten in place: sweep, chunk i of n, tokens/s, time left, GPU and host memory.

    The time is left out until it can be told how the cost of a chunk grows, and is called "about" until a whole
    backward sweep has been measured: the first step also compiles kernels.

    Call it with each :class:`ChunkEvent`. It writes nothing, and costs nothing, when the stream is no
    terminal or when this process is not rank 0. On CUDA it waits, each time it draws, for the chunk *before*
    the one just queued: the numbers are those of finished work, and one chunk stays in flight.

    Args:
        stream: where to write; stderr when None.
        force: draw although the stream is no terminal.
        min_interval_s: least seconds between two drawings.
    """

    def __init__(self, stream: TextIO | None = None, *, force: bool = False, min_interval_s: float = 0.2) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._active = (force or self._stream.isatty()) and os.environ.get("RANK", "0") == "0"
        self._min_interval_s = min_interval_s
        self._drawn_at = -float("inf")
        self._visible = False
        self._estimate = StepEstimate()
        self._clock = DeviceClock("cpu")
        self._marks: list[tuple[int, Any]] = []
        self._last_mark: Any = None
        self.prefix = ""
        """Text in front of the line, for example ``"step 3/10 | "``."""

    def __call__(self, event: ChunkEvent) -> None:
        if not self._active or event.num_chunks == 1:  # an ordinary step has no backward sweep, and no news
            return
        if event.chunk == 1:
            self._begin(event)
        self._last_mark = self._clock.mark()
        self._marks.append((event.tokens_done, self._last_mark))
        if event.chunk == event.num_chunks:
            self._end(event)
        elif time.perf_counter() - self._drawn_at >= self._min_interval_s:
            self._draw(event)

    def clear(self) -> None:
        """Remove the line, so that other output can follow."""
        if self._visible:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._visible = False

    def _begin(self, event: ChunkEvent) -> None:
        """A sweep starts. The backward sweep starts where the forward sweep ended; the start of a forward
        sweep was not seen, so its first chunk counts for no rate."""
        self._clock = DeviceClock(event.device)
        self._marks = []
        if event.sweep == "forward":
            self._estimate.forget_forward()
        elif self._last_mark is not None:
            self._marks.append((0, self._last_mark))

    def _end(self, event: ChunkEvent) -> None:
        if event.sweep == "forward" and event.with_backward:
            self._draw(event)
            return
        done = self._done(event)
        if event.sweep == "backward" and len(done) >= 2:
            self._estimate.learn_backward(done[-1][0], event.total_tokens, self._elapsed(done))
        self.clear()
        self._last_mark = None

    def _done(self, event: ChunkEvent) -> list[tuple[int, Any]]:
        """Marks of finished work, waited for; on a GPU the chunk that was just queued stays in flight."""
        done = self._marks if event.device == "cpu" else self._marks[:-1]
        if done:
            self._clock.wait(done[-1][1])
        return done

    def _elapsed(self, done: list[tuple[int, Any]]) -> float:
        return max(self._clock.seconds(done[0][1], done[-1][1]), 1e-9)

    def _draw(self, event: ChunkEvent) -> None:
        done = self._done(event)
        parts = [f"{self.prefix}{event.sweep} {event.chunk}/{event.num_chunks}"]
        if len(done) >= 2:
            elapsed = self._elapsed(done)
            parts.append(f"{(done[-1][0] - done[0][0]) / elapsed:,.0f} tok/s")
            left = self._seconds_left(event, done, elapsed)
            if event.sweep == "backward" or self._estimate.knows_growth(len(done) - 1):
                about = "" if self._estimate.has_measured_backward or not event.with_backward else "about "
                parts.append(f"{about}{format_seconds(left)} left")
        parts.extend(memory_parts(event.device))
        columns = shutil.get_terminal_size().columns
        self._stream.write("\r" + " | ".join(parts)[: columns - 1] + "\x1b[K")
        self._stream.flush()
        self._visible = True
        self._drawn_at = time.perf_counter()

    def _seconds_left(self, event: ChunkEvent, done: list[tuple[int, Any]], elapsed: float) -> float:
        end, total = done[-1][0], event.total_tokens
        if event.sweep == "backward":
            return self._estimate.left_in_backward(end, total, elapsed)
        ends = [tokens for tokens, _ in done]
        marks = [mark for _, mark in done]
        seconds = [self._clock.seconds(a, b) for a, b in itertools.pairwise(marks)]
        self._estimate.fit(ends, seconds)
        return self._estimate.left_in_forward(end, total, event.with_backward)


def format_seconds(seconds: float) -> str:
    """``0:07``, ``12:30`` or ``1:02:03``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def memory_parts(device: str) -> list[str]:
    """Memory in use now, in GiB: what torch allocated on the GPU, and what this process holds of the RAM."""
    parts = []
    if device.startswith("cuda"):
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        parts.append(f"GPU {torch.cuda.memory_allocated(device) / GIB:.1f}/{total / GIB:.0f} GiB")
    parts.append(f"host {host_bytes() / GIB:.1f} GiB")
    return parts


def host_bytes() -> int:
    """Resident memory of this process, in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)
