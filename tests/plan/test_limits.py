"""What the engine refuses before its first step, an estimate refuses too, with the same words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from oomb_accel.cli import main
from oomb_accel.config import OombConfig
from oomb_accel.integrations import float8_checks
from oomb_accel.integrations.support import ModelFacts, check_kernels, sparse_layers
from oomb_accel.plan import GPUS, Job, check_settings, estimate, nearest, read_shape, settings_of, suggestions
from oomb_accel.plan.sizes import GIB

M = 1 << 20
SPARSE = {"attention": "sparse"}
QWEN = "qwen2.5-7b"
WINDOWS = {"sliding_window": 4096, "model_type": "mistral"}


def model(source: str = QWEN, **fields: Any) -> Any:
    """A known model with some fields of its config replaced."""
    return replace(read_shape(source), **fields)


def engine_says(job: Job, config: OombConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    """The refusal of the engine's checks on such a GPU; empty where there is none."""
    shape, device = job.model, torch.device("cuda")
    facts = ModelFacts(
        shape.model_type, shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.windows
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: job.gpu.compute_capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: job.gpu.name)
    monkeypatch.setattr(float8_checks, "float8_product_fault", lambda device: None)
    dtype = getattr(torch, job.compute_dtype)
    try:
        sparse_layers(facts, config)
        check_kernels(facts, config, dtype, device)
        if config.base_dtype == "float8":
            float8_checks.check_device(device, dtype)
    except ValueError as error:
        return str(error)
    return ""


def estimate_says(job: Job) -> str:
    try:
        check_settings(job)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "rtx4090", "h100"])
@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({}, {}),
        ({"page_dtype": "float8"}, {}),
        ({"base_dtype": "float8"}, {}),
        ({"base_dtype": "float8"}, {"compute_dtype": "float32"}),
        ({"page_tokens": 100}, {}),
        (SPARSE | {"page_tokens": 100}, {}),
        (SPARSE | {"page_tokens": 48, "q_block": 64}, {}),
        (SPARSE, {"model": model(head_dim=100)}),
        (SPARSE | {"page_dtype": "float8"}, {"model": model(head_dim=72)}),
        (SPARSE | {"dense_layers": (28,)}, {}),
        (SPARSE | {"dense_layers": (0, -1)}, {}),
        (SPARSE | {"dense_layers": tuple(range(28))}, {}),
        (SPARSE, {"model": model(windows=(4096,) * 28)}),
    ],
    ids=str,
)
def test_engine_and_estimate_refuse_the_same(
    gpu: str, settings: dict[str, Any], others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OombConfig(**settings)
    job = Job(**{"model": model(), **settings_of(config), **others}, tokens=M, gpu=GPUS[gpu])
    assert estimate_says(job) == engine_says(job, config, monkeypatch)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu a100 --page_dtype float8", "A100 80 GB has compute capability 8.0, needed is 8.9. Set page_dtype="),
        ("--gpu rtx3090 --base_dtype float8", "RTX 3090 has compute capability 8.6, needed is 8.9. Set base_dtype="),
        ("--gpu a100 --gpu_gib 40 --page_dtype float8", "has compute capability 8.0"),
        ("--attention sparse --page_tokens 100", "Got page_tokens=100. Set page_tokens=112."),
    ],
)
def test_an_estimate_refuses_it(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", QWEN, *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", ["--gpu rtx4090 --page_dtype float8", "--page_tokens 100", "--base_dtype float8"])
def test_an_estimate_lets_in_what_runs(words: str) -> None:
    assert main(["estimate", QWEN, "--length", "64K", *words.split()]) < 2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gpu": GPUS["a100"]}, "float8"),
        ({"page_tokens": 100, "chunk_tokens": 8000}, "sparse"),
        ({"model": model(windows=(4096,) * 28)}, "sparse"),
    ],
    ids=["old GPU", "pages", "windows"],
)
@pytest.mark.parametrize("tokens", [M, 2 * M, 16 * M])
def test_nobody_is_told_to_set_what_is_refused(changes: dict[str, Any], word: str, tokens: int) -> None:
    job = Job(**{"model": model(), **changes}, tokens=tokens, host_bytes=64 * GIB)
    found = estimate(job)
    said = [found.refusal, nearest(job), *(suggestion.change for suggestion in suggestions(job))]
    assert not any(word in text for text in said), said
