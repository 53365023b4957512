"""Sparse attention on a GPU, with the kernels that are used there: bf16 against the masked reference by the twice-plain
rule, and equal bits with `deterministic=True`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomb_accel import OombConfig
from oomb_kernels import page_attention
from tests.harness.batches import padded
from tests.harness.models import twin, with_lora
from tests.harness.parity import check_twice_plain, chunked
from tests.harness.sparse import candidates_kept, check_sparse_twice_plain, recorded_selections
from tests.harness.tolerance import assert_same_bits
from tests.test_gpu_parity import LAYOUTS, documents, gpu_config, gpu_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:No target in row")]

SPARSE: dict[str, Any] = {"attention": "sparse", "top_k": 3, "recent_pages": 1}
FULL = ("qwen2 7:1 d128", "llama d64", "qwen3 d128", "gemma2 d256 soft cap", "llama d80")


def gpu_sparse(chunk: int = 256, page: int = 32, **settings: Any) -> OombConfig:
    return gpu_config(chunk, page, **{**SPARSE, **settings})


@pytest.mark.parametrize("model", FULL)
def test_models(model: str) -> None:
    assert check_sparse_twice_plain(gpu_model(model), LAYOUTS["ragged"], gpu_sparse())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", [{}, {"q_block": 64, "select_per": "layer", "causal_selection": True}])
def test_layouts(layout: str, settings: dict[str, Any]) -> None:
    assert check_sparse_twice_plain(gpu_model("qwen2 7:1 d128"), LAYOUTS[layout], gpu_sparse(**settings))


@pytest.mark.parametrize(("chunk", "page"), [(64, 16), (192, 64), (320, 32), (256, 128)])
def test_cuts(chunk: int, page: int) -> None:
    assert check_sparse_twice_plain(gpu_model("qwen2 7:1 d128"), LAYOUTS["even"], gpu_sparse(chunk, page, top_k=2))


@pytest.mark.parametrize(
    "settings",
    [
        {"page_grad_dtype": "bfloat16"},
        {"keep_outputs": False, "keep_last_graph": False},
        {"page_budget": 4},
        {"page_dtype": "float8"},
        {"page_dtype": "float8", "page_grad_dtype": "bfloat16", "dense_layers": (0,), "keep_last_graph": False},
        {"sink_pages": 0, "recent_pages": 0},
        {"dense_layers": (0,)},
    ],
)
def test_settings(settings: dict[str, Any]) -> None:
    lora = with_lora(gpu_model("qwen2 7:1 d128")).cuda()
    assert check_sparse_twice_plain(lora, LAYOUTS["ragged"], gpu_sparse(**settings))


@pytest.mark.parametrize("layout", ["ragged", "packed"])
@pytest.mark.parametrize("model", ["qwen2 7:1 d128", "gemma2 d256 soft cap", "llama d80"])
def test_pages_in_8_bits_of_dense_and_window_layers(model: str, layout: str) -> None:
    check_sparse_twice_plain(gpu_model(model), LAYOUTS[layout], gpu_config(256, 32, page_dtype="float8"))


@pytest.mark.parametrize("settings", [{}, {"sink_pages": 0, "recent_pages": 0}, {"q_block": 64, "sink_pages": 0}])
@pytest.mark.parametrize("layout", ["ragged", "packed", "rows"])
@pytest.mark.parametrize("model", ["qwen2 7:1 d128", "gemma2 d256 soft cap"])
def test_lists_of_every_page_are_dense(model: str, layout: str, settings: dict[str, Any]) -> None:
    """Through the kernels of selected pages, where such a layer would be run as a dense one."""
    with candidates_kept(), recorded_selections() as calls:
        check_twice_plain(gpu_model(model), LAYOUTS[layout], gpu_sparse(**{"top_k": 1000, **settings}))
    assert calls and all(int(call.lists.counts_GB.min()) == len(call.reach.candidates) for call in calls)


@pytest.mark.parametrize(
    "settings", [{}, {"page_grad_dtype": "bfloat16"}, {"keep_outputs": False}, {"page_dtype": "float8"}]
)
@pytest.mark.parametrize("model", ["qwen2 7:1 d128", "gemma2 d256 soft cap"])
def test_deterministic_gives_the_same_bits_twice(model: str, settings: dict[str, Any]) -> None:
    lora = with_lora(gpu_model(model), lora_dropout=0.1).cuda().bfloat16()
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        with recorded_selections() as calls:
            ours = chunked(twin(lora), LAYOUTS["packed"], gpu_sparse(deterministic=True, **settings), embeds=True)
        results.append((ours, [call.lists.pages_GBK for call in calls]))
    (first, lists), (second, again) = results
    assert lists and all(torch.equal(a, b) for a, b in zip(lists, again, strict=True))
    assert_same_bits(torch.cat(second.log_probs), torch.cat(first.log_probs))
    assert_same_bits(second.gradients, first.gradients)


def test_the_kernels_really_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()

    def spied(name: str, launch: Any) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            ran.add(name)
            return launch(*args, **kwargs)

        return spy

    for name in ("launch_page_attention_forward", "launch_page_attention_backward"):
        monkeypatch.setattr(page_attention, name, spied(name, getattr(page_attention, name)))
    chunked(gpu_model("qwen2 7:1 d128").bfloat16(), LAYOUTS["ragged"], gpu_sparse())
    assert len(ran) == 2


def test_100_chunks() -> None:
    """Page gradients that a hundred chunks add to, in bf16 with sinks in fp32."""
    settings = gpu_sparse(64, 16, page_grad_dtype="bfloat16")
    lora = with_lora(gpu_model("llama d64")).cuda()
    assert check_sparse_twice_plain(lora, padded(documents(100 * 64)), settings)
