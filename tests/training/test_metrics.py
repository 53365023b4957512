"""Figures of a step: exact where they are counts, plausible where they are clocks; trackers that come and go."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments

import oomb_accel
from oomb_accel import OombCallback
from oomb_accel.cli import main
from oomb_accel.integrations import step_metrics
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.selections import SelectionRecord
from oomb_accel.integrations.step_metrics import StepMetrics, flops_of_attachment
from oomb_accel.plan import GPUS, gpu_of_device
from oomb_accel.plan.flops import SparseReach
from oomb_accel.training import trackers
from oomb_accel.training.recipe import Recipe
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config
from tests.harness.sparse import sparse

Write = Callable[[dict[str, Any]], Path]


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_flops_are_those_that_torch_counts() -> None:
    """All weights trained. torch counts the square of eager attention, of which causal attention needs the triangle."""
    model, tokens = tiny_model(), 48
    batch = packed(documents_of(tokens)).batch
    with FlopCounterMode(display=False) as counter:
        model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.backward()
    oomb_accel.enable(model, config())
    flops = flops_of_attachment(attachment_of(model))
    assert flops is not None and flops.layers_trained and flops.head_trained and not flops.adapters
    shape = flops.shape
    other_half = tokens**2 - tokens * (tokens + 1) // 2
    square = 12 * shape.num_heads * shape.head_dim * shape.num_layers * other_half
    positions = 2 * tokens * shape.head_dim // 2  # RoPE multiplies them with its frequencies
    assert flops.of_stream([tokens], tokens) + square + positions == counter.get_total_flops()


def test_flops_of_adapters_documents_windows_and_selected_pages() -> None:
    model = with_lora(tiny_model())
    oomb_accel.enable(model, config())
    flops = flops_of_attachment(attachment_of(model))
    assert flops is not None and not flops.layers_trained and not flops.head_trained
    assert flops.adapters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = flops.shape
    per_token = 4 * shape.num_layers * shape.active_layer_weights + 6 * flops.adapters
    pair = 12 * shape.num_heads * shape.head_dim
    layers = shape.num_layers
    assert flops.of_stream([10, 20], 7) == (
        30 * per_token + 7 * 4 * shape.head_weights + pair * layers * (10 * 11 // 2 + 20 * 21 // 2)
    )
    windowed = replace(flops, shape=replace(shape, windows=(4,) * layers))
    assert windowed.of_stream([10], 0) == 10 * per_token + pair * layers * (4 * 5 // 2 + 6 * 4)
    reach = SparseReach(layers=frozenset(range(layers)), chunk_tokens=8, page_tokens=2, always_pages=2, top_k=1)
    # Chunks of 8, 8 and 4 tokens with 0, 4 and 8 pages behind them, of which 3 are attended to.
    pairs = 36 + (36 + 8 * 6) + (10 + 4 * 6)
    assert replace(flops, sparse=reach).of_stream([20], 0) == 20 * per_token + pair * layers * pairs


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_gpus_by_the_name_that_the_driver_gives(name: str, key: str | None) -> None:
    assert gpu_of_device(name) is (GPUS[key] if key else None)


def test_figures_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected pages by the lists themselves; utilisation by hand; the second step counts anew."""
    monkeypatch.setattr(step_metrics, "peak_flops", lambda state: 1e9)
    model = with_lora(tiny_model())
    oomb_accel.enable(model, sparse())
    state = attachment_of(model)
    record = state.on_selection = SelectionRecord()
    metrics = StepMetrics(model, None)
    batch = packed(documents_of(100, 30)).batch
    for _ in range(2):
        record.found.clear()
        model(**batch).loss.backward()
        found = metrics.take(2.0)
        counts = [
            len(set(pages.flatten().tolist()))
            for selection in record.found.values()
            for pages in selection.lists.pages_GBK
        ]
        assert found["tokens"] == 130 and found["tokens_per_second"] == 65 and found["trained_tokens"] == 128
        assert found["pages_selected"] == sum(counts) / len(counts) and found["pages_selected_most"] == max(counts)
        could = sum(
            min(s.lists.num_pages, s.lists.pages_GBK[0].numel()) * len(s.lists.pages_GBK) for s in record.found.values()
        )
        assert found["distinct_share"] == sum(counts) / could
        assert 0 < found["selected_mass"] <= 1
        flops = flops_of_attachment(state)
        assert flops is not None and flops.sparse is not None
        assert found["mfu"] == flops.of_stream([100, 30], 128) / 2e9
        assert "copied_up_gib" not in found
    with torch.no_grad():
        model(**batch)
    assert metrics.take(1.0)["tokens"] == 0  # evaluation is no training


def test_the_mass_is_all_where_the_pages_are_all() -> None:
    """Lists that leave out one page of many have nearly all of the mass of random keys; short ones have less."""
    masses = {}
    for top_k in (2, 10):
        model = with_lora(tiny_model())
        oomb_accel.enable(model, sparse(top_k=top_k, sink_pages=0, recent_pages=1))
        metrics = StepMetrics(model, None)
        model(**packed(documents_of(64)).batch).loss.backward()
        masses[top_k] = metrics.take(1.0).get("selected_mass")
    assert masses[2] is not None and masses[10] is not None and masses[2] < masses[10] <= 1


