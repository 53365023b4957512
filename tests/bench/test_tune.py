"""Launch configurations that are tried."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from oomb_accel.bench import tune
from oomb_accel.bench.timing import Task
from oomb_kernels.page_tiles import Tiles
from tests.bench.sizes import CPU, TINY


def test_tuning_prefers_the_fastest_and_says_what_does_not_run() -> None:
    sizes = replace(TINY, page_tokens=64, past=(256,), top_k=(2,))
    fastest = Tiles(64, 32, 4, 3)

    def launch(tiles: Tiles) -> None:
        if tiles.num_stages == 4:
            raise RuntimeError("out of resource: shared memory")

    def measure(tasks: Mapping[str, Task]) -> dict[str, float]:
        return {name: 1.0 if name == repr(fastest) else 2.0 for name in tasks}

    tried: list[str] = []
    results = tune.tune(
        sizes, measure, CPU, launches=lambda _: {"forward": launch, "backward_sum": launch}, on_kernel=tried.append
    )
    assert tried == ["forward", "backward_sum"]
    forward = [result for result in results if result.kernel == "forward"]
    assert forward[0].tiles == fastest and forward[0].tflops == pytest.approx(4 * 4 * 128 * 128 * 16 / 1e-3 / 1e12)
    assert sum(result.is_chosen for result in forward) == 1
    assert forward[-1].tiles.num_stages == 4 and "shared memory" in forward[-1].problem
    assert all(64 % result.tiles.block_m == 0 == 64 % result.tiles.block_n for result in results)
    table = tune.tuning_table(results)
    assert {result.tiles.num_heads for result in results if result.kernel == "backward_sum"} == {1, 2}
    assert "| forward | 64 | 32 | 4 | 3 | 1 | 1.000 |" in table and "in use" in table and "do not run" in table
    json.dumps([result.as_dict() for result in results], allow_nan=False)
