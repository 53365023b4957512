"""``oomb_accel.deepspeed.initialize`` and ``install``: the block is honoured, and what cannot work is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import oomb_accel
from oomb_accel.config import OombConfig
from oomb_accel.integrations import engine as engine_module
from oomb_accel.integrations import versions
from oomb_accel.integrations.attachment import STATE
from oomb_accel.integrations.engine import check_setup
from tests.distributed.ranks import ROOT, needs_deepspeed, run_ranks
from tests.harness.models import tiny_model
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


def _step(engine: Any) -> dict[str, Any]:
    chunks = count_chunks(engine.module)
    loss = engine(**batch()).loss
    engine.backward(loss)
    engine.step()
    state = getattr(engine.module, STATE, None)
    return {
        "loss": loss.detach(),
        "after": trained(engine.module),
        "chunks": len(chunks),
        "notes": [] if state is None else state.notes,
    }


def _ours(rank: int, config: Any, oomb: Any = None) -> dict[str, Any]:
    model = lora_model()
    engine, *_ = oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer(model), config=config, oomb=oomb)
    return {**_step(engine), "block": engine.config["oomb"]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_equals_full_attention_and_the_banner_says_what_was_set(stage: int, tmp_path: Path) -> None:
    block = {**BLOCK, "keep_outputs": "auto"}
    environment = {"OOMB_BACKEND": "torch", "OOMB_KEEP_OUTPUTS": "true"}
    (got,) = run_ranks(_ours, deepspeed_config(stage, block), folder=tmp_path, ranks=1, environment=environment)
    assert_same_step(got["loss"], got["after"])
    assert got["chunks"] > 5
    notes = "\n".join(got["notes"])
    assert "chunk_tokens=16, page_tokens=4, progress=False (the DeepSpeed config)" in notes
    assert "keep_outputs=True (OOMB_KEEP_OUTPUTS)" in notes and "backend=torch (OOMB_BACKEND)" in notes
    assert "keep_outputs=True (OOMB_KEEP_OUTPUTS) replaces auto (the DeepSpeed config)" in notes
    assert "self-test  update off by" in notes and "timeout " in notes and f", ZeRO {stage}, fp32" in notes
    assert got["block"] == {"enabled": True, **BLOCK, "backend": "torch", "keep_outputs": True}


def _forms(rank: int, path: str) -> list[int]:
    chunks = []
    for arguments in (
        {"config": path},
        {"config_params": json.loads(Path(path).read_text())},
        {"args": SimpleNamespace(deepspeed_config=path, local_rank=0)},
    ):
        model = lora_model()
        engine, *_ = oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer(model), **arguments)
        chunks.append(_step(engine)["chunks"])
    return chunks


def test_every_way_to_pass_a_config_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(deepspeed_config(2, {**BLOCK, "self_test": False})))
    (chunks,) = run_ranks(_forms, str(path), folder=tmp_path, ranks=1)
    assert min(chunks) > 5


def _installed(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    plain = deepspeed.initialize
    oomb_accel.deepspeed.install()
    first = deepspeed.initialize
    oomb_accel.deepspeed.install()
    got: dict[str, Any] = {"twice is once": deepspeed.initialize is first, "wrapped": first is not plain}
    model = lora_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    got["with block"] = _step(engine)["chunks"]
    without = {key: value for key, value in config.items() if key != "oomb"}
    model = lora_model()
    deepspeed.initialize(model=model, optimizer=optimizer(model), config=without)
    got["without block"] = hasattr(model, STATE)
    oomb_accel.deepspeed.uninstall()
    got["undone"] = deepspeed.initialize is plain
    model = lora_model()
    deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    got["after undoing"] = hasattr(model, STATE)
    return got


def test_install_makes_deepspeed_honour_a_block_and_nothing_else(tmp_path: Path) -> None:
    config = deepspeed_config(2, BLOCK)
    (got,) = run_ranks(_installed, config, folder=tmp_path, ranks=1)
    assert got.pop("with block") > 5
    assert got == {
        "twice is once": True,
        "wrapped": True,
        "without block": False,
        "undone": True,
        "after undoing": False,
    }


def _already_on(rank: int, config: dict[str, Any]) -> list[str]:
    texts = []
    for settings in (OombConfig(**BLOCK), OombConfig(**{**BLOCK, "chunk_tokens": 32})):
        model = oomb_accel.enable(lora_model(), settings)
        try:
            oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
            texts.append("fine")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_a_model_that_is_on_already_must_agree(tmp_path: Path) -> None:
    (got,) = run_ranks(_already_on, deepspeed_config(2, BLOCK), folder=tmp_path, ranks=1)
    assert got[0] == "fine"
    assert "chunk_tokens=32 in enable(model, ...)" in got[1] and "chunk_tokens=16 in the DeepSpeed config" in got[1]


def test_nothing_to_switch_on_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"(?s)nothing to switch on.*OOMB_ variables.*\"oomb\": \{"):
        oomb_accel.deepspeed.initialize(model=tiny_model(), config=deepspeed_config(2))


def test_python_against_the_block_names_both_places() -> None:
    with pytest.raises(ValueError, match=r"(?s)chunk_tokens=32 in initialize\(oomb=...\).*chunk_tokens=16 in the Deep"):
        oomb_accel.deepspeed.initialize(
            model=tiny_model(), config=deepspeed_config(2, BLOCK), oomb=OombConfig(chunk_tokens=32, page_tokens=4)
        )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": {"enabled": True}}, '"bf16": {"enabled": true}'),
    ({"amp": {"enabled": True}}, "fp16 is on"),
    ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size is 2"),
    ({"sequence_parallel_size": 4}, "sequence_parallel_size is 4"),
    ({"hybrid_engine": {"enabled": True}}, "hybrid_engine is on"),
    ({"compile": {"deepcompile": True}}, "deepcompile"),
]


@pytest.mark.parametrize(("more", "expected"), REFUSED, ids=[next(iter(more)) for more, _ in REFUSED])
def test_setups_that_cannot_work_are_refused_before_anything_starts(more: dict[str, Any], expected: str) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="Chunks cannot be trained with this DeepSpeed setup") as caught:
        oomb_accel.deepspeed.initialize(model=model, config=deepspeed_config(2, BLOCK, **more))
    assert expected in str(caught.value)
    assert not hasattr(model, STATE)


def test_sizes_of_an_mpu_count_too() -> None:
    mpu = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2, get_model_parallel_world_size=lambda: 1)
    with pytest.raises(ValueError, match="mpu's sequence parallel size is 2"):
        check_setup({}, tiny_model(), mpu)
    check_setup({}, tiny_model(), SimpleNamespace(get_sequence_parallel_world_size=lambda: 1))


def test_pipelines_and_missing_models_are_refused() -> None:
    pipeline = type("PipelineModule", (nn.Module,), {})()
    with pytest.raises(ValueError, match="Pipeline parallelism"):
        check_setup({}, pipeline)
    with pytest.raises(ValueError, match="model is NoneType"):
        oomb_accel.deepspeed.initialize(config=deepspeed_config(2, BLOCK))
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        oomb_accel.deepspeed.initialize(model=nn.Linear(2, 2), config=deepspeed_config(2, BLOCK))


def test_base_weights_in_8_bits_are_refused_under_zero_3() -> None:
    """Before the self-test and everything else that takes time."""
    config = deepspeed_config(3, {**BLOCK, "base_dtype": "float8"})
    with pytest.raises(ValueError, match=r"ZeRO 3 holds weights in parts.*\n.*\n.*ZeRO 2"):
        oomb_accel.deepspeed.initialize(model=tiny_model(), config=config)


def test_reentrant_checkpointing_is_refused() -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="Reentrant gradient checkpointing"):
        oomb_accel.deepspeed.initialize(model=model, config=deepspeed_config(2, BLOCK))


@pytest.mark.parametrize("installed", ["0.19.4", "0.20.0", "0.18.9"])
def test_another_deepspeed_is_refused(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda package: installed)
    with pytest.raises(RuntimeError, match=rf"(?s){installed}.*>=0.19.5,<0.20.*pip install 'deepspeed>=0.19.5,<0.20'"):
        oomb_accel.deepspeed.initialize(model=tiny_model(), config=deepspeed_config(2, BLOCK))


@pytest.mark.parametrize("package", ["transformers", "accelerate", "peft"])
def test_other_packages_are_looked_at_too(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = versions.version
    monkeypatch.setattr(versions, "version", lambda name: "0.1" if name == package else plain(name))
    with pytest.raises(RuntimeError, match=rf"(?s)another version of {package}.*Installed: 0\.1"):
        oomb_accel.deepspeed.initialize(model=tiny_model(), config=deepspeed_config(2, BLOCK))


def test_the_ranges_are_those_of_the_package() -> None:
    declared = re.findall(r'"([^"]+)"', (ROOT / "pyproject.toml").read_text())
    for package, allowed in versions.RANGES.items():
        assert f"{package}{allowed}" in declared


def test_disabled_leaves_everything_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def plain(model: Any = None, config: Any = None) -> tuple[Any, ...]:
        calls.append(model)
        return (model,)

    monkeypatch.setattr(engine_module, "_plain", lambda: plain)
    model = tiny_model()
    oomb_accel.deepspeed.initialize(model=model, config={"oomb": {"enabled": False}, "fp16": {"enabled": True}})
    assert calls == [model] and not hasattr(model, STATE)


def _leaves(rank: int, config: dict[str, Any], checkpointing: bool) -> list[str]:
    from deepspeed.utils import get_z3_leaf_modules

    model = tiny_model("olmoe")  # not among the classes that DeepSpeed knows itself
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    _step(engine)
    return [type(module).__name__ for module in get_z3_leaf_modules(model)]


@pytest.mark.parametrize(
    ("stage", "checkpointing", "expected"),
    [(2, False, []), (3, False, ["OlmoeDecoderLayer"] * 3), (3, True, ["OlmoeSparseMoeBlock"] * 3)],
)
def test_zero_3_gathers_whole_layers(stage: int, checkpointing: bool, expected: list[str], tmp_path: Path) -> None:
    config = deepspeed_config(stage, {**BLOCK, "self_test": False})
    (got,) = run_ranks(_leaves, config, checkpointing, folder=tmp_path, ranks=1)
    assert got == expected


def _with_auto(rank: int, config: dict[str, Any]) -> str:
    model = lora_model()
    with pytest.raises(ValueError) as error:
        oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    return str(error.value)


def test_auto_that_nobody_fills_in_is_refused(tmp_path: Path) -> None:
    config = deepspeed_config(2, BLOCK)
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    (said,) = run_ranks(_with_auto, config, folder=tmp_path, ranks=1)
    assert '"auto" for zero_optimization.reduce_bucket_size' in said


def _broken_self_test(rank: int, config: dict[str, Any]) -> str:
    model = lora_model()
    engine_module.self_test = _fails  # type: ignore[assignment]
    try:
        oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    except RuntimeError as error:
        return str(error)
    return "trained"


def _fails(*arguments: Any) -> float:
    raise RuntimeError("Gradients of several chunks do not add up")


def test_the_self_test_runs_first_unless_it_is_turned_off(tmp_path: Path) -> None:
    (on,) = run_ranks(_broken_self_test, deepspeed_config(1, BLOCK), folder=tmp_path, ranks=1)
    (off,) = run_ranks(_broken_self_test, deepspeed_config(1, {**BLOCK, "self_test": False}), folder=tmp_path, ranks=1)
    assert "do not add up" in on and off == "trained"


def _shared_memory(rank: int, config: dict[str, Any]) -> bool:
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = True
    oomb_accel.deepspeed.install()
    return bool(deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed has its shared-memory operator on CPUs only")
def test_shared_memory_collectives_are_off_on_the_cpu(tmp_path: Path) -> None:
    assert run_ranks(_shared_memory, {}, folder=tmp_path, ranks=1) == [False]
