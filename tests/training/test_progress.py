"""The progress line: silent where nobody looks, true numbers where somebody does."""

import io

import pytest

from oomb_accel import progress
from oomb_accel.progress import ChunkEvent, ProgressLine, StepEstimate, format_seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "perf_counter", clock.perf_counter)
    monkeypatch.setenv("COLUMNS", "200")
    return clock


def play(line: ProgressLine, clock: Clock, forward: list[float], backward: list[float]) -> list[str]:
    """Chunks of 100 tokens that take so many seconds; what the stream got behind each event."""
    stream = line._stream
    assert isinstance(stream, io.StringIO)
    shown = []
    num_chunks = len(forward)
    for sweep, durations in (("forward", forward), ("backward", backward)):
        for chunk, seconds in enumerate(durations, start=1):
            clock.now += seconds
            before = len(stream.getvalue())
            line(ChunkEvent(sweep, chunk, num_chunks, chunk * 100, num_chunks * 100, "cpu"))  # type: ignore[arg-type]
            shown.append(stream.getvalue()[before:])
    return shown


def test_numbers(clock: Clock) -> None:
    stream = Terminal()
    line = ProgressLine(stream, min_interval_s=0.0)
    line.prefix = "step 1/2 | "
    shown = play(line, clock, [10.0] * 4, [20.0] * 4)
    assert "step 1/2 | forward 1/4 | host" in shown[0]
    # 10 s per chunk; how that grows is seen behind three of them. A backward sweep is taken for three times as long.
    assert "forward 2/4 | 10 tok/s | host" in shown[1] and "left" not in shown[2]
    assert "forward 4/4 | 10 tok/s | about 2:00 left" in shown[3]
    assert "backward 1/4 | 5 tok/s | about 1:00 left" in shown[4]
    assert shown[7] == "\r\x1b[K"  # the step is over: the line goes
    # The second step knows that a backward sweep takes twice a forward sweep here.
    shown = play(line, clock, [10.0] * 4, [20.0] * 4)
    assert "forward 2/4 | 10 tok/s | 1:40 left" in shown[1]
    assert "\n" not in stream.getvalue()


def test_cost_grows_with_position() -> None:
    estimate = StepEstimate()
    # 1 s per token plus 0.01 s per earlier token.
    cost = [100 + 0.01 * (end**2 - start**2) / 2 for start, end in ((100, 200), (200, 300), (300, 400))]
    estimate.fit([100, 200, 300, 400], cost)
    assert estimate.forward_seconds(0, 1000) == pytest.approx(1000 + 0.01 * 1000**2 / 2)
    # The end of the document is done in the backward sweep; the rest is cheaper.
    assert estimate.left_in_backward(500, 1000, elapsed=100.0) < 100.0


def test_first_step_is_not_promised_too_soon(clock: Clock) -> None:
    """Chunks get slower with the position: a time made of the first ones alone would be far too low."""
    line = ProgressLine(Terminal(), min_interval_s=0.0)
    forward = [float(seconds) for seconds in range(10, 60, 10)]
    shown = play(line, clock, forward, [3 * seconds for seconds in reversed(forward)])
    assert all("left" not in text for text in shown[:3])
    assert "forward 4/5 | 3 tok/s | about 8:2" in shown[3]  # 50 + 3 * 150 s
    # In the next step growth is known from the first one: 120 s of the forward sweep and 450 s are left.
    again = play(line, clock, forward, [3 * seconds for seconds in reversed(forward)])
    assert "forward 2/5 | 5 tok/s | 9:30 left" in again[1]


def test_quiet_when_not_a_terminal(clock: Clock) -> None:
    stream = io.StringIO()
    assert play(ProgressLine(stream, min_interval_s=0.0), clock, [1.0] * 3, [1.0] * 3) == [""] * 6
    play(ProgressLine(stream, force=True, min_interval_s=0.0), clock, [1.0] * 3, [1.0] * 3)
    assert "forward 1/3" in stream.getvalue()


def test_quiet_on_other_ranks(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    stream = Terminal()
    play(ProgressLine(stream, min_interval_s=0.0), clock, [1.0] * 3, [1.0] * 3)
    assert stream.getvalue() == ""


def test_short_steps_and_fast_chunks(clock: Clock) -> None:
    stream = Terminal()
    assert play(ProgressLine(stream), clock, [1.0], []) == [""]
    shown = play(ProgressLine(stream, min_interval_s=5.0), clock, [1.0] * 10, [])
    # The first, one behind each 5 s, and the end of the sweep.
    assert [index for index, text in enumerate(shown) if text] == [0, 5, 9]


def test_line_fits_the_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    shown = play(ProgressLine(Terminal(), min_interval_s=0.0), clock, [1.0] * 3, [1.0] * 3)
    assert all(len(text.removeprefix("\r").removesuffix("\x1b[K")) < 20 for text in shown)


def test_evaluation_leaves_no_line(clock: Clock) -> None:
    stream = Terminal()
    line = ProgressLine(stream, min_interval_s=0.0)
    for chunk in (1, 2):
        clock.now += 1.0
        line(ChunkEvent("forward", chunk, 2, chunk * 100, 200, "cpu", with_backward=False))
    assert stream.getvalue().endswith("\r\x1b[K")


def test_format_seconds() -> None:
    assert [format_seconds(value) for value in (6.6, 750, 3723)] == ["0:07", "12:30", "1:02:03"]


@pytest.mark.gpu
def test_cuda_chunks_are_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    line = ProgressLine(stream, min_interval_s=0.0)
    matrix = torch.randn(8192, 8192, device="cuda")
    for chunk in range(1, 5):
        for _ in range(4):
            matrix @ matrix
        line(ChunkEvent("forward", chunk, 4, chunk * 100, 400, "cuda:0"))
    text = stream.getvalue()
    assert "tok/s" in text and "GPU" in text
