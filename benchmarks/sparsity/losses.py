"""Loss under sparse attention against dense, on held-out documents, without training (parts a and g).

Dense and sparse see the same documents; rows keep one value per document, so that differences are paired.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sparsity.running import (
    Bench,
    Settings,
    dense_settings,
    means,
    plain,
    sparse_settings,
    switched_on,
    token_losses,
)
from benchmarks.sparsity.scene import Hook, scene_of, selection_replaced
from benchmarks.sparsity.texts import Ids, held_out_documents
from benchmarks.sparsity.variants import VARIANTS, Variant
from oomb_accel.chunk_pass import ChunkPass, LayerCall
from oomb_accel.selected_part import SelectedPages
from oomb_accel.selection import PageSelector, SelectionSettings, TouchedPages
from oomb_kernels import PageLists, top_pages

Labels = dict[str, Any]
GROUP = 5
"""Layers made dense together, to see which ones matter."""


def native_grid(bench: Bench) -> None:
    """top_k by page size at a length that the model was trained for, on code."""
    sizes = bench.sizes
    documents = held_out_documents(bench.texts, "code", sizes.native_tokens, sizes.native_documents)
    _grid(bench, bench.model(long=False), "code", documents, sizes.native_chunk)


def long_grid(bench: Bench) -> None:
    """top_k by page size on long documents: code, then prose at the usual page size."""
    sizes = bench.sizes
    model = bench.model(long=True, adapted=True)
    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.long_documents)
    _grid(bench, model, "code", documents, sizes.long_chunk)
    prose = held_out_documents(bench.texts, "prose", sizes.long_tokens, sizes.prose_documents)
    _grid(bench, model, "prose", prose, sizes.long_chunk, pages=(sizes.page,))


def settings_one_by_one(bench: Bench) -> None:
    """Each setting of sparse attention on its own, at the usual top_k and page size (part g)."""
    sizes = bench.sizes
    model = bench.model(long=True, adapted=True)
    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.long_documents)
    layers = bench.material.config.num_hidden_layers
    changes: list[tuple[str, Settings]] = [("usual", {})]
    changes += [(f"sink_pages={n}", {"sink_pages": n}) for n in (0, 1, 2)]
    changes += [(f"recent_pages={n}", {"recent_pages": n}) for n in (0, 1, 2, 4, 8)]
    changes += [
        ("q_block=64", {"q_block": 64}),
        ("causal_selection", {"causal_selection": True}),
        ("select_per=layer", {"select_per": "layer"}),
        ("dense_layers=first", {"dense_layers": (0,)}),
        ("dense_layers=first two", {"dense_layers": (0, 1)}),
        ("dense_layers=last", {"dense_layers": (-1,)}),
        ("dense_layers=first two and last two", {"dense_layers": (0, 1, -2, -1)}),
    ]
    changes += [(f"page_budget={n}", {"page_budget": n}) for n in (2 * sizes.top_k, 4 * sizes.top_k, 8 * sizes.top_k)]
    for first in range(0, layers, GROUP):
        group = tuple(range(first, min(first + GROUP, layers)))
        changes.append((f"dense_layers={group[0]} to {group[-1]}", {"dense_layers": group}))
    common: Labels = {"text": "code", "tokens": sizes.long_tokens, "chunk": sizes.long_chunk, "page": sizes.page}
    _measure(bench, model, documents, dense_settings(sizes.long_chunk, sizes.page), name="dense", **common)
    for name, change in changes:
        settings = sparse_settings(sizes, sizes.long_chunk, top_k=sizes.top_k, page_tokens=sizes.page, **change)
        _measure(bench, model, documents, settings, name=name, top_k=sizes.top_k, **common)


def division_over_layers(bench: Bench) -> None:
    """The same number of pages in all, divided otherwise over the layers."""
    sizes = bench.sizes
    model = bench.model(long=True, adapted=True)
    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.long_documents)
    context_use(bench, model, "adapted")
    layers = bench.material.config.num_hidden_layers
    settings = sparse_settings(sizes, sizes.long_chunk, top_k=sizes.top_k, page_tokens=sizes.page)
    common: Labels = {"text": "code", "tokens": sizes.long_tokens, "chunk": sizes.long_chunk, "page": sizes.page}
    for name, budgets in layer_budgets(layers, sizes.top_k).items():
        with top_k_by_layer(budgets):
            _measure(bench, model, documents, settings, name=name, top_k=sizes.top_k, **common)


def variants_long(bench: Bench) -> None:
    """Other ways of choosing the same number of pages, up to the truth: what a better selection could win."""
    sizes = bench.sizes
    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.variant_documents)
    _variants(bench, bench.model(long=True, adapted=True), documents, sizes.long_chunk, sizes.top_k)


def variants_native(bench: Bench) -> None:
    """The same at a length that the model was trained for."""
    sizes = bench.sizes
    documents = held_out_documents(bench.texts, "code", sizes.native_tokens, sizes.native_documents)
    _variants(bench, bench.model(long=False), documents, sizes.native_chunk, max(1, sizes.top_k // 2))


def _variants(bench: Bench, model: nn.Module, documents: list[Ids], chunk: int, top_k: int) -> None:
    page = bench.sizes.page
    common: Labels = {"text": "code", "tokens": len(documents[0]), "chunk": chunk, "page": page}
    _measure(bench, model, documents, dense_settings(chunk, page), study="variant", name="dense", **common)
    settings = sparse_settings(bench.sizes, chunk, top_k=top_k, page_tokens=page)
    for name, (variant, _) in VARIANTS.items():
        with selection_replaced(selecting_by(variant)):
            _measure(bench, model, documents, settings, study="variant", name=name, top_k=top_k, **common)


def context_use(bench: Bench, model: nn.Module, trained: str) -> None:
    """What the last eighth of a long document costs, dense, when the document is cut at its beginning: how much the
    model reads far back at all."""
    sizes = bench.sizes
    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.gradient_documents)
    judged = sizes.long_tokens // 8
    for context in (sizes.long_tokens, sizes.long_tokens // 2, sizes.long_tokens // 4):
        with switched_on(model, dense_settings(sizes.long_chunk, sizes.page)):
            losses = [token_losses(model, ids[-context:], sparse=False)[-judged:].double() for ids in documents]
        values = [round(float(loss.mean()), 7) for loss in losses]
        bench.results.add("context", model=trained, tokens=sizes.long_tokens, context=context, loss=values)
        bench.say(f"context {trained} {context}: {sum(values) / len(values):.5f}")


def _grid(
    bench: Bench,
    model: nn.Module,
    text: str,
    documents: list[Ids],
    chunk: int,
    pages: tuple[int, ...] | None = None,
) -> None:
    sizes = bench.sizes
    common: Labels = {"text": text, "tokens": len(documents[0]), "chunk": chunk}
    _measure(bench, model, documents, dense_settings(chunk, sizes.page), study="loss", name="dense", **common)
    # The same sum in another order: what rounding alone does to these numbers.
    other = dense_settings(2 * chunk, sizes.page)
    _measure(bench, model, documents, other, study="loss", name="dense, other chunks", **common)
    for page in pages or sizes.pages:
        for top_k in sizes.top_ks:
            settings = sparse_settings(sizes, chunk, top_k=top_k, page_tokens=page)
            _measure(bench, model, documents, settings, study="loss", name="sparse", top_k=top_k, page=page, **common)


def _measure(
    bench: Bench,
    model: nn.Module,
    documents: list[Ids],
    settings: Settings,
    *,
    study: str = "setting",
    name: str,
    **labels: Any,
) -> None:
    sparse = settings.get("attention") == "sparse"
    with switched_on(model, settings):
        values = [means(token_losses(model, ids, sparse=sparse)) for ids in documents]
    whole, second = [round(x[0], 7) for x in values], [round(x[1], 7) for x in values]
    bench.results.add(study, name=name, **labels, loss=whole, second_half=second, settings=plain(settings))
    where = " ".join(f"{key}={value}" for key, value in labels.items())
    bench.say(f"{study} {name} {where}: {sum(whole) / len(whole):.5f}, second half {sum(second) / len(second):.5f}")


def selecting_by(variant: Variant) -> Hook:
    """A selection by a study's variant in the library's own attention; lists are recorded as the library does."""
    before: dict[int, Tensor] = {}

    def select(q_HTD: Tensor, k_GTD: Tensor, layer: LayerCall, run: ChunkPass, first_run: bool) -> SelectedPages | None:
        selector = run.memory.selector
        assert selector is not None
        reach = selector.reach(layer.layer, run.chunk.past_pages)
        q_block = selector._settings.q_block
        if reach is not None and first_run:
            scene = scene_of(q_HTD, k_GTD, layer, run, reach, q_block)
            scene.before_HTD = before[layer.layer]
            pages_GBK = top_pages(variant(scene).float(), selector._settings.top_k)
            counts_GB = torch.full(pages_GBK.shape[:2], pages_GBK.shape[2], dtype=torch.int32, device=pages_GBK.device)
            lists = PageLists(pages_GBK, counts_GB, q_block, len(reach.candidates))
            selector._lists.setdefault(run.chunk.index, {})[layer.layer] = lists
        before[layer.layer] = q_HTD[:, -q_block:]
        if reach is None:
            return None
        lists = selector.recorded(layer.layer, run.chunk)
        return SelectedPages(reach, lists, TouchedPages(lists))

    return select


def layer_budgets(layers: int, top_k: int) -> dict[str, list[int]]:
    """Divisions of the same total of pages over the layers."""
    half, more = max(1, top_k // 2), top_k + top_k - max(1, top_k // 2)
    early = [more if layer < layers // 2 else half for layer in range(layers)]
    return {
        "more pages in early layers": early,
        "more pages in late layers": early[::-1],
        "more pages in middle layers": [
            more if layers // 4 <= layer < layers // 4 + layers // 2 else half for layer in range(layers)
        ],
    }


@contextmanager
def top_k_by_layer(budgets: list[int]) -> Iterator[None]:
    """Inside, selectors have a ``top_k`` of its own for each layer."""
    reach, select = PageSelector.reach, PageSelector.select

    def with_budget(method: Any) -> Any:
        def wrapped(self: PageSelector, layer: int, *arguments: Any, **named: Any) -> Any:
            values = {name: getattr(self._settings, name) for name in SelectionSettings.__dataclass_fields__}
            self._settings = SelectionSettings(**values | {"top_k": budgets[layer]})
            return method(self, layer, *arguments, **named)

        return wrapped

    PageSelector.reach = with_budget(reach)  # type: ignore[method-assign]
    PageSelector.select = with_budget(select)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PageSelector.reach, PageSelector.select = reach, select  # type: ignore[method-assign]
