"""``OombPlugin``: a plain Accelerate script with it trains in chunks; its block is checked when it is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs

import oomb_accel
from oomb_accel import OombConfig, OombPlugin
from oomb_accel.sources import LAUNCHED_CONFIG
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.integrations.setups import (
    BLOCK,
    assert_same_step,
    batch,
    count_chunks,
    deepspeed_config,
    lora_model,
    optimizer,
    trained,
)

pytestmark = needs_deepspeed
QUIET = {**BLOCK, "self_test": False}


def train_with(make_accelerator: Callable[[], Accelerator], *, ours: bool) -> dict[str, Any]:
    """One step of a usual Accelerate script; ``ours`` goes by way of ``oomb_accel.prepare``."""
    model = lora_model()  # first: an Accelerator for ZeRO 3 would shard it while it is made, before it has its weights
    accelerator = make_accelerator()
    objects = (model, optimizer(model))
    engine, prepared = oomb_accel.prepare(accelerator, *objects) if ours else accelerator.prepare(*objects)
    chunks = count_chunks(model)
    loss = engine(**batch()).loss
    accelerator.backward(loss)
    prepared.step()
    prepared.zero_grad()
    state = getattr(model, "_oomb_attachment", None)
    notes = [] if state is None else state.notes
    block = accelerator.deepspeed_plugin.deepspeed_config["oomb"]
    return {
        "loss": loss.detach(),
        "after": trained(model),
        "chunks": len(chunks),
        "notes": notes,
        "block": dict(block),
    }


def accelerator_with(kind: type[DeepSpeedPlugin], *, mixed_precision: str = "no", **settings: Any) -> Accelerator:
    return Accelerator(
        deepspeed_plugin=kind(**settings),
        mixed_precision=mixed_precision,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def _with_plugin(rank: int, path: str | None, oomb: Any) -> dict[str, Any]:
    return train_with(partial(accelerator_with, OombPlugin, hf_ds_config=path, oomb=oomb), ours=False)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_plain_script_with_the_plugin_trains_in_chunks(stage: int, tmp_path: Path) -> None:
    """The "auto" in the block would be refused by Accelerate, were it not resolved."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(deepspeed_config(stage, {**BLOCK, "keep_outputs": "auto"})))
    (got,) = run_ranks(_with_plugin, str(path), OombConfig(backend="torch"), folder=tmp_path, ranks=1)
    assert_same_step(got["loss"], got["after"])
    assert got["chunks"] > 5
    assert got["block"] == {"enabled": True, **BLOCK, "backend": "torch"}
    notes = "\n".join(got["notes"])
    assert f"keep_outputs=auto ({path})" in notes and "backend=torch (OombPlugin(oomb=...))" in notes
    assert "auto       keep_outputs" in notes


def test_the_file_of_accelerate_launch_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(deepspeed_config(2, QUIET)))
    (got,) = run_ranks(_with_plugin, None, None, folder=tmp_path, ranks=1, environment={LAUNCHED_CONFIG: str(path)})
    assert got["chunks"] > 5 and str(path) in got["notes"][0]


def test_without_any_settings_the_plugin_stands_for_the_defaults() -> None:
    plugin = OombPlugin(hf_ds_config=deepspeed_config(2))
    oomb_accel.deepspeed.uninstall()
    assert plugin.resolved.config == OombConfig()
    assert plugin.deepspeed_config["oomb"] == {"enabled": True}
    assert isinstance(plugin, DeepSpeedPlugin)


def test_python_may_be_a_mapping_and_environment_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMB_PAGE_TOKENS", "32")
    plugin = OombPlugin(hf_ds_config=deepspeed_config(2), oomb={"chunk_tokens": 64})
    oomb_accel.deepspeed.uninstall()
    assert plugin.resolved.config == OombConfig(chunk_tokens=64, page_tokens=32)


@pytest.mark.parametrize(
    ("block", "oomb", "expected"),
    [
        ({"chunk_token": 16}, None, "(?s)'chunk_token' in the oomb block of .*ds.json.*'chunk_tokens'"),
        ({"span_tokens": "auto"}, None, "span_tokens"),
        ({"chunk_tokens": 512}, {"chunk_tokens": 1024}, r"(?s)1024 in OombPlugin\(oomb=...\).*512 in .*ds.json"),
        ({}, {"chunk_token": 16}, r"(?s)'chunk_token' in OombPlugin\(oomb=...\).*'chunk_tokens'"),
    ],
)
def test_wrong_settings_are_an_error_when_the_plugin_is_made(
    block: dict[str, Any], oomb: Any, expected: str, tmp_path: Path
) -> None:
    import deepspeed

    path = tmp_path / "ds.json"
    path.write_text(json.dumps(deepspeed_config(2, block)))
    plain = deepspeed.initialize
    with pytest.raises(ValueError, match=expected):
        OombPlugin(hf_ds_config=str(path), oomb=oomb)
    assert deepspeed.initialize is plain


def test_a_misspelt_block_beside_python_settings_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"(?s)Unknown key 'ooomb'.*'oomb'"):
        OombPlugin(hf_ds_config={**deepspeed_config(2), "ooomb": BLOCK}, oomb=BLOCK)


def _half_precision(rank: int, config: dict[str, Any]) -> str:
    try:
        train_with(partial(accelerator_with, OombPlugin, mixed_precision="fp16", hf_ds_config=config), ours=False)
    except ValueError as error:
        return str(error)
    return "trained"


def test_fp16_is_refused_at_prepare(tmp_path: Path) -> None:
    (text,) = run_ranks(_half_precision, deepspeed_config(2, QUIET), folder=tmp_path, ranks=1)
    assert "fp16 is on" in text and '"bf16": {"enabled": true}' in text


def _mixed(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    make = partial(accelerator_with, OombPlugin, mixed_precision="bf16", hf_ds_config=config)
    return train_with(make, ours=False)


def test_bf16_trains_and_the_self_test_passes_in_it(tmp_path: Path) -> None:
    (got,) = run_ranks(_mixed, deepspeed_config(2, BLOCK), folder=tmp_path, ranks=1)
    assert got["chunks"] > 5 and torch.isfinite(got["loss"])
    assert all(weights.dtype == torch.bfloat16 for weights in got["after"].values())
