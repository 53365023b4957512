"""Case 15 through selection and its kernels: lists that hold every page equal dense attention. (Without a patch such a
layer is run as a dense one.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.batches import documents_of, packed, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import check_parity, check_twice_plain
from tests.harness.sparse import Selected, candidates_kept, recorded_selections, sparse

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no sinks": {"sink_pages": 0},
    "no recent pages": {"recent_pages": 0},
    "no sinks, no recent pages": {"sink_pages": 0, "recent_pages": 0},
    "shared by all heads": {"select_per": "layer"},
    "causal": {"causal_selection": True},
    "budget": {"page_budget": 1000},
    "recompute": {"keep_outputs": False, "keep_last_graph": False},
    "dense first layer": {"dense_layers": (0,)},
}


def assert_everything_was_selected(calls: list[Selected]) -> None:
    assert calls, "no selection was made"
    for call in calls:
        counts = call.lists.counts_GB
        assert int(counts.min()) == int(counts.max()) == len(call.reach.candidates) == call.lists.num_pages


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_several_documents(model_type: str, settings: str) -> None:
    """Documents share chunks; one is shorter than a chunk. Gemma 2 has windows beside sparse layers, and soft caps."""
    with candidates_kept(), recorded_selections() as calls:
        everything = sparse(**{"top_k": 1000, **SETTINGS[settings]})
        check_parity(tiny_model(model_type), packed(documents_of(85, 9, 40, 61)), everything, embeds=True)
    assert_everything_was_selected(calls)
    assert len({call.chunk.segments[0].document for call in calls}) > 1
    assert {call.layer for call in calls} == (
        {1} if model_type == "gemma2" else {1, 2} if settings == "dense first layer" else {0, 1, 2}
    )
    first = min(call.chunk.segments[0].past_tokens for call in calls)
    assert first <= 16, "selection starts with the second chunk of a document"


@pytest.mark.parametrize("settings", ["default", "no sinks, no recent pages", "causal"])
@pytest.mark.parametrize("model_type", ["qwen2", "gemma2"])
def test_several_blocks_in_a_chunk(model_type: str, settings: str) -> None:
    everything = sparse(160, 8, **{"top_k": 1000, **SETTINGS[settings]})
    with candidates_kept(), recorded_selections() as calls:
        check_parity(tiny_model(model_type), padded(documents_of(390, 250)), everything)
    assert_everything_was_selected(calls)
    assert max(call.lists.pages_GBK.shape[1] for call in calls) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sinks", [0, 1])
def test_low_precision(dtype: torch.dtype, page_grad_dtype: str, sinks: int) -> None:
    settings = sparse(top_k=1000, sink_pages=sinks, page_grad_dtype=page_grad_dtype)
    with candidates_kept(), recorded_selections() as calls:
        check_twice_plain(with_lora(tiny_model("gemma2")), packed(documents_of(90, 50)), settings, dtype=dtype)
    assert_everything_was_selected(calls)
