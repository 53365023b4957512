"""One line about where pages lie: with the banner, or behind it, once for each place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb_accel
from oomb_accel import OombConfig
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model
from tests.harness.parity import config

RECORD = 2 * 4 * 16 * 4  # K and V, page, head_dim, fp32
WHOLE = 3 * 2 * 24 * RECORD / 2**20
"""MiB of the pages of 100 tokens: three layers, two KV heads, 24 pages that later chunks attend to."""


def loud(**settings: Any) -> OombConfig:
    return config(**{"progress": "auto", **settings})


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "pages " in line and "on the device" in line]


def test_it_is_in_the_banner_of_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    oomb_accel.enable(model, loud())
    model(**packed(documents_of(100)).batch)
    (line,) = lines(capsys.readouterr().err)
    assert line == (f"  pages      all on the device: K and V {WHOLE:.3g} MiB, gradients {WHOLE:.3g} MiB (100 tokens)")


def test_outputs_in_host_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomb_accel.integrations.step_memory._spare_bytes", lambda *rest: 50_000)
    model, room = tiny_model(), [0]
    monkeypatch.setattr("oomb_accel.integrations.step_memory._host_spare_bytes", lambda *rest: room[0])
    oomb_accel.enable(model, loud())
    for room[0] in (0, 64 << 20, 64 << 20):
        model(**packed(documents_of(100)).batch)
    on_device, on_host = lines(capsys.readouterr().err)
    assert "outputs" not in on_device
    assert on_host.startswith("oomb_accel: pages all on the device: ")
    assert on_host.endswith(" MiB; kept outputs on the host up to 0.0615 MiB (100 tokens)")


def test_host_memory_that_takes_long_to_make(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For pages, and for kept outputs; once."""
    monkeypatch.setattr("oomb_accel.integrations.step_memory._host_spare_bytes", lambda *rest: 64 << 20)
    for bytes_ in (1, 8 * 2**30):
        monkeypatch.setattr("oomb_accel.integrations.step_memory._LONG_IN_MAKING", bytes_)
        model = tiny_model()
        oomb_accel.enable(model, loud(span_tokens=8, device_pages_gib=1e-4))
        for _ in range(2):
            model(**packed(documents_of(200)).batch).loss.backward()
        said = [line for line in capsys.readouterr().err.splitlines() if "making" in line]
        assert len(said) == (2 if bytes_ == 1 else 0)
        assert all(line.endswith("GiB of host memory; the step begins when it is there") for line in said)


def test_a_banner_that_was_asked_for_before_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    oomb_accel.enable(model, loud(offload=True, span_tokens=8))
    assert not lines(oomb_accel.banner(model))
    model(**packed(documents_of(100)).batch)
    (line,) = lines(capsys.readouterr().err)
    assert line.startswith("oomb_accel: pages on the device K and V ") and f" of {WHOLE:.3g} MiB, gradients " in line
    assert "; on the host up to " in line and line.endswith(", pageable (100 tokens)")
    assert lines(oomb_accel.banner(model))


def test_once_for_each_place(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    oomb_accel.enable(model, loud(span_tokens=8))
    short, long = packed(documents_of(60)).batch, packed(documents_of(200)).batch
    free = [10**9]
    monkeypatch.setattr("oomb_accel.integrations.step_memory._bytes_with_outputs", lambda *rest: free[0])
    for size in (10**9, 60_000, 10**9, 60_000):
        free[0] = size
        model(**(short if size == 10**9 else long))
    said = lines(capsys.readouterr().err)
    assert ["all on the device" in line for line in said] == [True, False]


@pytest.mark.parametrize("case", ["quiet", "evaluation", "one chunk"])
def test_nothing_to_say(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    oomb_accel.enable(model, config() if case == "quiet" else loud())
    with torch.set_grad_enabled(case != "evaluation"):
        model(**packed(documents_of(12 if case == "one chunk" else 100)).batch)
    assert not lines(capsys.readouterr().err)
