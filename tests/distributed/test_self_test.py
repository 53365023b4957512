"""The self-test before training passes where gradients add up, and fails where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oomb_accel import gradients
from tests.distributed.ranks import RanksFailed, needs_deepspeed, run_ranks

pytestmark = needs_deepspeed


def _run(rank: int, config: dict[str, Any], fault: str | None) -> tuple[float, bool]:
    import deepspeed

    from oomb_accel.integrations.self_test import self_test

    dist.init_process_group("gloo")
    if fault is not None:
        FAULTS[fault]()
    state = torch.get_rng_state()
    return self_test(config, deepspeed.initialize), torch.equal(state, torch.get_rng_state())


def _only_the_last_pass() -> None:
    def results(self: Any) -> list[Tensor | None]:
        return [self.last_grads[i].to(p.dtype) for i, p in enumerate(self.leaves)]

    def add(self: Any, log_probs_N: Tensor, grad_N: Tensor, embeds_1TD: Tensor | None, *, last: bool) -> None:
        self.last_grads = torch.autograd.grad(log_probs_N, list(self.leaves), grad_N)

    gradients.ReturnedGradients.add = add  # type: ignore[method-assign]
    gradients.ReturnedGradients.results = results  # type: ignore[method-assign]


def _nothing_put_aside() -> None:
    def collect(self: Any) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    gradients.DeferredGradients._collect = collect  # type: ignore[method-assign]


FAULTS = {"only the last pass": _only_the_last_pass, "nothing put aside": _nothing_put_aside}


PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "offload": {"offload": True}}
CASES = [(stage, name) for stage in range(4) for name in PRECISIONS if (stage, name) != (0, "offload")]
"""ZeRO 0 has no offload."""


@pytest.mark.parametrize(("stage", "name"), CASES)
def test_chunks_add_up(tmp_path: Path, stage: int, name: str) -> None:
    more = PRECISIONS[name]
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if more.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {"zero_optimization": zero, "bf16": more.get("bf16", {}), "gradient_clipping": 0.1, "optimizer": "auto"}
    for error, same_state in run_ranks(_run, config, None, folder=tmp_path):
        assert error < (0.1 if "bf16" in more else 1e-5)
        assert same_state


@pytest.mark.parametrize(("stage", "fault"), [(2, "only the last pass"), (3, "nothing put aside")])
def test_a_lost_chunk_is_noticed(tmp_path: Path, stage: int, fault: str) -> None:
    with pytest.raises(RanksFailed, match="do not add up"):
        run_ranks(_run, {"zero_optimization": {"stage": stage}}, fault, folder=tmp_path)