def test_metrics_of_a_run_with_pages_in_host_memory(settings: dict[str, Any], write_recipe: Write) -> None:
    oomb = {**settings["oomb"], "offload": True, "span_tokens": 16}
    assert main(["train", str(write_recipe(settings | {"oomb": oomb}))]) == 0
    out = Path(settings["output_dir"])
    rows = steps_of(out)
    lines = [json.loads(line) for line in (out / "memory.jsonl").read_text().splitlines()]
    assert all(line["waited"] == 0 for line in lines)  # the CPU copies by itself
    last = lines[-1]["copied"]
    for way in ("up", "down"):
        assert math.isclose(sum(row[f"copied_{way}_gib"] for row in rows) * 1024**3, last[way])
    for row in rows:
        assert row["copy_stall"] == row["waited_seconds"] == 0.0 and row["mfu"] is None
        assert row["pinned_gib"] if torch.cuda.is_available() else "pinned_gib" not in row
        assert 0 < row["pageable_gib"] < 64 and row["tokens"] == 361 and row["trained_tokens"] == 360


def test_trainer_logs_the_figures(tmp_path: Path) -> None:
    model = with_lora(tiny_model())
    rows = [{"input_ids": d.ids, "labels": d.labels} for d in documents_of(40, 40, 40, 40)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, logging_steps=2, per_device_train_batch_size=1, report_to=[], use_cpu=True,
        save_strategy="no", eval_strategy="steps", eval_steps=2, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[OombCallback(sparse(), memory_report=True)]
    )
    trainer.train()
    logged = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert len(logged) == 2
    for logs in logged:
        assert logs["oomb_tokens"] == 80 and logs["oomb_trained_tokens"] == 78 and logs["oomb_pages_selected"] > 0
        assert logs["oomb_tokens_per_second"] > 0 and logs["oomb_pageable_gib"] > 0
    others = [logs for logs in trainer.state.log_history if "loss" not in logs]
    assert others and not any(name.startswith("oomb_") for logs in others for name in logs)


class Recorder:
    """A tracker that can be told to fail."""

    made: ClassVar[list[Recorder]] = []
    fails_at = 99
    refuses = False

    def __init__(self, run_name: str, **named: Any) -> None:
        self.name = "wandb"
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.settings: dict[str, Any] = {}
        self.finished = False
        Recorder.made.append(self)

    def start(self) -> None:
        if Recorder.refuses:
            raise RuntimeError("api_key not configured\nmore")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int) -> None:
        if step >= Recorder.fails_at:
            raise ConnectionError("the service is gone")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """Stands for wandb, which is not installed."""
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    plain = trackers.importlib.util.find_spec
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name == "wandb" or plain(name))
    return Recorder


def test_tensorboard_gets_every_step(settings: dict[str, Any], write_recipe: Write) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = write_recipe(settings | {"report_to": "tensorboard", "run_name": "mine"})
    assert main(["train", str(path)]) == 0
    out = Path(settings["output_dir"])
    events = EventAccumulator(str(out / "logs" / "mine"))
    events.Reload()
    found = {item.step: item.value for item in events.Scalars("train/loss")}
    rows = {row["step"]: row["loss"] for row in steps_of(out)}
    assert found.keys() == rows.keys() and all(math.isclose(found[n], rows[n], rel_tol=1e-6) for n in rows)
    assert {"train/grad_norm", "train/tokens_per_second", "train/pageable_gib"} <= set(events.Tags()["scalars"])


def test_a_tracker_that_fails_does_not_stop_the_run(
    settings: dict[str, Any],
    write_recipe: Write,
    recorder: type[Recorder],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recorder, "fails_at", 2)
    assert main(["train", str(write_recipe(settings | {"report_to": "all"}))]) == 0
    said = capsys.readouterr().out
    assert said.count("the tracker wandb failed") == 1 and "the service is gone" in said
    (made,) = recorder.made
    assert [step for step, _ in made.rows] == [1] and made.settings["oomb.chunk_tokens"] == 64
    assert len(steps_of(Path(settings["output_dir"]))) == 3
    assert (Path(settings["output_dir"]) / "logs" / "out").is_dir()  # "all" has tensorboard too


@pytest.mark.parametrize(
    ("report_to", "refuses", "said"),
    [
        ("trackio", False, ["trackio is not installed", "pip install trackio"]),
        ("wandb", True, ["wandb cannot be started", "api_key not configured", "report_to: none"]),
        ("tensorbord", False, ["report_to", "'tensorboard'"]),
    ],
    ids=str,
)
def test_trackers_that_cannot_be_used(
    settings: dict[str, Any],
    write_recipe: Write,
    recorder: type[Recorder],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report_to: str,
    refuses: bool,
    said: list[str],
) -> None:
    monkeypatch.setattr(recorder, "refuses", refuses)
    assert main(["train", str(write_recipe(settings | {"report_to": report_to}))]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in said) and "Traceback" not in error
    assert not Path(settings["output_dir"]).exists()


def test_a_tracker_that_refuses_the_settings_gets_no_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[int] = []

    class Picky:
        def __init__(self, *_: Any) -> None: ...

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            raise OSError("no space left on device")

        def log(self, values: dict[str, Any], step: int) -> None:
            logged.append(step)

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Picky)
    recipe = Recipe(model_name_or_path="m", data_path="d", output_dir="out", max_steps=1, report_to="tensorboard")
    accelerator: Any = SimpleNamespace(trackers=[])
    opened = trackers.Trackers(recipe, accelerator)
    for step in (1, 2):
        opened.log({"loss": 1.0}, step)
    assert accelerator.trackers == [] and logged == []
    assert capsys.readouterr().out.count("the tracker tensorboard failed") == 1
