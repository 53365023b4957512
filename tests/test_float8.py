"""K and V of pages in 8 bits: exactly full attention in which earlier chunks are seen as they are stored, with the
gradient straight through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import oomb_accel
from oomb_accel import OombConfig
from tests.harness.batches import documents_of, packed, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import chunked, config, reference
from tests.harness.sparse import check_sparse, check_sparse_twice_plain, recorded_selections, sparse
from tests.harness.tolerance import assert_same_bits, worst_relative_error

DENSE: dict[str, dict[str, Any]] = {
    "default": {},
    "small spans": {"span_tokens": 8},
    "recompute": {"keep_outputs": False, "keep_last_graph": False},
    "kept": {"keep_outputs": True},
}
SPARSE: dict[str, dict[str, Any]] = {
    "default": {},
    "no sinks, no recent pages": {"sink_pages": 0, "recent_pages": 0},
    "recompute": {"keep_outputs": False, "keep_last_graph": False},
    "shared, causal, one dense layer": {"select_per": "layer", "causal_selection": True, "dense_layers": (0,)},
}


def float8(settings: OombConfig) -> OombConfig:
    return replace(settings, page_dtype="float8")


@pytest.mark.parametrize("settings", DENSE)
@pytest.mark.parametrize("model_type", ["qwen2", "mistral", "gemma2"])
def test_dense(model_type: str, settings: str) -> None:
    """Mistral has windows, Gemma 2 some and soft caps."""
    layout = packed(documents_of(85, 9, 40, 61))
    check_sparse(tiny_model(model_type).double(), layout, float8(config(**DENSE[settings])), embeds=True)


@pytest.mark.parametrize("settings", SPARSE)
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_sparse(model_type: str, settings: str) -> None:
    layout = packed(documents_of(85, 9, 140, 61))
    model = with_lora(tiny_model(model_type)).double()
    _, calls = check_sparse(model, layout, float8(sparse(**SPARSE[settings])), embeds=True)
    assert calls


def test_padded_rows() -> None:
    check_sparse(tiny_model().double(), padded(documents_of(70, 33)), float8(config(24, 8)), embeds=True)


@pytest.mark.parametrize("settings", [config(), sparse()], ids=["dense", "sparse"])
def test_bfloat16(settings: OombConfig) -> None:
    check_sparse_twice_plain(with_lora(tiny_model("gemma2")), packed(documents_of(90, 50)), float8(settings))


def test_it_changes_a_little() -> None:
    """Against pages as the model has them: what is stored is used, and is close."""
    model, layout = tiny_model(), packed(documents_of(85, 140))
    plain, ours = (chunked(twin(model), layout, settings) for settings in (config(), float8(config())))
    assert 1e-5 < abs(float(ours.loss / plain.loss) - 1) < 0.02
    assert 1e-4 < worst_relative_error(ours.gradients, plain.gradients) < 0.5


def test_one_chunk_is_not_changed() -> None:
    model, layout = tiny_model(), packed(documents_of(60))
    plain, ours = (chunked(twin(model), layout, s) for s in (config(64), float8(config(64))))
    assert_same_bits(ours.gradients, plain.gradients)


def test_evaluation_reads_the_same_pages() -> None:
    """With every page selected, evaluation, which is dense, has the loss of training."""
    layout = padded(documents_of(90))
    model = tiny_model().eval()
    oomb_accel.enable(model, float8(config()))
    trained = model(**layout.batch).loss
    with torch.no_grad():
        evaluated = model(**layout.batch).loss
    assert_same_bits(evaluated, trained.detach())


def test_infinite_values_reach_the_loss() -> None:
    """A value that is infinite in the first chunk, though 8 bits have no infinity."""
    model = tiny_model("qwen2", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.bias[0] = torch.inf
    layout = padded(documents_of(40))
    assert not reference(twin(model), layout.documents).loss.isfinite()
    assert not chunked(model, layout, float8(config())).loss.isfinite()


def test_the_lists_are_those_of_unrounded_keys() -> None:
    """In the first layer, whose keys have not been through attention."""
    layout, lists = packed(documents_of(140)), []
    for settings in (sparse(), float8(sparse())):
        with recorded_selections() as calls:
            chunked(tiny_model(), layout, settings)
        lists.append([call.lists.pages_GBK for call in calls if call.layer == 0])
    assert lists[0] and all(torch.equal(a, b) for a, b in zip(*lists, strict=True))


def test_the_banner_says_so() -> None:
    for settings, said in ((config(), False), (float8(config()), True)):
        model = tiny_model()
        oomb_accel.enable(model, settings)
        assert ("pages 4 in float8" in oomb_accel.banner(model)) == said
