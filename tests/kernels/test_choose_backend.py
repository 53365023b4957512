"""Which backend a call gets, and what a user reads when the one they forced cannot run it."""

from typing import Any

import pytest
import torch

from oomb_kernels import AttentionCall, attention_cudnn, attention_flash, available_backends, choose_backend

CPU = torch.device("cpu")
CAUSAL = AttentionCall(scale=1.0, causal=True)


def choose(requested: str = "auto", **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "device": torch.device("cuda", 0),
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "call": CAUSAL,
        "num_q": 512,
        "num_k": 512,
    }
    return choose_backend(requested, **(arguments | changes))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that the library backends can run on any device."""
    for backend in (attention_cudnn, attention_flash):
        monkeypatch.setattr(backend, "device_refusal", lambda device: None)
    choose_backend.cache_clear()
    yield
    choose_backend.cache_clear()


def test_cpu_has_torch_only() -> None:
    reasons = available_backends(CPU)
    assert reasons["torch"] == "" and "CUDA" in reasons["cudnn"] and "CUDA" in reasons["flash"]
    assert choose(device=CPU) == "torch"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "cudnn"),
        ({"call": AttentionCall(scale=1.0), "num_k": 4096}, "cudnn"),
        ({"call": AttentionCall(scale=1.0, segments=(512,))}, "cudnn"),
        ({"call": AttentionCall(scale=1.0, causal=True, window=512)}, "cudnn"),
        ({"num_q": 1}, "cudnn"),
        ({"num_q": 1, "num_k": 1}, "cudnn"),
        ({"num_k": 4096}, "flash"),
        ({"call": AttentionCall(scale=1.0), "num_k": 1}, "flash"),
        ({"call": AttentionCall(scale=1.0, causal=True, window=511)}, "flash"),
        ({"call": AttentionCall(scale=1.0, segments=(500, 12))}, "flash"),
        ({"call": AttentionCall(scale=1.0, causal=True, deterministic=True)}, "flash"),
        ({"head_dim": 256}, "flash"),
        ({"call": AttentionCall(scale=1.0, softcap=30.0)}, "torch"),
        ({"call": AttentionCall(scale=1.0, segments=(1, 1)), "num_q": 2, "num_k": 2}, "torch"),
        ({"head_dim": 100}, "torch"),
        ({"head_dim": 264}, "torch"),
        ({"dtype": torch.float32}, "torch"),
    ],
)
def test_auto_takes_the_fastest_that_can(hopper: None, changes: dict[str, Any], expected: str) -> None:
    assert choose(**changes) == expected
    assert choose(expected, **changes) == expected


@pytest.mark.parametrize(
    ("requested", "changes", "reason", "remedy"),
    [
        ("cudnn", {"num_k": 4096}, "as many queries as keys", "flash"),
        ("cudnn", {"call": AttentionCall(scale=1.0, causal=True, window=8)}, "no window", "flash"),
        ("flash", {"call": AttentionCall(scale=1.0, softcap=30.0)}, "no softcap", "torch"),
        ("flash", {"device": CPU, "dtype": torch.float32}, "float16 or bfloat16", "torch"),
    ],
)
def test_forced_backend_that_cannot(
    hopper: None, requested: str, changes: dict[str, Any], reason: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"'{requested}' cannot run") as caught:
        choose(requested, **changes)
    assert reason in str(caught.value) and f"'{remedy}'" in str(caught.value)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'fa3'"):
        choose("fa3", device=CPU)


def test_integer_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        choose(device=CPU, dtype=torch.int32)


@pytest.mark.parametrize(
    "fields", [{"window": 0}, {"softcap": 0.0}, {"softcap": -1.0}, {"segments": ()}, {"segments": (3, 0)}]
)
def test_call_refuses_fields_out_of_range(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        AttentionCall(scale=1.0, **fields)
