"""`oomb report`: what a run did, from the files in its folder."""

from __future__ import annotations

import html.parser
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.cli import main
from oomb_accel.cli.report import report_text
from oomb_accel.cli.report_data import read_run

Write = Callable[[dict[str, Any]], Path]
GIB = 1024**3
PNG = b"\x89PNG"


def line(step: int, seconds: float, sweep: str, *, pages: int = GIB, up: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "seconds": seconds,
        "sweep": sweep,
        "chunk": 1,
        "num_chunks": 4,
        "tokens_done": 8,
        "total_tokens": 32,
        "device": {"weights": GIB, "pages": pages},
        "host": {"page_memory_used": 0, "page_memory": 0, "process": 3 * GIB},
        "copied": {"up": up, "down": 2 * up},
        **more,
    }


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 3.0 - step / 100,
        "grad_norm": 1.0,
        "tokens": 1000,
        "tokens_per_second": 500.0,
        "seconds": 2.0,
        "peak_gpu_gib": None,
        "host_gib": 3.0,
        **more,
    }


def write(path: Path, lines: list[dict[str, Any]], rest: str = "") -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in lines) + rest)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps that moved pages, then a start from a checkpoint, and a third."""
    write(tmp_path / "metrics.jsonl", [row(1), row(2), row(3)], rest='{"step": 4, "lo')
    samples = [
        line(0, 0.5, "evaluation"),
        line(1, 1.0, "forward", up=GIB),
        line(1, 2.0, "backward", up=3 * GIB, pages=5 * GIB),
        line(2, 3.0, "forward", up=4 * GIB),
        line(2, 4.0, "backward", up=4 * GIB),
        line(3, 1.0, "forward", up=GIB),
        line(3, 2.0, "backward", up=2 * GIB),
    ]
    write(tmp_path / "memory.jsonl", samples, rest='{"st')
    return tmp_path


def test_the_report_of_a_real_run(
    settings: dict[str, Any], write_recipe: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    oomb = {**settings["oomb"], "offload": True, "span_tokens": 16}
    assert main(["train", str(write_recipe(settings | {"oomb": oomb, "eval_last_tokens": 16}))]) == 0
    trained = capsys.readouterr().out
    out = Path(settings["output_dir"])
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(text) for text in (out / "memory.jsonl").read_text().splitlines()]
    assert {item["sweep"] for item in lines} == {"evaluation", "forward", "backward", "update"}
    assert {item["step"] for item in lines} == {0, 1, 2, 3}
    assert main(["report", str(out)]) == 0
    said = capsys.readouterr().out
    assert "3 steps, 1,083 tokens, done" in said and f"-> {summary['last_loss']:.4f}" in said
    losses = f"{summary['last_tokens_loss_before']:.4f} -> {summary['last_tokens_loss_after']:.4f}"
    assert f"evaluation, loss on the last 16 tokens: {losses}" in said
    assert losses.split()[-1] in (out / "report.html").read_text()
    assert summary["memory_peaks"] == {name: asdict(peak) for name, peak in read_run(out).peaks.items()}
    assert summary["peak_host_gib"] * GIB >= summary["memory_peaks"]["process"]["num_bytes"] - 2**20
    assert "host, the whole process, in steps" in said and "host GiB, end" in said
    assert "GiB since the start, loading included" in trained
    table = said[said.index("peak memory, GiB") : said.index("written ")].strip().splitlines()
    printed_by_train = [text.removeprefix("  ") for text in trained.splitlines()]
    assert len(table) > 8 and all(text in printed_by_train for text in table)  # the same in both places
    assert any(text.startswith("copied to the host") for text in table)
    assert summary["memory_peaks"]["page_gradients"]["sweep"] == "backward"
    pictures = sorted(out.glob("report_*.png"))
    assert [item.name for item in pictures] == ["report_memory.png", "report_training.png"]
    assert all(item.read_bytes().startswith(PNG) and item.stat().st_size > 10_000 for item in pictures)
    # A run that replaces this one leaves nothing of it.
    assert main(["train", str(write_recipe(settings | {"max_steps": 1})), "--overwrite_output_dir"]) == 0
    assert not list(out.glob("report_*.png"))
    assert {json.loads(text)["step"] for text in (out / "memory.jsonl").read_text().splitlines()} == {1}


def test_without_chunks_there_is_no_memory_file(settings: dict[str, Any], write_recipe: Write, tmp_path: Path) -> None:
    assert main(["train", str(write_recipe(settings | {"oomb": {"enabled": False}, "max_steps": 1}))]) == 0
    out = Path(settings["output_dir"])
    assert not (out / "memory.jsonl").exists()
    assert main(["report", str(out), "--out", str(tmp_path / "pictures")]) == 0
    assert {item.name for item in (tmp_path / "pictures").iterdir()} == {"report_training.png", "report.html"}


def test_the_page_stands_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file with everything in it, in the reader's light or dark."""
    (run / "config.yaml").write_text("learning_rate: 0.1\nrun_name: <b>\noomb:\n  top_k: 8\n")
    assert main(["report", str(run)]) == 0
    assert f"written {run / 'report.html'}" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)|<script""", page)
    assert page.count("<svg") == page.count("</svg>") == 2 and "<metadata>" not in page
    assert "prefers-color-scheme: dark" in page and "fill: var(--backward)" in page
    assert "#000000" not in page[page.index("</style>") :]
    for words in (
        "loss (nats per target)",
        "peak memory, GiB",
        "oomb.top_k: 8",
        "run_name: &lt;b&gt;",
        "<th>to GPU GiB</th>",
    ):
        assert words in page
    html.parser.HTMLParser().feed(page)


def test_runs_are_compared(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other / "metrics.jsonl", [row(step, loss=1.0, mfu=0.25) for step in range(1, 60)])
    (other / "summary.json").write_text("{}")
    for folder, rate in ((run, 0.1), (other, 0.2)):
        (folder / "config.yaml").write_text(
            f"learning_rate: {rate}\nseed: 1\noomb:\n  top_k: 8\noutput_dir: {folder}\n"
        )
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    assert main(["report", str(run), str(other)]) == 0
    said = capsys.readouterr().out
    lines = [text.split() for text in said.splitlines()]
    assert [run.name, "3,", "not", "done", "3,000", "2.9900", "2.9700", "500"] == lines[1][:8]
    assert lines[2][:7] == ["other", "59,", "not", "done", "59,000", "1.0000", "1.0000"] and "25.0%" in lines[2]
    assert ["learning_rate", "0.1", "0.2"] in lines and "seed" not in said and "output_dir" not in said
    assert sorted(item.name for item in place.iterdir()) == ["report.html", "report_comparison.png"]
    page = (place / "report.html").read_text()
    assert "<td>learning_rate</td><td>0.1</td><td>0.2</td>" in page and ">other</text>" in page
    assert main(["report", str(run), str(other), "--json"]) == 0
    assert [len(item["steps"]) for item in json.loads(capsys.readouterr().out)["runs"]] == [3, 59]


def test_waiting_is_summed_over_starts(run: Path) -> None:
    samples = [
        line(1, 1.0, "forward", waited=0.5),
        line(1, 2.0, "backward", waited=2.0),
        line(2, 1.0, "forward", waited=1.0),
    ]
    write(run / "memory.jsonl", samples)
    assert read_run(run).waited() == 3.0


def test_sums_over_steps_and_starts(run: Path) -> None:
    data = read_run(run)
    assert [item["step"] for item in data.metrics] == [1, 2, 3]  # a line that was cut short is none
    moved = {step: sums["up"] // GIB for step, sums in data.copied_by_step().items()}
    assert moved == {0: 0, 1: 3, 2: 1, 3: 2}
    assert data.copied() == {"up": 6 * GIB, "down": 12 * GIB}
    assert (data.peaks["pages"].num_bytes, data.peaks["pages"].when) == (5 * GIB, "step 1, backward 1/4")
    text = report_text(data)
    assert "3 steps, 3,000 tokens, not done, or stopped" in text and "500 tokens/s" in text
    last = next(item for item in text.splitlines() if item.startswith("   3  "))
    assert last.split()[-2:] == ["2.00", "4.00"]


def test_the_summary_knows_peaks_that_the_file_does_not(run: Path) -> None:
    peak = {"num_bytes": 9 * GIB, "step": 2, "sweep": "forward", "chunk": 2, "num_chunks": 4}
    (run / "summary.json").write_text(json.dumps({"memory_peaks": {"pages": peak, "weights": peak | {"num_bytes": 1}}}))
    peaks = read_run(run).peaks
    assert (peaks["pages"].num_bytes, peaks["weights"].num_bytes) == (9 * GIB, GIB)


def test_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [item["step"] for item in report["steps"]] == [1, 2, 3]
    assert report["memory_peaks"]["pages"]["num_bytes"] == 5 * GIB
    assert report["copied_by_step"]["1"] == {"up": 3 * GIB, "down": 6 * GIB}
    assert not list(run.glob("*.png"))


def test_a_long_run_is_a_short_table(run: Path) -> None:
    write(run / "metrics.jsonl", [row(step) for step in range(1, 1001)])
    rows = [item.split()[0] for item in report_text(read_run(run)).splitlines() if "500" in item and "1,000" in item]
    steps = [item for item in rows if item.isdigit()]
    assert len(steps) == 20 and (steps[0], steps[-1]) == ("1", "1000")
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize("step", [None, 2])
def test_which_step_is_drawn(run: Path, step: int | None) -> None:
    from oomb_accel.cli.report_plots import _chosen

    lines, start, title = _chosen(read_run(run), step)
    if step is None:  # so few samples are no time line: the last part of the run is drawn
        assert [item["step"] for item in lines] == [3, 3] and start == 0.0 and title == "Memory of the run"
    else:
        assert [item["step"] for item in lines] == [2, 2] and start == 2.0 and "step 2, 32 tokens" in title
    assert main(["report", str(run), *(["--step", str(step)] if step else [])]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9"], "no samples of memory of step 9.\n  Found steps 0 to 3.\n  Use --step 3."),
        (["--out", __file__], "The plots cannot be written.\n"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn(run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_folders_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "Found thesis.txt" in error and "Traceback" not in error


def test_without_matplotlib(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(run)]) == 2
    said = capsys.readouterr()
    assert "peak memory, GiB" in said.out
    assert "pip install 'oomb_accel[report]'" in said.err and len(said.err.splitlines()) == 3
    assert main(["report", str(run), "--no_plots"]) == 0
    assert main(["report", str(run), "--json"]) == 0


def test_evaluation_before_and_after(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the text, the page, the JSON and beside other runs; a run without it has none."""
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["last_tokens_loss"] is None
    other = run / "other"
    other.mkdir()
    write(other / "metrics.jsonl", [row(1)])
    (other / "summary.json").write_text('{"last_tokens_loss_before": 2.5, "last_tokens_loss_after": 1.25}')
    (other / "config.yaml").write_text("eval_last_tokens: 64\n")
    assert main(["report", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["last_tokens_loss"]
    assert found == {"tokens": 64, "before": 2.5, "after": 1.25}
    assert main(["report", str(other)]) == 0
    assert "loss on the last 64 tokens: 2.5000 -> 1.2500" in capsys.readouterr().out
    page = (other / "report.html").read_text()
    assert "<b>1.2500</b><span>evaluation after</span>" in page and "2.5000 -&gt; 1.2500" in page
    assert main(["report", str(run), str(other), "--no_plots"]) == 0
    heads, first, second = capsys.readouterr().out.splitlines()[:3]
    assert "eval before  eval after" in heads and "2.5000" in second and "1.2500" in second and "2.5000" not in first


def test_ticks_say_what_they_are() -> None:
    from oomb_accel.cli.report_plots import tick_label

    assert [tick_label(value) for value in (0.0, 2.5, 7.5, 10.0, 0.30000000000000004, 1250.0, 1e6)] == [
        *("0", "2.5", "7.5", "10", "0.3", "1,250", "1,000,000")
    ]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_memory_is_drawn_whole_and_called_what_it_is(tmp_path: Path, on_gpu: bool) -> None:
    """No line at the upper edge; what a CPU run calls its device is host memory."""
    from oomb_accel.cli.report_plots import figures_of

    more = {"peak": 7 * GIB, "reserved": 8 * GIB} if on_gpu else {}
    write(tmp_path / "memory.jsonl", [line(1, second, "forward", up=GIB, **more) for second in (1.0, 2.0)])
    for axes in figures_of([read_run(tmp_path)], None)["memory"].axes:
        assert axes.get_ylim()[1] > 1.05 * axes.dataLim.y1 > 0
        if "device" in axes.get_ylabel() or "part of" in axes.get_ylabel():
            assert axes.get_ylabel() == ("device, GiB" if on_gpu else "GiB, a part of\nhost memory")
