"""`oomb train` with settings that are "auto": chosen for the longest document, and told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from oomb_accel.cli import main
from oomb_accel.integrations import auto


def test_the_longest_document_decides(
    settings: dict[str, Any],
    write_recipe: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = mock.Mock(side_effect=auto.choose)
    monkeypatch.setattr(auto, "choose", spy)
    rows = Path(settings["data_path"]).with_name("two.jsonl")
    rows.write_text('{"text": "short"}\n{"text": "' + "long " * 60 + '"}\n')
    path = write_recipe(settings | {"data_path": str(rows), "max_steps": 2})
    assert main(["train", str(path), "--oomb.chunk_tokens", "auto", "--oomb.page_grad_dtype", "auto"]) == 0
    spy.assert_called_once()
    (job,) = spy.call_args.args
    assert job.tokens == 301 and job.lora_r == settings["lora_r"]
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert "chunk_tokens=8192 for 301 tokens" in said and "page_grad_dtype=float32 for 301 tokens" in said
