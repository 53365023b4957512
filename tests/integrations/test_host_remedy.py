"""Host memory that pages have no room in: what the refusal names is not set already, and is enough."""

from __future__ import annotations

import ast
import mmap
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from oomb_accel import OombConfig
from oomb_accel.integrations import step_memory
from oomb_accel.plan import sizes
from oomb_accel.progress import GIB
from tests.harness.batches import documents_of, packed
from tests.harness.models import tiny_model, twin
from tests.harness.parity import config, switched_on
from tests.harness.sparse import sparse
from tests.host.machines import machine

KIB = 1024
MARGIN = 4 * GIB
TOKENS, MORE_TOKENS = 240, 400
DENSE = config(span_tokens=8, device_pages_gib=150 * KIB / GIB)
SPARSE = sparse(span_tokens=8, device_pages_gib=150 * KIB / GIB, top_k=1, q_block=64)
NARROW: dict[str, Any] = {"page_grad_dtype": "bfloat16"}
SMALL: dict[str, Any] = {"page_grad_dtype": "bfloat16", "page_dtype": "float8"}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model()


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SMALLEST_SLAB_BYTES", "LARGEST_SLAB_BYTES"):
        monkeypatch.setattr(sizes, name, mmap.PAGESIZE)


@pytest.fixture
def full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no more for pages than the settings say."""
    monkeypatch.setattr(step_memory, "free_bytes", lambda device: 151 * KIB)


def refusal(model: nn.Module, settings: OombConfig, tokens: int = TOKENS) -> str:
    """The error of a step, or no text where it runs."""
    with switched_on(twin(model), settings) as ours:
        try:
            ours(**packed(documents_of(tokens)).batch).loss.backward()
        except ValueError as error:
            text = str(error)
            assert text.startswith("The pages of this document need more host memory than they may have."), text
            assert len(text.splitlines()) == 3
            return text.splitlines()[2]
    return ""


def named(remedy: str) -> list[dict[str, Any]]:
    """The settings of which each will do."""
    if not remedy.startswith("  Set "):
        return []
    alternatives = remedy.removeprefix("  Set ").removesuffix(".").split(", or ")
    return [dict(_pair(part) for part in alternative.split(" and ")) for alternative in alternatives]


def _pair(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, ast.literal_eval(value.removesuffix(" or 'auto'"))


@pytest.mark.parametrize("settings", [DENSE, SPARSE, replace(DENSE, **NARROW), replace(SPARSE, **NARROW)])
@pytest.mark.parametrize("kib", [20, 60, 110])
def test_what_is_named_is_not_set_and_is_enough(
    model: nn.Module, settings: OombConfig, kib: int, full_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that has no more."""
    monkeypatch.setattr("oomb_accel.offload.host_limits", lambda: machine(MARGIN + kib * KIB))
    remedy = refusal(model, settings)
    found = named(remedy)
    assert "host_memory_gib" not in remedy
    for change in found:
        assert all(getattr(settings, name) != value for name, value in change.items())
        assert not refusal(model, replace(settings, **change)), change
    for change in (NARROW, {"page_dtype": "float8"}):
        if change not in found and remedy and all(getattr(settings, name) != value for name, value in change.items()):
            assert refusal(model, replace(settings, **change)), change
    assert "documents" not in remedy or not found


def _check_longest(model: nn.Module, settings: OombConfig, remedy: str) -> None:
    (text,) = re.findall(r"Train on documents of up to ([\d,]+) tokens", remedy)
    longest = int(text.replace(",", ""))
    assert 0 < longest < MORE_TOKENS
    assert not refusal(model, settings, longest)
    assert refusal(model, settings, longest + settings.page_tokens)


def test_where_nothing_is_left_to_set_the_longest_document_is_named(
    model: nn.Module, full_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomb_accel.offload.host_limits", lambda: machine(MARGIN + 40 * KIB))
    settings = replace(DENSE, **SMALL)
    remedy = refusal(model, settings, MORE_TOKENS)
    assert "Set" not in remedy
    _check_longest(model, settings, remedy)


@pytest.mark.parametrize("settings", [DENSE, replace(DENSE, **SMALL)])
def test_a_limit_that_is_too_low_is_named_with_a_number_that_will_do(model: nn.Module, settings: OombConfig) -> None:
    limited = replace(settings, host_memory_gib=20 * KIB / GIB)
    first, *_ = named(refusal(model, limited, MORE_TOKENS))
    assert list(first) == ["host_memory_gib"]
    assert not refusal(model, replace(settings, **first), MORE_TOKENS)
    assert not refusal(model, settings, MORE_TOKENS)


def test_a_limit_is_not_to_be_raised_beyond_the_machine(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomb_accel.offload.host_limits", lambda: machine(MARGIN + 40 * KIB))
    remedy = refusal(model, replace(DENSE, **SMALL, host_memory_gib=20 * KIB / GIB), MORE_TOKENS)
    assert remedy and "host_memory_gib" not in remedy


def test_what_other_settings_take_from_pages_is_given_back_first(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offload of everything, and a limit on the device."""
    monkeypatch.setattr("oomb_accel.offload.host_limits", lambda: machine(MARGIN + 40 * KIB))
    assert named(refusal(model, config(span_tokens=8, offload=True, **SMALL), MORE_TOKENS))[0] == {"offload": "auto"}
    limited = replace(DENSE, **SMALL, device_pages_gib=100 * KIB / GIB)
    assert named(refusal(model, limited, MORE_TOKENS))[0] == {"device_pages_gib": "auto"}


def test_a_refusal_leaves_settings_as_they_were(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomb_accel.offload.host_limits", lambda: machine(MARGIN + 80 * KIB))
    with switched_on(twin(model), DENSE) as ours:
        for _ in range(2):
            with pytest.raises(ValueError, match="need more host memory") as caught:
                ours(**packed(documents_of(TOKENS)).batch)
        assert torch.is_grad_enabled() and "page" in str(caught.value)
        ours(**packed(documents_of(60)).batch).loss.backward()
