"""Case 16 on a GPU: pages in host memory change no bit, however long their copies take."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.pages import CudaMover
from tests.harness.tolerance import assert_same_bits
from tests.test_gpu_parity import gpu_config, gpu_model
from tests.test_gpu_sparse import gpu_sparse

pytestmark = pytest.mark.gpu

PLAIN: dict[str, Any] = {"deterministic": True, "keep_outputs": False}
SETTINGS: dict[str, OombConfig] = {
    "dense": gpu_config(**PLAIN),
    "dense, bf16 page gradients": gpu_config(**PLAIN, page_grad_dtype="bfloat16"),
    "sparse": gpu_sparse(**PLAIN, page_grad_dtype="bfloat16"),
}


def two_steps(
    settings: OombConfig, num_tokens: int, model: Any = None, **changes: Any
) -> tuple[list[Tensor], dict[str, int] | None]:
    """Loss and gradients of two steps, and bytes copied."""
    model = model or gpu_model("qwen2 7:1 d128", num_hidden_layers=6).bfloat16()
    oomb_accel.enable(model, dataclasses.replace(settings, **changes))
    ids = torch.randint(0, 100, (1, num_tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    torch.cuda.synchronize()
    mover = attachment_of(model).offload.mover
    oomb_accel.disable(model)
    return found, mover.num_bytes if isinstance(mover, CudaMover) else None


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("delays", [False, True], ids=["as fast as it goes", "random delays"])
def test_offload_changes_no_bit(settings: str, delays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, nothing = two_steps(SETTINGS[settings], 9000)
    assert nothing is None
    if delays:
        delay_copies(monkeypatch)
    found, copied = two_steps(SETTINGS[settings], 9000, offload=True)
    assert copied is not None and min(copied.values()) > 2**20
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same_bits(ours, theirs)


def delay_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few copies their stream sleeps for up to milliseconds first."""
    chance = random.Random(0)
    original = CudaMover._order

    def order(self: CudaMover, stream: torch.cuda.Stream, marks: Iterable[Any]) -> None:
        original(self, stream, marks)
        if stream in (self._up, self._down) and chance.random() < 0.3:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(chance.randrange(10**4, 5 * 10**6))

    monkeypatch.setattr(CudaMover, "_order", order)
