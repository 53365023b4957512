"""Case 20: in bf16 our error is at most twice plain bf16's, and it does not grow with the number of chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomb_accel.progress import ChunkEvent
from tests.harness.batches import documents_of, packed, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import Result, check_twice_plain, chunked, config, reference
from tests.harness.tolerance import assert_twice_plain, twice_plain_error

PAGE = 4


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"keep_outputs": False}, {"keep_last_graph": False}])
def test_200_chunks(settings: dict[str, Any]) -> None:
    model = with_lora(tiny_model())
    check_twice_plain(model, padded(documents_of(200 * PAGE)), config(PAGE, PAGE, **settings))


@pytest.mark.parametrize("page_grad_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_error_does_not_grow_with_the_number_of_chunks(page_grad_dtype: str) -> None:
    """One document of 800 tokens in 10, 50 and 200 chunks."""
    low = with_lora(tiny_model(num_hidden_layers=2)).bfloat16()
    layout = padded(documents_of(200 * PAGE))
    exact = reference(twin(low).float(), layout.documents)
    plain = reference(twin(low), layout.documents)
    errors = {}
    for chunks in (10, 50, 200):
        events: list[ChunkEvent] = []
        settings = config(200 * PAGE // chunks, PAGE, page_grad_dtype=page_grad_dtype)
        ours = chunked(twin(low), layout, settings, on_progress=events.append)
        assert events[0].num_chunks == chunks
        assert_twice_plain(ours.low_precision_view(), plain.low_precision_view(), exact.low_precision_view())
        errors[chunks], _ = twice_plain_error(whole(ours), whole(plain), whole(exact), torch.bfloat16)
    assert errors[200] <= 1.25 * errors[10], errors


@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "gemma2", "granite"])
def test_families(model_type: str) -> None:
    check_twice_plain(tiny_model(model_type), packed(documents_of(150, 40)), config())


def test_half_precision() -> None:
    check_twice_plain(tiny_model(), padded(documents_of(150)), config(), dtype=torch.float16)


def test_a_mixture_of_experts_by_its_loss() -> None:
    """Rounding changes the choice of experts, so that gradients of single experts are no measure."""
    low = tiny_model("qwen3_moe").bfloat16()
    layout = padded(documents_of(150))
    exact, plain = reference(twin(low).float(), layout.documents), reference(twin(low), layout.documents)
    ours = chunked(twin(low), layout, config())
    a, b, c = ({"log_probs": r.log_probs[0], "all": whole(r)} for r in (ours, plain, exact))
    assert_twice_plain(a, b, c)


def whole(result: Result) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([g.flatten().double() for g in result.gradients.values()])
