"""Under ZeRO 3, adapters stay whole where nobody said otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oomb_accel
from oomb_accel.integrations.zero3_layers import WHOLE_ELEMENTS, keep_adapters_whole
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.harness.models import tiny_model
from tests.integrations.setups import BLOCK, deepspeed_config, lora_model, optimizer

THRESHOLD = "stage3_param_persistence_threshold"


def test_only_adapters_under_zero_3_and_only_where_the_config_is_silent() -> None:
    silent, said = {"zero_optimization": {"stage": 3}}, {"zero_optimization": {"stage": 3, THRESHOLD: 5}}
    assert keep_adapters_whole(silent, lora_model())["zero_optimization"][THRESHOLD] == WHOLE_ELEMENTS
    assert silent == {"zero_optimization": {"stage": 3}}
    assert keep_adapters_whole(said, lora_model()) == said
    other_name = {"zero_optimization": {"stage": 3, "param_persistence_threshold": 5}}
    assert keep_adapters_whole(other_name, lora_model()) == other_name
    assert keep_adapters_whole(silent, tiny_model()) == silent, "full fine-tuning keeps DeepSpeed's default"
    assert keep_adapters_whole({"zero_optimization": {"stage": 2}}, lora_model())["zero_optimization"] == {"stage": 2}
    assert keep_adapters_whole({}, lora_model()) == {}


def _thresholds(rank: int, config: dict[str, Any], folder: Path) -> list[int]:
    found = []
    for said in (None, 7):
        zero = {**config["zero_optimization"], **({} if said is None else {THRESHOLD: said})}
        whole = {**config, "zero_optimization": zero}
        path = folder / f"{said}.json"
        path.write_text(json.dumps(whole))
        for place in (
            {"config": whole},
            {"config_params": str(path)},
            {"args": SimpleNamespace(deepspeed_config=str(path), local_rank=0)},
        ):
            model = lora_model()
            engine, *_ = oomb_accel.deepspeed.initialize(model=model, optimizer=optimizer(model), **place)
            found.append(engine.zero_param_persistence_threshold())
    return found


@needs_deepspeed
def test_the_engine_is_given_it(tmp_path: Path) -> None:
    config = deepspeed_config(3, {**BLOCK, "self_test": False})
    del config["zero_optimization"][THRESHOLD]
    (got,) = run_ranks(_thresholds, config, tmp_path, folder=tmp_path, ranks=1)
    assert got == [WHOLE_ELEMENTS] * 3 + [7] * 3
