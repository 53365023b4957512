"""Settings that are "auto" in a training step: chosen once, from what is free, and from wherever settings come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.integrations import auto
from oomb_accel.integrations.attachment import Attachment, attachment_of
from oomb_accel.integrations.switch import switch_on
from oomb_accel.plan import rates
from oomb_accel.sources import Source, from_deepspeed, from_environment, from_yaml, resolve
from tests.distributed.ranks import run_ranks
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model, twin
from tests.harness.parity import config

AUTO: dict[str, Any] = {"chunk_tokens": "auto", "page_grad_dtype": "auto"}
LONG, SHORT = packed(documents_of(1000)).batch, packed(documents_of(50)).batch


def switched_on(model: nn.Module, **settings: Any) -> Attachment:
    oomb_accel.enable(model, config(**{**AUTO, **settings}))
    return attachment_of(model)


def step(model: nn.Module, batch: dict[str, Any] = LONG) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def memory_for(state: Attachment, num_tokens: int) -> int:
    """Device memory in which a chunk of so many tokens has room, and pages of a thousand; Adam's moments beside it."""
    trained = sum(p.numel() for p in state.model.parameters())
    return rates.WORKSPACE_BYTES + (4 + 8) * trained + int(num_tokens * state.meter.bytes_per_token) + 3 * 2**20


def test_a_step_takes_the_chunk_that_fits_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    plain = twin(model)
    oomb_accel.enable(plain, config(chunk=512))
    state = switched_on(model)
    monkeypatch.setattr(auto, "free_bytes", lambda device: memory_for(state, 600))
    got, wanted = step(model), step(plain)
    assert (state.chunk_tokens, state.page_grad_dtype) == (512, torch.float32)
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in got)
    monkeypatch.setattr(auto, "free_bytes", lambda device: memory_for(state, 100_000))
    step(model, SHORT)
    assert state.chunk_tokens == 512 and state.config.chunk_tokens == "auto"


@pytest.mark.parametrize(("gib", "chosen"), [(100.0, torch.float32), (1e-3, torch.bfloat16)])
def test_storage_follows_what_pages_may_take(gib: float, chosen: torch.dtype) -> None:
    state = switched_on(tiny_model(), chunk_tokens=256, device_pages_gib=gib)
    step(state.model)
    assert (state.page_grad_dtype, state.chunk_tokens) == (chosen, 256)
    assert state.page_shape().grad_dtype == chosen


def test_evaluation_chooses_nothing() -> None:
    state = switched_on(tiny_model())
    with torch.no_grad():
        state.model(**SHORT)
    assert state.chosen is None and state.chunk_tokens == 8192
    step(state.model, SHORT)
    assert state.chosen is not None


def test_whoever_knows_the_longest_document_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = switched_on(tiny_model())
    monkeypatch.setattr(auto, "free_bytes", lambda device: memory_for(state, 600))
    state.stream_tokens = 1000
    step(state.model, SHORT)
    assert state.chunk_tokens == 512


def test_memory_is_left_to_an_optimizer_that_has_no_states_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    state = switched_on(tiny_model())
    monkeypatch.setattr(auto, "free_bytes", lambda device: 10**9)
    before = auto._found(state, torch.device("cpu")).device_bytes
    state.optimizer_stands = True
    assert auto._found(state, torch.device("cpu")).device_bytes == 10**9
    assert before == 10**9 - 8 * sum(p.numel() for p in state.model.parameters())


def test_the_banner_says_what_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    state = switched_on(tiny_model(), progress="auto")
    assert "chunks     auto (chosen at the first training step), pages 4" in oomb_accel.banner(state.model)
    step(state.model, SHORT)
    said = capsys.readouterr().err
    assert "chunk_tokens=8192 for 50 tokens: the usual one, which fits" in said
    assert "page_grad_dtype=float32 for 50 tokens" in said
    assert "chunks     8,192 tokens, pages 4" in oomb_accel.banner(state.model)


def test_a_model_of_unknown_size_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    state = switched_on(tiny_model())
    monkeypatch.setattr(state.base.config, "to_dict", lambda: {"model_type": "strange"})
    with pytest.raises(
        ValueError, match=r'"auto" cannot be chosen.*\n.*strange|"auto" cannot.*\n.*\n  Set chunk_tokens='
    ):
        step(state.model, SHORT)


def test_settings_come_from_everywhere(tmp_path: Path) -> None:
    (tmp_path / "preset.yaml").write_text("chunk_tokens: auto\npage_grad_dtype: auto\n")
    sources = [
        Source.of_python(AUTO, "here"),
        from_yaml(tmp_path / "preset.yaml"),
        *from_deepspeed({"oomb": AUTO}),
        *from_environment({"OOMB_CHUNK_TOKENS": "auto", "OOMB_PAGE_GRAD_DTYPE": "auto"}),
    ]
    for source in sources:
        found = resolve(source)
        assert (found.config.chunk_tokens, found.config.page_grad_dtype) == ("auto", "auto")
        assert any(note.startswith("auto ") and "chunk_tokens" in note for note in found.notes)
    assert resolve(*sources).config == OombConfig(**AUTO)


def test_contradictions() -> None:
    with pytest.raises(ValueError, match="chunk_tokens is set in two places"):
        resolve(Source.of_python(AUTO, "here"), *from_deepspeed({"oomb": {"chunk_tokens": 4096}}))
    model = tiny_model()
    state = switched_on(model)
    step(model, SHORT)  # what was chosen is no setting that somebody wrote down
    switch_on(model, resolve(Source.of_python(AUTO, "callback")))
    with pytest.raises(ValueError, match="chunk_tokens"):
        switch_on(model, resolve(Source.of_python({"chunk_tokens": 8192}, "callback")))
    assert state.chunk_tokens == 8192
    with pytest.raises(ValueError, match="'float32' or 'bfloat16' or 'auto'"):
        OombConfig(page_grad_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a whole number or 'auto'"):
        OombConfig(chunk_tokens="all")  # type: ignore[arg-type]


def _choose(rank: int) -> tuple[int | str, torch.dtype, str]:
    dist.init_process_group("gloo")
    state = switched_on(tiny_model())
    room = memory_for(state, (100_000, 600)[rank])
    auto.free_bytes = lambda device: room
    auto.choose_settings(state, LONG)
    return state.chunk_tokens, state.page_grad_dtype, state.notes[-1]


def test_ranks_agree_on_the_least(tmp_path: Path) -> None:
    first, second = run_ranks(_choose, folder=tmp_path)
    assert first[:2] == second[:2] == (512, torch.float32)
    assert "chunk_tokens=512" in first[2] and "the least of 2 ranks" in first[2]
