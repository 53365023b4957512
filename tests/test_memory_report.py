"""The memory report: what a line says, peaks and when they were, and a file that stays small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oomb_accel import memory_report, watch_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.memory_report import MemoryReport, MemorySources, keep_lines, peaks_of
from oomb_accel.progress import GIB, ChunkEvent
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config
from tests.harness.sparse import sparse


class Counters:
    """Sizes that a test sets."""

    def __init__(self) -> None:
        self.pages = self.used = self.process = self.up = 0
        self.allocator: dict[str, int] = {}

    def report(self) -> MemoryReport:
        return MemoryReport(
            MemorySources(
                standing=lambda device, what: {"weights": 10, "gradients": 5 if what == "backward" else 0},
                host=lambda: {"page_memory_used": self.used, "page_memory": 2 * self.used, "pinned": self.used + 1},
                copied=lambda: {"up": self.up, "down": 0},
                waited=lambda: self.up / 2,
            )
        )

    def event(self, sweep: Any, chunk: int, num_chunks: int, *, train: bool = True) -> ChunkEvent:
        total = 100 * num_chunks
        return ChunkEvent(sweep, chunk, num_chunks, 100 * chunk, total, "cpu", train, lambda: {"pages": self.pages})


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters()
    monkeypatch.setattr(memory_report, "host_bytes", lambda: made.process)
    monkeypatch.setattr(memory_report, "_allocator", lambda device: made.allocator)
    return made


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def play(report: MemoryReport, counters: Counters, num_chunks: int, pages: Callable[[int], int] = lambda i: i) -> None:
    """One step; the n-th chunk of both sweeps finds ``pages(n)`` bytes of pages."""
    for index in range(2 * num_chunks):
        counters.pages = pages(index)
        sweep = "forward" if index < num_chunks else "backward"
        report(counters.event(sweep, index % num_chunks + 1, num_chunks))


def test_a_line_per_chunk(counters: Counters, tmp_path: Path) -> None:
    report = counters.report()
    counters.used, counters.process, counters.up = 7, 100, 3
    play(report, counters, 3)
    assert not list(tmp_path.iterdir())
    report.write_to(tmp_path / "memory.jsonl")  # what came before is not lost
    play(report, counters, 3)
    lines = lines_of(tmp_path / "memory.jsonl")
    assert [(line["step"], line["sweep"], line["chunk"]) for line in lines] == [
        (step, sweep, chunk) for step in (1, 2) for sweep in ("forward", "backward") for chunk in (1, 2, 3)
    ]
    assert lines[4]["device"] == {"weights": 10, "gradients": 5, "pages": 4}
    assert lines[4]["host"] == {"page_memory_used": 7, "page_memory": 14, "pageable": 92, "pinned": 8, "process": 100}
    assert lines[4]["copied"] == {"up": 3, "down": 0} and lines[4]["waited"] == 1.5
    assert (lines[4]["tokens_done"], lines[4]["total_tokens"]) == (200, 300)
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_peaks_and_when(counters: Counters) -> None:
    report = counters.report()
    report.step = 7
    play(report, counters, 4, lambda index: GIB * (9 if index == 5 else index % 4))
    report.step = 8
    play(report, counters, 4, lambda index: GIB)
    assert (report.peaks["pages"].num_bytes, report.peaks["pages"].when) == (9 * GIB, "step 7, backward 2/4")
    assert report.peaks["gradients"].when == "step 7, backward 1/4"  # the first of equal ones
    assert "mean_keys" not in report.peaks
    rows = {line.rsplit("  ", 1)[-1] for line in report.table().splitlines() if "9.00" in line}
    assert rows == {"step 7, backward 2/4"}
    later = counters.report()  # a run that goes on
    later.add_peaks(json.loads(json.dumps(report.peaks_as_dict())))
    play(later, counters, 4, lambda index: 3 * GIB)
    assert later.peaks["pages"] == report.peaks["pages"]


def test_what_lives_within_a_chunk_is_the_rest_of_the_peak(counters: Counters) -> None:
    report = counters.report()
    counters.allocator = {"allocated": 30, "peak": 75, "reserved": 90}
    play(report, counters, 1, lambda index: 20)
    assert report.peaks["activations"].num_bytes == 75 - 10 - 20
    assert (report.peaks["allocated"].num_bytes, report.peaks["reserved"].num_bytes) == (75, 90)
    counters.allocator = {"allocated": 10, "peak": 95, "reserved": 99}
    report.updated()
    assert report.peaks["allocated"].when == "step 1, update"


def test_an_evaluation_is_named_and_is_no_step(counters: Counters, tmp_path: Path) -> None:
    report = counters.report()
    report.write_to(tmp_path / "memory.jsonl")
    report(counters.event("forward", 1, 1, train=False))
    play(report, counters, 1)
    lines = lines_of(tmp_path / "memory.jsonl")
    assert [(line["step"], line["sweep"]) for line in lines] == [(0, "evaluation"), (1, "forward"), (1, "backward")]


def test_the_file_stays_small_and_keeps_peaks(
    counters: Counters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_report, "LINES_PER_STREAM", 40)
    monkeypatch.setattr(memory_report, "LINES_IN_FULL", 40)
    report = counters.report()
    report.write_to(tmp_path / "memory.jsonl")

    def pages(index: int) -> int:
        counters.process = 5000 if index == 123 else index
        return 1000 if index == 77 else index % 50

    for step in range(1, 5):
        report.step = step
        play(report, counters, 100, pages)
        assert report.peaks["pages"].num_bytes == 1000
    lines = lines_of(tmp_path / "memory.jsonl")
    by_step = [[line for line in lines if line["step"] == step] for step in range(1, 5)]
    assert 20 <= len(by_step[0]) <= 40 and all(len(group) <= 4 for group in by_step[2:])
    for group in by_step:
        peaks = peaks_of(group)
        assert (peaks["pages"].num_bytes, peaks["process"].num_bytes) == (1000, 5000)
        assert [line["chunk"] for line in group if line["sweep"] == "forward"] == sorted(
            line["chunk"] for line in group if line["sweep"] == "forward"
        )


def test_nothing_piles_up_without_a_file(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    report = counters.report()
    for _ in range(3 * memory_report.LINES_PER_STREAM):
        report(counters.event("forward", 1, 1))
    assert len(report._pending) <= 2 * memory_report.LINES_PER_STREAM


def test_a_full_disk_does_not_stop_the_step(counters: Counters, tmp_path: Path) -> None:
    report = counters.report()
    with pytest.warns(UserWarning, match=r"Memory is not reported to .*nowhere"):
        report.write_to(tmp_path / "nowhere" / "memory.jsonl")
        play(report, counters, 2)
    play(report, counters, 2)
    assert report.peaks["pages"].num_bytes == 3


def test_lines_of_steps_that_are_done_again_go(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    keep_lines(path, 3)  # nothing there: nothing to do
    path.write_text("".join(f'{{"step":{step}}}\n' for step in (1, 2, 2, 3)) + '{"step":1')
    keep_lines(path, 2)
    assert path.read_text() == '{"step":1}\n{"step":2}\n{"step":2}\n'
    assert [item.name for item in tmp_path.iterdir()] == ["memory.jsonl"]


@pytest.mark.parametrize("settings", [config(), sparse(page_grad_dtype="bfloat16"), sparse(offload=True)], ids=str)
def test_tiers_of_a_real_step(settings: Any, tmp_path: Path) -> None:
    """Pools, mean keys and kept outputs by arithmetic; host memory and traffic where pages are offloaded."""
    import oomb_accel

    model = with_lora(tiny_model())
    seen: list[ChunkEvent] = []
    oomb_accel.enable(model, settings, on_progress=seen.append)
    state = attachment_of(model)
    optimizer = __import__("torch").optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    report = watch_memory(model, optimizer=optimizer, path=tmp_path / "memory.jsonl")
    batch = packed(documents_of(100)).batch
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 2 * 2 * 7  # the listener that was there before still hears of everything
    lines = lines_of(tmp_path / "memory.jsonl")
    assert [line["sweep"] for line in lines[:14]] == ["forward"] * 7 + ["backward"] * 7
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = 4 * sum(p.numel() for p in model.parameters() if not p.requires_grad)
    first, last = lines[6]["device"], lines[-1]["device"]
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert (first["trained"], first["weights"]) == (trained, frozen + buffers)
    assert "optimizer" not in first and last["optimizer"] >= 2 * trained
    assert "gradients" not in first and last["gradients"] == trained
    whole = 3 * 2 * 96 * 2 * 16 * 4  # layers, KV heads, tokens, K and V, head_dim, fp32
    if settings.offload is True:
        assert first["pages"] < whole
        assert lines[-1]["copied"]["up"] > 0 < lines[-1]["copied"]["down"]
        assert report.peaks["page_memory_used"].num_bytes > 0 == lines[-1]["host"]["page_memory_used"]
    else:
        assert first["pages"] == whole
        assert lines[-1]["copied"] == {"up": 0, "down": 0}
    parts = 3 * 2 * 24 * 1 * 16 * 4
    assert first.get("mean_keys", 0) == (parts if settings.attention == "sparse" else 0)
    assert not any("mean_keys" in line["device"] for line in lines if line["sweep"] == "backward")
    if settings.attention == "dense":
        assert report.peaks["page_gradients"].num_bytes == whole
        attention, ends, head = 3 * 4 * 96 * (16 * 4 + 4), 3 * 2 * 4 * 96 * (64 + 4), 96 * (4 * 64 + 4)
        assert first["kept_outputs"] == attention + ends + head  # the last chunk's graph holds its own
        assert lines[13]["device"].get("kept_outputs", 0) == 0
    report.stop()
    model(**batch).loss.backward()
    assert lines_of(tmp_path / "memory.jsonl") == lines
    assert state.offload.host_bytes()["page_memory_used"] == 0


def test_it_needs_a_model_that_is_on() -> None:
    with pytest.raises(ValueError, match=r"oomb_accel is not on"):
        watch_memory(tiny_model())


@pytest.mark.gpu
def test_peaks_are_those_of_the_allocator() -> None:
    import torch

    import oomb_accel

    model = with_lora(tiny_model(num_hidden_layers=2)).cuda()
    oomb_accel.enable(model, config())
    report = watch_memory(model)
    batch = {name: value.cuda() for name, value in packed(documents_of(100)).batch.items()}
    torch.cuda.reset_peak_memory_stats()
    model(**batch).loss.backward()
    assert report.peaks["allocated"].num_bytes >= torch.cuda.max_memory_allocated() > 0
    assert report.peaks["activations"].num_bytes > 0
