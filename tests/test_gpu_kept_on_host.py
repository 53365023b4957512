"""Kept results in host memory on a GPU: the same bits however long their copies take, no more memory than planned."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.keep import KeptChunks, place_results
from tests.harness.models import with_lora
from tests.harness.stop import stopping
from tests.harness.tolerance import assert_same_bits
from tests.test_gpu_offload import delay_copies, two_steps
from tests.test_gpu_parity import gpu_config, gpu_model
from tests.test_gpu_sparse import gpu_sparse

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, OombConfig] = {
    "dense": gpu_config(deterministic=True),
    "sparse": gpu_sparse(deterministic=True, page_grad_dtype="bfloat16"),
    "all run again": gpu_sparse(deterministic=True, keep_last_graph=False),
}
TOKENS = 9000


def lora_model() -> Any:
    return with_lora(gpu_model("qwen2 7:1 d128", num_hidden_layers=6)).cuda().bfloat16()


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KeptChunks, int]]:
    """What steps keep where, and the device's room: for results on their way, and for as many others."""
    found = list[tuple[KeptChunks, int]]()

    def place(kinds: Any, chunks: Any, _: int, host_bytes: int) -> KeptChunks:
        room = 1
        while not place_results(kinds, chunks, room, host_bytes).on_host:
            room *= 2
        found.append((place_results(kinds, chunks, 2 * room, host_bytes), 2 * room))
        return found[-1][0]

    monkeypatch.setattr(step_memory, "place_results", place)
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("delays", [False, True], ids=["as fast as it goes", "random delays"])
def test_no_bit_changes(
    settings: str, delays: bool, placed: list[tuple[KeptChunks, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, nothing = two_steps(SETTINGS[settings], TOKENS, lora_model(), keep_outputs=False)
    assert nothing is None and not placed
    if delays:
        delay_copies(monkeypatch)
    found, copied = two_steps(SETTINGS[settings], TOKENS, lora_model())
    assert all(step.on_host and step.on_device for step, _ in placed)
    assert copied is not None and copied["up"] == copied["down"] > 2**22
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(gpu_config(deterministic=True, page_grad_dtype="float32"), id="dense"),
        pytest.param(gpu_config(deterministic=True, page_grad_dtype="bfloat16"), id="dense, bf16 page gradients"),
        pytest.param(SETTINGS["sparse"], id="sparse"),
    ],
)
@pytest.mark.parametrize("delays", [False, True], ids=["as fast as it goes", "random delays"])
def test_no_bit_changes_beside_pages(settings: OombConfig, delays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the device has room for a part."""
    wanted, _ = two_steps(settings, TOKENS, lora_model(), keep_outputs=False)
    _, of_pages = two_steps(settings, TOKENS, lora_model(), keep_outputs=False, device_pages_gib=0.035)
    if delays:
        delay_copies(monkeypatch)
    found, copied = two_steps(settings, TOKENS, lora_model(), device_pages_gib=0.035)
    assert of_pages is not None and copied is not None
    assert copied["down"] > of_pages["down"] + 2**22 and of_pages["down"] > 2**20
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same_bits(ours, theirs)


def test_memory_is_flat_and_a_step_that_fails_gives_it_back(placed: list[tuple[KeptChunks, int]]) -> None:
    model = lora_model()
    ids = torch.randint(0, 100, (1, TOKENS), device="cuda")
    oomb_accel.enable(model, SETTINGS["sparse"])
    offload, sizes = attachment_of(model).offload, []
    layer = model.get_submodule("base_model.model.model.layers.3")
    for number in range(30):
        call = {10: 20, 20: 50}.get(number)
        with nullcontext() if call is None else stopping(layer, call):
            model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        assert offload.arena is not None and offload.arena.free_bytes == offload.arena.num_bytes
        sizes.append((offload.arena.num_bytes, torch.cuda.memory_allocated()))
    oomb_accel.disable(model)
    assert len({host for host, _ in sizes}) == 1
    assert len({device for _, device in sizes[2:]}) == 1


def test_the_device_has_no_more_than_planned(placed: list[tuple[KeptChunks, int]]) -> None:
    """Beside what a step with nothing kept has."""
    peaks = []
    for keep in (False, "auto"):
        model = lora_model()
        settings = dataclasses.replace(SETTINGS["sparse"], keep_outputs=keep)
        two_steps(settings, TOKENS, model)
        torch.cuda.reset_peak_memory_stats()
        two_steps(settings, TOKENS, model)
        peaks.append(torch.cuda.max_memory_allocated())
        del model
        gc.collect()
    _, room = placed[-1]
    assert peaks[1] - peaks[0] < 1.1 * room
