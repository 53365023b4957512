"""Where the memory of a step goes, chunk by chunk: samples of every tier, their peaks, and a line per sample in a file.

Sampling asks counters that the host has: nothing waits for the device. So the time of a sample says when a chunk was
*queued*; memory is taken and given back in that order too.

All sizes are bytes. ``memory.jsonl`` has one JSON object per line with these keys:

    step, seconds                    of the run, since it was started
    sweep                            "forward", "backward", "evaluation" or "update"
    chunk, num_chunks, tokens_done, total_tokens
    device                           by tier, see `DEVICE_TIERS`
    allocated, peak, reserved        of torch's allocator: now, most since the sample before, and taken from the device
    host                             by tier, see `HOST_TIERS`
    copied                           pages, outputs moved "up" to the device, "down" to the host, since the run began
    waited                           seconds that the device stood still for these copies since the run was started

Without CUDA there is no allocator to ask: then ``allocated``, ``peak``, ``reserved`` and the activations are left out.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from oomb_accel.columns import aligned
from oomb_accel.progress import GIB, ChunkEvent, host_bytes

FILE = "memory.jsonl"

DEVICE_TIERS = {
    "weights": "weights",
    "trained": "trained weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "mean_keys": "mean keys",
    "pages": "pages (K and V)",
    "page_gradients": "page gradients",
    "kept_outputs": "kept outputs",
    "activations": "activations of a chunk",
}
"""Names of the tiers on the device, from those that stand still to those that move, and how people call them. The last
one is everything that torch has counted beside the others."""

HOST_TIERS = {
    "page_memory_used": "for pages and outputs, in use",
    "page_memory": "for pages and outputs",
    "pinned": "pinned",
    "pageable": "pageable",
    "process": "the whole process, in steps",
}
"""Names of the tiers in host memory. The process is what is pinned, all of it for pages and kept outputs, and what
is pageable; where pinning was refused, pages are in pageable memory."""

LINES_PER_STREAM = 4000
"""Most lines about both sweeps over one stream; of more chunks, neighbours share lines."""
LINES_IN_FULL = 50_000
"""Lines of a file, after which each sweep of each step gets no more than two."""

Line: TypeAlias = dict[str, Any]
What: TypeAlias = Literal["forward", "backward", "evaluation", "update"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a tier had, and when."""

    num_bytes: int
    step: int
    sweep: str
    chunk: int
    num_chunks: int

    @property
    def when(self) -> str:
        """In words."""
        chunk = f" {self.chunk}/{self.num_chunks}" if self.num_chunks else ""
        return f"step {self.step}, {self.sweep}{chunk}"


@dataclass(frozen=True, slots=True)
class MemorySources:
    """Where a report asks for what an event does not say; bytes and seconds."""

    standing: Callable[[str, What], Mapping[str, int]]
    """Tiers on the device that stay from chunk to chunk, given the device and the sweep."""
    host: Callable[[], Mapping[str, int]]
    """Tiers in host memory, without the process."""
    copied: Callable[[], Mapping[str, int]]
    """Pages and kept outputs moved so far, ``"up"`` and ``"down"``."""
    waited: Callable[[], float] = lambda: 0.0
    """Seconds that the device stood still for copies so far."""


