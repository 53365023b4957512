"""Case 18: memory that cannot do is an error before the step starts, in three lines, with a setting that works."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from oomb_accel import OombConfig
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.parameters import trained_parameters
from oomb_accel.progress import GIB
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model, twin
from tests.harness.parity import config, switched_on
from tests.harness.sparse import sparse

LAYOUT = packed(documents_of(100, 21, 70))
DENSE, SPARSE = config(span_tokens=8), sparse(span_tokens=8)
SETTINGS = pytest.mark.parametrize("settings", [DENSE, SPARSE], ids=["dense", "sparse"])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model(num_hidden_layers=3, hidden_size=32, intermediate_size=48)


def refusal(model: nn.Module, settings: OombConfig) -> str:
    """The error of a step that must not begin."""
    with switched_on(twin(model), settings) as ours:
        ours.get_submodule("model.layers.0").register_forward_pre_hook(_never)
        with pytest.raises(ValueError) as caught:
            ours(**LAYOUT.batch)
        arena = attachment_of(ours).offload.arena
        assert arena is None or arena.num_bytes == arena.free_bytes
    text = str(caught.value)
    assert len(text.splitlines()) == 3, text
    return text


def _never(*_: Any) -> None:
    raise AssertionError("the step has begun")


def succeeds(model: nn.Module, settings: OombConfig) -> None:
    """A whole step."""
    with switched_on(twin(model), settings) as ours:
        ours(**LAYOUT.batch).loss.backward()


def suggested(text: str, name: str) -> float:
    (value,) = re.findall(rf"{name}=(\d[\d.e-]*\d|\d)", text.splitlines()[2])
    return float(value)


@contextmanager
def free_memory(num_bytes: int) -> Iterator[None]:
    """A device that has so much free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_memory, "free_bytes", lambda device: num_bytes)
        yield


@SETTINGS
@pytest.mark.parametrize("page_grad_dtype", ["float32", "bfloat16"])
def test_device_memory_for_less_than_one_chunk(model: nn.Module, settings: OombConfig, page_grad_dtype: Any) -> None:
    settings = dataclasses.replace(settings, page_grad_dtype=page_grad_dtype)
    text = refusal(model, dataclasses.replace(settings, device_pages_gib=1e-7))
    assert "too little memory for the pages of one chunk" in text
    value = suggested(text, "device_pages_gib")
    assert value > 1e-7
    succeeds(model, dataclasses.replace(settings, device_pages_gib=value))
    refusal(model, dataclasses.replace(settings, device_pages_gib=0.95 * value))


@SETTINGS
@pytest.mark.parametrize("share", [0.7, 0.75, 0.85, 0.9])
def test_more_device_memory_than_is_free(
    model: nn.Module, settings: OombConfig, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that could use what the setting asks for; one that needs less has nothing to do with it."""
    monkeypatch.setattr(step_memory, "_other_bytes", lambda *_: 0)
    with switched_on(twin(model), settings) as ours:
        shape = attachment_of(ours).page_shape(sparse=settings.attention == "sparse")
        needed = shape.num_bytes(_schedule(ours), torch.float32)
    with free_memory(int(share * needed)):
        text = refusal(model, dataclasses.replace(settings, device_pages_gib=needed / GIB + 0.5))
        value = suggested(text, "device_pages_gib")
        assert 0.5 * share * needed < value * GIB <= share * needed
        succeeds(model, dataclasses.replace(settings, device_pages_gib=value))
    with free_memory(needed):
        succeeds(model, dataclasses.replace(settings, device_pages_gib=0.5))


def test_a_device_that_is_full(model: nn.Module) -> None:
    """What is there is not enough for a chunk, whatever the settings say."""
    with free_memory(1000):
        for settings in (DENSE, SPARSE):
            text = refusal(model, settings)
            assert "device_pages_gib" in text and "chunk_tokens" in text
            text = refusal(model, dataclasses.replace(settings, device_pages_gib=0.1))
            assert "free" in text


def test_no_limit_is_named_where_a_chunk_leaves_nothing(model: nn.Module) -> None:
    """A setting of 0 is none."""
    with free_memory(1000):
        text = refusal(model, dataclasses.replace(DENSE, device_pages_gib=0.1))
    assert text.startswith("device_pages_gib is more than the device has free.")
    assert text.endswith("  Free memory on the device, or set chunk_tokens lower.")


@SETTINGS
def test_without_offload_nothing_is_refused(model: nn.Module, settings: OombConfig) -> None:
    """The user has asked for it: what the device then says is not ours."""
    with free_memory(1000):
        succeeds(model, dataclasses.replace(settings, offload=False))


@SETTINGS
def test_what_does_not_fit_goes_to_the_host_by_itself(model: nn.Module, settings: OombConfig) -> None:
    text = refusal(model, dataclasses.replace(settings, device_pages_gib=1e-7))
    least = int(suggested(text, "device_pages_gib") * GIB)
    with switched_on(twin(model), settings) as ours:
        other = step_memory._other_bytes(attachment_of(ours), _schedule(ours), torch.float32, trained_parameters(ours))
        with free_memory(2 * least + other):
            ours(**LAYOUT.batch).loss.backward()
        offload = attachment_of(ours).offload
        assert offload.arena is not None and min(offload.copied_bytes().values()) > 0


@SETTINGS
@pytest.mark.parametrize("slab_bytes", [2048, 4096, 10_000, None])
def test_too_little_host_memory(
    model: nn.Module, settings: OombConfig, slab_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that the error names is enough for the whole step, however records lie in slabs."""
    if slab_bytes is not None:
        monkeypatch.setattr("oomb_accel.offload.slab_bytes_for", lambda *_: slab_bytes)
    settings = dataclasses.replace(settings, offload=True)
    text = refusal(model, dataclasses.replace(settings, host_memory_gib=1e-6))
    assert "host memory" in text
    succeeds(model, dataclasses.replace(settings, host_memory_gib=suggested(text, "host_memory_gib")))


def test_more_host_memory_than_the_machine_has(model: nn.Module) -> None:
    settings = dataclasses.replace(DENSE, offload=True)
    text = refusal(model, dataclasses.replace(settings, host_memory_gib=1e6))
    assert "more than this machine can give" in text
    value = suggested(text, "host_memory_gib")
    assert 0 < value < 1e6
    succeeds(model, dataclasses.replace(settings, host_memory_gib=0.9 * value))


def _schedule(model: nn.Module) -> Any:
    """How the batch is cut."""
    from oomb_accel.integrations.stream import build_stream

    chosen = attachment_of(model).config
    device = torch.device("cpu")
    return build_stream(
        LAYOUT.batch, chunk_tokens=chosen.known_chunk_tokens, page_tokens=chosen.page_tokens, device=device
    ).schedule
