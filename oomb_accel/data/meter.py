"""How far tokenising is: a line on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from oomb_accel.progress import format_seconds

INTERVAL_S = 0.3


class Meter:
    """One line, rewritten in place: share, tokens, rate, time left. Nothing where there is no terminal.

    Args:
        total_chars: of all texts, about.
        stream: stderr when None.
    """

    def __init__(self, total_chars: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._active = self._stream.isatty()
        self._total, self._chars, self._tokens = max(total_chars, 1), 0, 0
        self._started = time.perf_counter()
        self._drawn_at = self._started

    def add(self, chars: int, tokens: int) -> None:
        """So much has been tokenised."""
        self._chars += chars
        self._tokens += tokens
        now = time.perf_counter()
        if self._active and now - self._drawn_at >= INTERVAL_S:
            self._drawn_at = now
            self._stream.write(f"\r{self.text(now - self._started)}\x1b[K")
            self._stream.flush()

    def text(self, seconds: float) -> str:
        """The line after so many seconds."""
        share = min(self._chars / self._total, 0.99)
        left = seconds / share - seconds if share else 0.0
        return (
            f"tokenising | {share:.0%} | {self._tokens:,} tokens | {self._tokens / max(seconds, 1e-9):,.0f} tok/s | "
            f"{format_seconds(left)} left"
        )

    def close(self) -> None:
        """Remove the line."""
        if self._active:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
