"""Random streams against the reference: lengths, label masks, layouts, chunk, page and span sizes, windows, heads,
and what is kept."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oomb_accel
from oomb_accel import OombConfig
from tests.harness.batches import ENCODINGS, Layout, documents_of, only_targets, packed, padded
from tests.harness.models import tiny_model, twin
from tests.harness.parity import check_parity, config
from tests.harness.sparse import check_sparse, sparse

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    lengths = draw(st.lists(st.integers(1, 45), min_size=1, max_size=4))
    documents = documents_of(*lengths, seed=draw(st.integers(0, 99)))
    kept = draw(st.sampled_from([1.0, 1.0, 0.5, 0.1, 0.02]))
    if kept < 1:
        dice = random.Random(draw(st.integers(0, 99)))
        documents = [only_targets(d, [c for c in range(len(d)) if dice.random() < kept]) for d in documents]
    kind = draw(st.sampled_from(["right", "left", "packed"]))
    if kind == "packed":
        return packed(documents, *draw(st.sets(st.sampled_from(ENCODINGS), min_size=1)))
    return padded(documents, side=kind)


@st.composite
def configs(draw: st.DrawFn) -> OombConfig:
    page = draw(st.integers(1, 7))
    return config(
        draw(st.integers(page, 28)),
        page,
        span_tokens=draw(st.integers(page, 40)),
        keep_outputs=draw(st.sampled_from([True, False, "auto"])),
        keep_last_graph=draw(st.booleans()),
        deterministic=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    heads, kv_heads = draw(st.sampled_from([(4, 2), (4, 4), (4, 1), (3, 1)]))
    window = draw(st.one_of(st.none(), st.integers(1, 50)))
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "sliding_window": window}


def check(layout: Layout, settings_: OombConfig, model: dict[str, Any], embeds: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No target in row")
        ours, _ = check_parity(tiny_model("mistral", **SIZES, **model), layout, settings_, embeds=embeds)
    assert oomb_accel.count_targets(layout.batch) == sum(p.numel() for p in ours.log_probs)


@given(layouts(), configs(), models(), st.booleans())
def test_parity(layout: Layout, settings_: OombConfig, model: dict[str, Any], embeds: bool) -> None:
    check(layout, settings_, model, embeds)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(layouts(), configs(), models(), st.booleans())
def test_parity_of_many(layout: Layout, settings_: OombConfig, model: dict[str, Any], embeds: bool) -> None:
    check(layout, settings_, model, embeds)


@st.composite
def sparse_configs(draw: st.DrawFn) -> OombConfig:
    page = draw(st.integers(1, 3))
    top_k = draw(st.integers(1, 3))
    return sparse(
        draw(st.integers(page, 20)),
        page,
        top_k=top_k,
        sink_pages=draw(st.integers(0, 2)),
        recent_pages=draw(st.integers(0, 2)),
        select_per=draw(st.sampled_from(["kv_head", "layer"])),
        page_budget=draw(st.sampled_from([None, top_k, top_k + 1])),
        causal_selection=draw(st.booleans()),
        dense_layers=draw(st.sampled_from([(), (0,), (-1,)])),
        keep_outputs=draw(st.sampled_from([True, False, "auto"])),
        keep_last_graph=draw(st.booleans()),
        deterministic=draw(st.booleans()),
    )


def check_sparse_schedule(layout: Layout, settings_: OombConfig, heads: tuple[int, int], embeds: bool) -> None:
    model = tiny_model("qwen3", **SIZES, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No target in row")
        check_sparse(model, layout, settings_, embeds=embeds)


HEADS = st.sampled_from([(4, 2), (4, 4), (4, 1), (3, 1)])


@given(layouts(), sparse_configs(), HEADS, st.booleans())
def test_sparse(layout: Layout, settings_: OombConfig, heads: tuple[int, int], embeds: bool) -> None:
    check_sparse_schedule(layout, settings_, heads, embeds)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(layouts(), sparse_configs(), HEADS, st.booleans())
def test_sparse_of_many(layout: Layout, settings_: OombConfig, heads: tuple[int, int], embeds: bool) -> None:
    check_sparse_schedule(layout, settings_, heads, embeds)


@settings(max_examples=10)
@given(st.integers(64, 200), st.integers(1, 9), st.sampled_from([64, 128]), st.booleans(), st.integers(0, 400))
def test_sparse_with_several_blocks(chunk: int, page: int, q_block: Any, causal: bool, length: int) -> None:
    """Chunks around the size of a block, whole documents behind each other."""
    settings_ = sparse(chunk, page, q_block=q_block, causal_selection=causal)
    check_sparse(tiny_model("qwen3", **SIZES), packed(documents_of(300, length + 2)), settings_)


@settings(max_examples=15)
@given(layouts(), configs())
def test_the_cut_changes_nothing_for_a_model_with_every_feature(layout: Layout, settings_: OombConfig) -> None:
    """Window and full layers, soft-capping, scaled embeddings, logits behind a cap."""
    model = tiny_model(
        "gemma2", **{**SIZES, "query_pre_attn_scalar": 8}, layer_types=["sliding_attention", "full_attention"]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No target in row")
        check_parity(twin(model), layout, settings_)
