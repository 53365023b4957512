"""``oomb_accel.prepare``: in one process, under DDP and under DeepSpeed, and what it refuses."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.integrations.attachment import STATE, attachment_of
from oomb_accel.integrations.prepare import refusals
from tests.distributed.ranks import needs_deepspeed, run_ranks
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
from tests.integrations.test_plugin import QUIET, accelerator_with, train_with


@pytest.fixture
def accelerator() -> Accelerator:
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True)


def _one_step(accelerator: Accelerator, model: nn.Module, prepared: Any, optimizer: Any) -> dict[str, Any]:
    chunks = count_chunks(model)
    loss = prepared(**batch()).loss
    accelerator.backward(loss)
    optimizer.step()
    return {"loss": loss.detach(), "after": trained(model), "chunks": len(chunks)}


def test_one_process(accelerator: Accelerator) -> None:
    model = lora_model()
    loader: Any = torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]
    given = (loader, model, optimizer(model))
    result = oomb_accel.prepare(accelerator, *given, config=OombConfig(**BLOCK))
    assert list(result[0]) == [1, 2, 3] and result[1] is model and hasattr(result[2], "step_was_skipped")
    got = _one_step(accelerator, model, result[1], result[2])
    assert_same_step(got["loss"], got["after"])
    assert got["chunks"] > 5
    assert attachment_of(model).notes[0].endswith("(prepare(config=...))")


def test_a_single_object_comes_back_bare(accelerator: Accelerator) -> None:
    model = lora_model()
    assert oomb_accel.prepare(accelerator, model, config=BLOCK) is model


def test_environment_and_defaults(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMB_CHUNK_TOKENS", "512")
    assert attachment_of(oomb_accel.prepare(accelerator, tiny_model())).config == OombConfig(chunk_tokens=512)


def test_a_model_that_accelerate_has_prepared_already(accelerator: Accelerator) -> None:
    model = lora_model()
    prepared, its_optimizer = accelerator.prepare(model, optimizer(model))
    again = oomb_accel.prepare(accelerator, prepared, config=BLOCK)
    got = _one_step(accelerator, model, again, its_optimizer)
    assert_same_step(got["loss"], got["after"])
    assert got["chunks"] > 5


def test_prepare_twice_with_equal_settings_is_fine_and_with_others_an_error(accelerator: Accelerator) -> None:
    model = oomb_accel.prepare(accelerator, lora_model(), config=BLOCK)
    notes = list(attachment_of(model).notes)
    oomb_accel.prepare(accelerator, model, config=BLOCK)
    assert attachment_of(model).notes == notes
    with pytest.raises(ValueError, match=r"chunk_tokens=16 in prepare\(.*\), and chunk_tokens=32 in prepare"):
        oomb_accel.prepare(accelerator, model, config={**BLOCK, "chunk_tokens": 32})
    with pytest.raises(ValueError, match=r"(?s)span_tokens=32768 by default in prepare.*span_tokens=64 in prepare"):
        oomb_accel.prepare(accelerator, model, config={**BLOCK, "span_tokens": 64})
    oomb_accel.disable(model)
    for _ in range(2):
        oomb_accel.prepare(accelerator, model, config={**BLOCK, "chunk_tokens": 32})
    assert attachment_of(model).config.chunk_tokens == 32
    assert "chunk_tokens=32" in attachment_of(model).notes[0]


def test_disabled_prepares_and_leaves_the_model_alone(accelerator: Accelerator) -> None:
    model = oomb_accel.prepare(accelerator, tiny_model(), config={"enabled": False})
    assert not hasattr(model, STATE)


def test_it_takes_one_model(accelerator: Accelerator) -> None:
    for objects, expected in (((), "Got 0 models"), ((tiny_model(), tiny_model()), "Got 2 models among 2 objects")):
        with pytest.raises(ValueError, match=expected):
            oomb_accel.prepare(accelerator, *objects)


def test_what_is_no_language_model_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        oomb_accel.prepare(accelerator, nn.Linear(2, 2))


def test_reentrant_checkpointing_is_refused(accelerator: Accelerator) -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="Reentrant"):
        oomb_accel.prepare(accelerator, model)
    assert not hasattr(model, STATE)


def _fake(**more: Any) -> Any:
    usual = {"distributed_type": DistributedType.MULTI_GPU, "mixed_precision": "bf16", "parallelism_config": None}
    usual["num_processes"] = 2
    return SimpleNamespace(**{**usual, **more})


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (_fake(distributed_type=DistributedType.FSDP), r"uses FSDP\. .*ZeRO 3 \(accelerate launch --use_deepspeed"),
        (_fake(distributed_type=DistributedType.MEGATRON_LM), "uses MEGATRON_LM"),
        (_fake(distributed_type=DistributedType.XLA), "uses XLA"),
        (_fake(mixed_precision="fp16"), "mixed_precision='bf16'"),
        (_fake(mixed_precision="fp8"), "'fp8'"),
        (_fake(parallelism_config=SimpleNamespace(tp_size=2)), "tp_size is 2.*Set tp_size=1"),
        (_fake(parallelism_config=SimpleNamespace(cp_size=4)), "cp_size is 4"),
        (_fake(parallelism_config=SimpleNamespace(sp_size=8)), "sp_size is 8"),
        (_fake(parallelism_config=SimpleNamespace(dp_shard_size=2)), "dp_shard_size is 2"),
    ],
)
def test_other_kinds_of_parallelism_are_refused_by_name(fake: Any, expected: str) -> None:
    (reason,) = refusals(fake)
    assert re.search(expected, reason)
    with pytest.raises(ValueError, match="Chunks cannot be trained with this Accelerator"):
        oomb_accel.prepare(SimpleNamespace(**vars(fake), state=SimpleNamespace(), prepare=None), tiny_model())


def test_ranks_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under DeepSpeed without a GPU, where Accelerate connects nobody."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    (reason,) = refusals(_fake(distributed_type=DistributedType.DEEPSPEED, num_processes=1))
    assert "knows one process, and 2 were started" in reason and "PartialState(backend='gloo')" in reason
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert refusals(_fake(num_processes=1)) == []


def test_data_parallelism_is_not_refused() -> None:
    sizes = SimpleNamespace(tp_size=1, cp_size=1, sp_size=1, dp_shard_size=1, dp_replicate_size=8)
    assert refusals(_fake(parallelism_config=sizes)) == []
    assert refusals(_fake(distributed_type=DistributedType.DEEPSPEED, mixed_precision="no")) == []


def _under_ddp(rank: int, prepared_before: bool) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = lora_model()
    its_optimizer: Any = optimizer(model)
    parallel: Any = model
    if prepared_before:
        parallel, its_optimizer = accelerator.prepare(model, its_optimizer)
        parallel = oomb_accel.prepare(accelerator, parallel, config={**BLOCK, "timeout_minutes": 7})
    else:
        parallel, its_optimizer = oomb_accel.prepare(
            accelerator, model, its_optimizer, config={**BLOCK, "timeout_minutes": 7}
        )
    group = dist.group.WORLD
    assert group is not None
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    got = _one_step(accelerator, model, parallel, its_optimizer)
    return {**got, "kind": type(parallel).__name__, "timeout": timeout}


@pytest.mark.parametrize("prepared_before", [False, True])
def test_two_ranks_under_ddp(prepared_before: bool, tmp_path: Path) -> None:
    for got in run_ranks(_under_ddp, prepared_before, folder=tmp_path, ranks=2):
        assert_same_step(got["loss"], got["after"])  # both have the same data
        assert got["chunks"] > 5 and got["kind"] == "DistributedDataParallel"
        assert got["timeout"] == timedelta(minutes=7)


def _under_deepspeed(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    plain = deepspeed.initialize
    got = train_with(partial(accelerator_with, DeepSpeedPlugin, hf_ds_config=config), ours=True)
    return {**got, "initialize is plain again": deepspeed.initialize is plain}


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_under_deepspeed(stage: int, tmp_path: Path) -> None:
    for got in run_ranks(_under_deepspeed, deepspeed_config(stage, BLOCK), folder=tmp_path, ranks=2):
        assert_same_step(got["loss"], got["after"])
        assert got["chunks"] > 5
        assert got["initialize is plain again"]
        assert "chunk_tokens=16, page_tokens=4, progress=False (the DeepSpeed config)" in got["notes"][0]


def _contradiction(rank: int, config: dict[str, Any]) -> str:
    accelerator = accelerator_with(DeepSpeedPlugin, hf_ds_config=config)
    try:
        oomb_accel.prepare(accelerator, lora_model(), config={"chunk_tokens": 32})
    except ValueError as error:
        return str(error)
    return "prepared"


@needs_deepspeed
def test_python_against_the_block_is_an_error(tmp_path: Path) -> None:
    (text,) = run_ranks(_contradiction, deepspeed_config(2, QUIET), folder=tmp_path, ranks=1)
    assert "chunk_tokens=32 in prepare(config=...)" in text and "chunk_tokens=16 in the DeepSpeed config" in text


def _engine_again(rank: int, config: dict[str, Any]) -> str:
    accelerator = accelerator_with(DeepSpeedPlugin, hf_ds_config=config)
    model = lora_model()
    engine, _ = accelerator.prepare(model, optimizer(model))
    with pytest.raises(ValueError) as error:
        oomb_accel.prepare(accelerator, engine)
    return str(error.value)


def test_an_engine_is_not_prepared_again(tmp_path: Path) -> None:
    config = {key: value for key, value in deepspeed_config(2, {}).items() if key != "oomb"}
    (said,) = run_ranks(_engine_again, config, folder=tmp_path, ranks=1)
    assert "DeepSpeed engine already" in said and "instead of to accelerator.prepare" in said
