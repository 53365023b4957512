"""Case 15: sparse attention equals dense where everything is selected, and a masked reference where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.pages import PagedKVCache, StoredPages
from oomb_accel.selection import PageSelector
from tests.harness.batches import documents_of, only_targets, packed, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import (
    assert_same_result,
    check_parity,
    check_twice_plain,
    chunked,
    config,
    parameter_gradients,
    reference,
    switched_on,
)
from tests.harness.sparse import (
    Seen,
    check_selection,
    check_sparse,
    check_sparse_twice_plain,
    collected_page_gradients,
    masked_reference,
    recorded_selections,
    schedule_of,
    sparse,
)
from tests.harness.tolerance import assert_same_bits, assert_same_gradients, assert_same_values

SETTINGS: dict[str, dict[str, Any]] = {
    "one page": {"top_k": 1},
    "no sinks, no recent pages": {"sink_pages": 0, "recent_pages": 0},
    "no sinks": {"sink_pages": 0, "recent_pages": 3},
    "many sinks": {"sink_pages": 3, "recent_pages": 0},
    "shared by all heads": {"select_per": "layer"},
    "budget": {"page_budget": 2, "top_k": 2},
    "causal": {"causal_selection": True},
    "dense first and last layer": {"dense_layers": (0, -1)},
    "everything": {"select_per": "layer", "page_budget": 3, "causal_selection": True, "dense_layers": (1,)},
    "recompute": {"keep_outputs": False, "keep_last_graph": False},
    "kept": {"keep_outputs": True, "keep_last_graph": True},
    "small spans": {"span_tokens": 8},
}


# Everything selected: the dense reference, definitionally.


@pytest.mark.parametrize("top_k", [18, 19, 1000])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_dense_when_every_page_is_selected(top_k: int, causal: bool) -> None:
    """The longest past has 20 pages, 18 of them candidates: all would be selected, so nothing is. Through the kernels:
    test_case_15_everything.py."""
    settings = sparse(top_k=top_k, causal_selection=causal)
    with recorded_selections() as calls:
        check_parity(tiny_model(), padded(documents_of(85, 30)), settings, embeds=True)
    assert not calls


# A few selected: the masked reference.


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_equals_the_masked_reference(kind: str, settings: str) -> None:
    model = tiny_model() if kind == "full" else with_lora(tiny_model())
    _, calls = check_sparse(model, padded(documents_of(90, 47)), sparse(**SETTINGS[settings]), embeds=True)
    assert any(len(c.reach.candidates) > c.lists.pages_GBK.shape[2] for c in calls)


@pytest.mark.parametrize(("chunk", "q_block"), [(160, 64), (64, 64), (100, 64), (256, 128), (136, 128)])
@pytest.mark.parametrize("causal", [True, False])
def test_several_blocks_in_a_chunk(chunk: int, q_block: int, causal: bool) -> None:
    """Chunks that are a multiple of the block and not, and a last block of one page or one token."""
    settings = sparse(chunk, 4, q_block=q_block, top_k=3, causal_selection=causal)
    _, calls = check_sparse(tiny_model(num_hidden_layers=2), padded(documents_of(2 * chunk + 70)), settings)
    blocks = {c.lists.pages_GBK.shape[1] for c in calls}
    assert max(blocks) == -(-chunk // q_block)


@pytest.mark.parametrize("length", [64, 65, 66, 68, 69, 80, 81])
def test_ragged_last_chunks(length: int) -> None:
    _, calls = check_sparse(tiny_model(), padded(documents_of(length)), sparse(), embeds=True)
    assert calls


@pytest.mark.parametrize(("chunk", "page"), [(12, 5), (7, 1), (40, 4), (10, 3)])
@pytest.mark.parametrize("model_type", ["qwen2", "smollm3"])
def test_any_cut(model_type: str, chunk: int, page: int) -> None:
    check_sparse(tiny_model(model_type), packed(documents_of(60, 9, 130)), sparse(chunk, page))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "gemma2", "gemma3_text", "granite", "qwen3_moe"])
def test_model_families(model_type: str) -> None:
    """QK-norm, soft-capping, window layers beside sparse ones, a scale of the model's own, experts."""
    check_sparse(tiny_model(model_type), packed(documents_of(90, 47)), sparse(), embeds=True)


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("model_type", ["qwen2", "gemma2"])
def test_query_heads_per_kv_head(group: int, model_type: str) -> None:
    sizes = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "hidden_size": 16 * group, "head_dim": 8}
    model = tiny_model(model_type, **sizes, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    check_sparse(model, padded(documents_of(75)), sparse(), embeds=True)


def test_windows_stay_windows() -> None:
    """Layers 0 and 2 of the tiny Gemma 2 have a window, which the masked reference knows."""
    _, calls = check_sparse(tiny_model("gemma2"), padded(documents_of(120)), sparse(), embeds=True)
    assert {c.layer for c in calls} == {1}


def test_documents_of_one_chunk_select_nothing() -> None:
    with recorded_selections() as calls:
        check_parity(tiny_model(), padded(documents_of(16, 9, 1)), sparse())
    assert not calls


@pytest.mark.parametrize("columns", [[89], [70, 71], [16, 88]])
def test_few_targets(columns: list[int]) -> None:
    (document,) = documents_of(90)
    check_sparse(tiny_model(), padded([only_targets(document, columns)]), sparse(), embeds=True)


@pytest.mark.parametrize("settings", ["one page", "everything"])
def test_gradient_accumulation(settings: str) -> None:
    """Two micro-batches, one denominator: the sum of separate references."""
    model = with_lora(tiny_model())
    micro_batches = [padded(documents_of(90, 60)), packed(documents_of(70, 30, seed=1))]
    total = sum(oomb_accel.count_targets(layout.batch) for layout in micro_batches)
    wanted: dict[str, Tensor] = {}
    with switched_on(twin(model), sparse(**SETTINGS[settings])) as ours:
        for layout in micro_batches:
            with recorded_selections() as calls:
                ours(**layout.batch, num_targets=total).loss.backward()
            one = masked_reference(twin(model), layout.documents, calls, 4, num_targets=total)
            wanted = {name: grad + wanted.get(name, 0) for name, grad in one.gradients.items()}
    assert_same_gradients(parameter_gradients(ours), wanted)


@pytest.mark.parametrize("settings", ["one page", "shared by all heads", "causal", "no sinks, no recent pages"])
@pytest.mark.parametrize("model_type", ["qwen2", "gemma2"])
def test_the_selected_pages_are_the_best_by_the_documents_own_queries_and_keys(model_type: str, settings: str) -> None:
    """Documents of several lengths share chunks: a block is scored by its own rows only, against its own past."""
    layout = packed(documents_of(61, 150, 23, 90))
    for settings_ in (sparse(**SETTINGS[settings]), sparse(80, 4, **SETTINGS[settings])):
        with recorded_selections() as calls:
            chunked(tiny_model(model_type), layout, settings_)
        seen: dict[tuple[int, int], Seen] = {}
        masked_reference(tiny_model(model_type), layout.documents, calls, 4, seen=seen)
        assert {c.chunk.segments[0].document for c in calls} > {1}
        for call in calls:
            here = seen[call.chunk.segments[0].document, call.layer]
            check_selection(call, here, schedule_of(layout, settings_), settings_)


# What is selected is what has a gradient, and the recompute selects nothing new.


@pytest.mark.parametrize("page_grad_dtype", ["float32", "bfloat16"])
def test_unselected_pages_get_exactly_no_gradient(page_grad_dtype: str) -> None:
    settings = sparse(top_k=1, recent_pages=0, page_grad_dtype=page_grad_dtype)
    with recorded_selections() as calls, collected_page_gradients() as left:
        chunked(tiny_model(), padded(documents_of(130)), settings)
    chunks = max(chunk for _, chunk in left) + 1
    for layer in range(3):
        mine = [c for c in calls if c.layer == layer]
        dense_past = (min(c.chunk.index for c in mine) - 1) * 4  # of the last chunk that attends to all of its past
        for group in range(2):
            seen = {0, *range(dense_past)}.union(*(c.pages(group, 0) for c in mine))
            for which in (0, 1):
                tokens = torch.cat([left[layer, chunk][which][group] for chunk in range(chunks)])
                touched = {page for page, grad in enumerate(tokens.split(4)) if grad.any()}
                assert touched == seen, f"layer {layer}, head {group}"
            assert len(seen) < chunks * 4 - 4, "some pages are selected by nobody"


def test_the_recompute_replays_the_recorded_lists() -> None:
    """Lists that are changed between the sweeps change the gradients: the backward sweep takes what is recorded."""
    model, layout = tiny_model(), padded(documents_of(90))
    settings = sparse(keep_outputs=False, keep_last_graph=False)
    with recorded_selections() as calls, switched_on(twin(model), settings) as ours:
        loss = ours(**layout.batch).loss
        num_calls = len(calls)
        loss.backward()
        assert len(calls) == num_calls == 3 * 4
        expected = parameter_gradients(ours)
    with recorded_selections() as calls, switched_on(twin(model), settings) as ours:
        loss = ours(**layout.batch).loss
        for call in calls:
            call.lists.pages_GBK.zero_()
            call.lists.counts_GB.fill_(1)
        loss.backward()
        other = parameter_gradients(ours)
    assert any(not torch.equal(other[name], expected[name]) for name in expected)


def test_a_layer_under_checkpointing_replays_too() -> None:
    model = with_lora(tiny_model())
    plain, calls = check_sparse(model, padded(documents_of(90)), sparse())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed, again = check_sparse(model, padded(documents_of(90)), sparse())
    assert len(calls) == len(again)
    assert_same_result(checkpointed, plain)


def test_pages_and_lists_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    selectors = []
    original = PageSelector.__init__

    def init(self: PageSelector, *args: Any, **kwargs: Any) -> None:
        selectors.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(PageSelector, "__init__", init)
    caches = []
    make = PagedKVCache.__init__

    def make_cache(self: PagedKVCache, *args: Any) -> None:
        caches.append(self)
        make(self, *args)

    monkeypatch.setattr(PagedKVCache, "__init__", make_cache)
    chunked(tiny_model(), padded(documents_of(90)), sparse(page_grad_dtype="bfloat16"))
    (selector,) = selectors
    assert not selector._lists
    cache = caches[0]
    for records in (cache._values, cache._gradients, cache._sink_gradients):
        assert isinstance(records, StoredPages) and records._table.num_free == records.pool.num_slots


# Ties.


def test_tied_scores_take_the_earlier_page_and_equal_the_reference() -> None:
    """A document of one token repeated, without positions: all pages look alike."""
    model = tiny_model("smollm3", no_rope_layers=[0, 0, 0])
    (document,) = documents_of(90)
    document.ids.fill_(7)
    document.labels.fill_(7)
    _, calls = check_sparse(model, padded([document]), sparse(), embeds=True)
    first_layer = [c for c in calls if c.layer == 0]
    assert first_layer
    for call in first_layer:
        assert call.pages(0, 0) == call.pages(1, 0) == [1, 2]


# Kept or recomputed, the last graph or not: the same bits.


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_changes_no_bit(model_type: str, dtype: torch.dtype) -> None:
    model: torch.nn.Module = tiny_model(model_type)
    model.to(dtype)
    layout = packed(documents_of(90, 47))
    results = [
        chunked(twin(model), layout, sparse(keep_outputs=keep, keep_last_graph=last))
        for keep in (True, False, "auto")
        for last in (True, False)
    ]
    for other in results[1:]:
        assert_same_bits(other.loss, results[0].loss)
        assert_same_bits(other.gradients, results[0].gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_grad_dtype", ["float32", "bfloat16"])
def test_low_precision_with_every_page_selected(dtype: torch.dtype, page_grad_dtype: str) -> None:
    settings = sparse(top_k=100, page_grad_dtype=page_grad_dtype)
    check_twice_plain(with_lora(tiny_model()), padded(documents_of(90)), settings, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_grad_dtype", ["float32", "bfloat16"])
def test_low_precision_against_the_masked_reference(dtype: torch.dtype, page_grad_dtype: str) -> None:
    settings = sparse(page_grad_dtype=page_grad_dtype)
    assert check_sparse_twice_plain(with_lora(tiny_model()), padded(documents_of(90)), settings, dtype=dtype)


# Evaluation is dense.


def test_evaluation_without_gradients_is_dense() -> None:
    model, layout = tiny_model(), padded(documents_of(90))
    wanted = reference(twin(model), layout.documents)
    with recorded_selections() as calls, switched_on(twin(model), sparse()) as ours, torch.no_grad():
        for mode in (True, False):
            ours.train(mode)
            output = ours(**layout.batch)
            assert_same_values(output.loss, wanted.loss, "loss")
    assert not calls
    trained = chunked(twin(model), layout, sparse())
    assert abs(trained.loss - wanted.loss) > 1e-3, "training is sparse"


# Causal selection: nothing later has a part in it.


def lists_of(model: torch.nn.Module, ids: Tensor, settings: OombConfig) -> dict[tuple[int, int], Tensor]:
    with recorded_selections() as calls, switched_on(twin(model), settings) as ours:
        ours(input_ids=ids[None], labels=ids[None])
    return {(c.layer, c.chunk.index): c.lists.pages_GBK for c in calls}


@pytest.mark.parametrize("causal", [True, False])
def test_whether_later_tokens_have_a_part_in_a_selection(causal: bool) -> None:
    """The second block of the last chunk is changed: with causal selection no list of it changes in the first layer,
    whose keys and queries depend on their own tokens only."""
    model = tiny_model(num_hidden_layers=1)
    settings = sparse(128, 4, top_k=3, causal_selection=causal)
    (document,) = documents_of(3 * 128)
    changed = document.ids.clone()
    changed[2 * 128 + 64 :] = 3 + (changed[2 * 128 + 64 :] - 3 + torch.arange(1, 65)) % 125
    before, after = lists_of(model, document.ids, settings), lists_of(model, changed, settings)
    assert before.keys() == after.keys() == {(0, 1), (0, 2)}
    assert torch.equal(before[0, 1], after[0, 1])
    assert torch.equal(before[0, 2][:, 0], after[0, 2][:, 0])
    assert torch.equal(before[0, 2][:, 1], after[0, 2][:, 1]) == causal


@pytest.mark.parametrize("share", ["kv_head", "layer"])
@pytest.mark.parametrize("budget", [None, 3, 5])
def test_budget_and_sharing_hold_over_a_chunk(share: str, budget: int | None) -> None:
    settings = sparse(192, 4, top_k=3, select_per=share, page_budget=budget)
    _, calls = check_sparse(tiny_model(num_hidden_layers=2), padded(documents_of(500)), settings)
    distinct = []
    for call in calls:
        heads = [{p for block in range(call.lists.pages_GBK.shape[1]) for p in call.pages(g, block)} for g in range(2)]
        distinct += [len(pages) for pages in heads]
        assert (heads[0] == heads[1]) or share == "kv_head"
    if budget is not None:
        assert max(distinct) <= budget
    else:
        assert max(distinct) > 5


# Refusals.


@pytest.mark.parametrize(
    ("model_type", "settings", "texts"),
    [
        ("mistral", {}, ("nothing to do", "window of 8 tokens", "attention='dense'")),
        ("qwen2", {"dense_layers": (3,)}, ("does not have", "0 to 2", "dense_layers=[]")),
        ("qwen2", {"dense_layers": (0, -4)}, ("Got -4", "-1 to -3", "dense_layers=[0]")),
        ("qwen2", {"dense_layers": (0, 1, 2)}, ("nothing to do", "dense_layers=[0, 1, 2]")),
        ("gemma2", {"dense_layers": (1,)}, ("nothing to do", "these layers are [1]")),
    ],
)
def test_refusals(model_type: str, settings: dict[str, Any], texts: tuple[str, ...]) -> None:
    model = tiny_model(model_type)
    with pytest.raises(ValueError) as caught:
        oomb_accel.enable(model, sparse(**settings))
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    assert "forward" not in vars(model)


def test_the_banner_says_what_is_sparse() -> None:
    model = oomb_accel.enable(tiny_model(), sparse(top_k=7, sink_pages=1, recent_pages=3, dense_layers=(-1,)))
    text = oomb_accel.banner(model)
    wanted = ("sparse", "2 of 3 layers", "7 pages", "first 1", "last 3", "dense layers 2", "dense without gradients")
    for part in wanted:
        assert part in text, text
    plain = oomb_accel.enable(tiny_model(), config())
    assert "sparse" not in oomb_accel.banner(plain)