class MemoryReport:
    """Samples memory at every chunk event; call it with each `ChunkEvent`.

    Looking for the peak within a chunk resets ``torch.cuda.max_memory_allocated``: ask ``peaks`` instead.

    Attributes:
        step: number of the optimizer step that samples belong to. Whoever knows it sets it; otherwise every stream
            counts as a step.
        peaks: of every tier so far, by its name; ``"allocated"`` and ``"reserved"`` are torch's.
        copied: bytes of pages and outputs moved ``"up"`` to the device and ``"down"`` to the host, as of the last
            sample.
        waited: seconds that the device stood still for copies, as of the last sample.
    """

    def __init__(self, sources: MemorySources) -> None:
        self.step: int | None = None
        self.peaks: dict[str, Peak] = {}
        self.copied: dict[str, int] = {}
        self.waited = 0.0
        self._lately: dict[str, Peak] = {}
        self._sources = sources
        self._streams = 0
        self._started = time.perf_counter()
        self._path: Path | None = None
        self._pending: deque[str] = deque(maxlen=2 * LINES_PER_STREAM)
        self._num_lines = 0
        self._thinner = _Thinner(1)
        self._device = "cpu"
        self._stopped = False

    def __call__(self, event: ChunkEvent) -> None:
        if self._stopped:
            return
        self._device = event.device
        what: What = event.sweep if event.with_backward else "evaluation"
        if event.chunk == 1 and what != "backward":
            self._streams += what == "forward"
            self._thinner = _Thinner(self._group_size(event.num_chunks))
        line = self._sample(what, event.kept() if event.kept is not None else {}) | {
            "chunk": event.chunk,
            "num_chunks": event.num_chunks,
            "tokens_done": event.tokens_done,
            "total_tokens": event.total_tokens,
        }
        self._remember(line)
        self._write(self._thinner.add(line, last=event.chunk == event.num_chunks))

    def stop(self) -> None:
        """Take no more samples."""
        self._stopped = True

    def updated(self) -> None:
        """The weights were updated: take a sample of what that took."""
        line = self._sample("update", {}) | dict.fromkeys(("chunk", "num_chunks", "tokens_done", "total_tokens"), 0)
        self._remember(line)
        if self._num_lines < LINES_IN_FULL:
            self._write([line])

    def write_to(self, path: Path) -> None:
        """Append to this file what was sampled lately, and from now on every sample."""
        self._path = path
        self._flush()

    def take_peaks(self) -> dict[str, int]:
        """Bytes of the peaks since the last call."""
        lately, self._lately = self._lately, {}
        return {name: peak.num_bytes for name, peak in lately.items()}

    def peaks_as_dict(self) -> dict[str, dict[str, Any]]:
        """The peaks for JSON."""
        return {name: asdict(peak) for name, peak in self.peaks.items()}

    def add_peaks(self, earlier: Mapping[str, Mapping[str, Any]]) -> None:
        """Count the peaks of an earlier part of the run too; what `peaks_as_dict` gave."""
        _raise_peaks(self.peaks, {name: Peak(**values) for name, values in earlier.items()})

    def table(self) -> str:
        """The peaks in GiB, a row per tier, and when each was."""
        return peak_table(self.peaks, self.copied, self.waited)

    def _group_size(self, num_chunks: int) -> int:
        """Neighbouring samples that share lines, two at most."""
        most = LINES_PER_STREAM if self._num_lines < LINES_IN_FULL else 2
        return 1 if 2 * num_chunks <= most else -(-4 * num_chunks // most)

    def _sample(self, what: What, kept: Mapping[str, int]) -> Line:
        device = dict(self._sources.standing(self._device, what)) | dict(kept)
        self.copied, self.waited = dict(self._sources.copied()), round(self._sources.waited(), 4)
        host, process = dict(self._sources.host()), host_bytes()
        allocator = _allocator(self._device)
        if allocator:
            device["activations"] = max(0, allocator["peak"] - sum(device.values()))
        return {
            "step": self._streams if self.step is None else self.step,
            "seconds": round(time.perf_counter() - self._started, 4),
            "sweep": what,
            "device": {name: size for name, size in device.items() if size},
            **allocator,
            "host": {**host, "pageable": max(0, process - host.get("pinned", 0)), "process": process},
            "copied": self.copied,
            "waited": self.waited,
        }

    def _remember(self, line: Line) -> None:
        for peaks in (self.peaks, self._lately):
            _raise_peaks(peaks, _peaks_in(line))

    def _write(self, lines: Iterable[Line]) -> None:
        self._pending.extend(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        self._flush()

    def _flush(self) -> None:
        """Write pending lines in one go, so that a kill leaves whole ones. A step does not fail for its report."""
        if self._path is None or not self._pending:
            return
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(handle, "".join(self._pending).encode())
            finally:
                os.close(handle)
        except OSError as error:
            warnings.warn(f"Memory is not reported to {str(self._path)!r} any more: {error}.", stacklevel=2)
            self._path = None
        self._num_lines += len(self._pending)
        self._pending.clear()


class _Thinner:
    """Of so many neighbouring samples, keeps the one with most device memory and the one with most host memory."""

    def __init__(self, group: int) -> None:
        self._size = group
        self._group: list[Line] = []

    def add(self, line: Line, *, last: bool) -> list[Line]:
        """Take a sample; returns those that are to be written.

        Args:
            last: of its sweep.
        """
        self._group.append(line)
        if len(self._group) < self._size and not last:
            return []
        group, self._group = self._group, []
        kept = {max(range(len(group)), key=lambda i: size(group[i])) for size in (_device_size, _host_size)}
        return [group[index] for index in sorted(kept)]


def peaks_of(lines: Iterable[Line]) -> dict[str, Peak]:
    """The peak of every tier in these samples."""
    peaks: dict[str, Peak] = {}
    for line in lines:
        _raise_peaks(peaks, _peaks_in(line))
    return peaks


def _peaks_in(line: Line) -> dict[str, Peak]:
    sizes = {**line["device"], **line["host"], "allocated": line.get("peak", 0), "reserved": line.get("reserved", 0)}
    place = line["step"], line["sweep"], line["chunk"], line["num_chunks"]
    return {name: Peak(size, *place) for name, size in sizes.items()}


def _raise_peaks(peaks: dict[str, Peak], others: Mapping[str, Peak]) -> None:
    """The first of equal peaks stays."""
    for name, peak in others.items():
        if peak.num_bytes > (peaks[name].num_bytes if name in peaks else 0):
            peaks[name] = peak


def _device_size(line: Line) -> int:
    return int(line.get("peak", sum(line["device"].values())))


def _host_size(line: Line) -> int:
    return int(line["host"]["process"])


def _allocator(device: str) -> dict[str, int]:
    """What torch's allocator has now and had at most since this was last asked; nothing without CUDA."""
    if not device.startswith("cuda"):
        return {}
    import torch

    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
    }


def keep_lines(path: Path, last_step: int) -> None:
    """Drop lines behind a step from a file with a ``"step"`` in each: they belong to steps that are done again. A line
    that was cut short goes too. The file is there whole at every moment."""
    if not path.is_file():
        return
    kept = "".join(line for line, step in _lines_with_steps(path) if step <= last_step)
    temporary = path.with_name(f".saving-{path.name}")
    temporary.write_text(kept, encoding="utf-8")
    os.replace(temporary, path)


def check_lines(path: Path) -> None:
    """Whether :meth:`keep_lines` can read a file.

    Raises:
        ValueError: a line that nobody can read, other than one that was cut short by a kill.
    """
    if path.is_file():
        _lines_with_steps(path)


def _lines_with_steps(path: Path) -> list[tuple[str, int]]:
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            found.append((line.decode(), int(json.loads(line)["step"])))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(
                f"{path} line {number} cannot be read.\n  Got {line[:80]!r}, no object with a step.\n"
                f"  Remove that line, or the whole of {path.name}: it is for reports only."
            ) from None
    return found


def peak_table(peaks: Mapping[str, Peak], copied: Mapping[str, int], waited: float = 0.0) -> str:
    """The peaks in GiB, a row per tier, and when each was.

    Args:
        copied: pages and kept outputs moved ``"up"`` and ``"down"``; no row where nothing was moved.
        waited: seconds that the device stood still for that.
    """
    rows = [("peak memory, GiB", "", "when")]
    names = {"allocated": "GPU", "reserved": "GPU, reserved by torch"}
    names |= {name: f"  {words}" for name, words in DEVICE_TIERS.items()}
    names |= {name: f"host, {words}" for name, words in HOST_TIERS.items()}
    rows += [(words, gib(peaks[name].num_bytes), peaks[name].when) for name, words in names.items() if name in peaks]
    if any(copied.values()):
        rows += [(f"copied to the {place}", gib(copied[way]), "in all") for way, place in _WAYS.items()]
        rows.append(("GPU waited for copies, s", f"{waited:,.2f}", "in all"))
    return aligned(rows, left=(0, 2))


_WAYS = {"up": "GPU", "down": "host"}


def gib(num_bytes: int) -> str:
    """GiB with as many digits as say something: two, or four below 0.1."""
    return f"{num_bytes / GIB:,.{2 if num_bytes >= GIB / 10 else 4}f}"
