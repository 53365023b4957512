"""Gradients under sparse attention against dense, layer by layer, all weights (part b).

Yardsticks: the same dense gradient with other chunks (rounding alone), and the dense gradients of different documents
against each other (what a step's choice of documents does to the direction).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sparsity.curves import trained_file
from benchmarks.sparsity.losses import context_use
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
from benchmarks.sparsity.texts import Ids, held_out_documents

Gradient = dict[str, Tensor]
"""fp32 by layer: one long vector each."""
OUTSIDE = "embeddings"


def gradients(bench: Bench) -> None:
    """Rows of cosine and relative error per layer, for each document and for the mean over the documents."""
    _gradients_of(bench, bench.model(long=True, adapted=True), "adapted", _settings(bench))


def gradients_after_training(bench: Bench, name: str, seed: int) -> None:
    """The same for a model that a training run left, and its losses on long documents with each ``top_k``."""
    sizes = bench.sizes
    model = bench.model(long=True)
    model.load_state_dict(torch.load(trained_file(bench, name, seed), map_location=bench.device, weights_only=True))
    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.gradient_documents)
    context_use(bench, model, f"{name}-{seed}")
    chosen = [*_settings(bench)[: 1 + len(sizes.top_ks)], *(x for x in _settings(bench) if x[0] == "causal_selection")]
    for setting, settings in [("dense", dense_settings(sizes.long_chunk, sizes.page)), *chosen]:
        sparse = settings.get("attention") == "sparse"
        with switched_on(model, settings):
            values = [means(token_losses(model, ids, sparse=sparse)) for ids in documents]
        row = {"loss": [round(x[0], 7) for x in values], "second_half": [round(x[1], 7) for x in values]}
        where = {"model": f"{name}-{seed}", "tokens": sizes.long_tokens, "top_k": settings.get("top_k")}
        bench.results.add("loss_after_training", name=setting, **where, **row, settings=plain(settings))
    _gradients_of(bench, model, f"{name}-{seed}", chosen)


def _gradients_of(bench: Bench, model: nn.Module, trained: str, chosen: list[tuple[str, Settings]]) -> None:
    sizes = bench.sizes
    documents = held_out_documents(bench.texts, "code", sizes.long_tokens, sizes.gradient_documents)
    dense = dense_settings(sizes.long_chunk, sizes.page)
    exact = [_gradient(model, ids, dense) for ids in documents]
    bench.say(f"gradients: dense of {len(documents)} documents")
    labels = {"model": trained, "tokens": sizes.long_tokens}
    for number, one in enumerate(exact):
        for other in range(number):
            _report(
                bench, "another document", {}, [compare(exact[other], one)], None, **labels, pair=f"{other} {number}"
            )
    for name, settings in chosen:
        found, whole = [], None
        for ids, reference in zip(documents, exact, strict=True):
            gradient = _gradient(model, ids, settings)
            found.append(compare(gradient, reference))
            whole = gradient if whole is None else {key: whole[key] + gradient[key] for key in whole}
        assert whole is not None
        mean = compare(whole, {key: torch.stack([x[key] for x in exact]).sum(0) for key in whole})
        _report(bench, name, settings, found, mean, **labels)


def _settings(bench: Bench) -> list[tuple[str, Settings]]:
    sizes = bench.sizes
    budget = sizes.top_k * sizes.page

    def sparse(top_k: int = sizes.top_k, page_tokens: int = sizes.page, **others: Any) -> Settings:
        return sparse_settings(sizes, sizes.long_chunk, top_k=top_k, page_tokens=page_tokens, **others)

    return [
        ("dense, other chunks", dense_settings(2 * sizes.long_chunk, sizes.page)),
        *(("sparse", sparse(top_k)) for top_k in sizes.top_ks),
        *(("sparse", sparse(budget // page, page)) for page in sizes.pages if page != sizes.page),
        ("q_block=64", sparse(q_block=64)),
        ("causal_selection", sparse(causal_selection=True)),
        ("select_per=layer", sparse(select_per="layer")),
        ("dense_layers=first two", sparse(dense_layers=(0, 1))),
        ("recent_pages=0", sparse(recent_pages=0)),
    ]


def _gradient(model: nn.Module, ids: Ids, settings: Settings) -> Gradient:
    device = next(model.parameters()).device
    tokens = torch.as_tensor(ids, dtype=torch.long, device=device)[None]
    with switched_on(model, settings, training=True):
        model(input_ids=tokens, labels=tokens).loss.backward()
    by_layer: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        found = re.search(r"layers\.(\d+)\.", name)
        assert parameter.grad is not None
        by_layer.setdefault(found[1] if found else OUTSIDE, []).append(parameter.grad.float().flatten())
        parameter.grad = None
    return {key: torch.cat(parts) for key, parts in by_layer.items()}


def compare(found: Gradient, exact: Gradient) -> dict[str, tuple[float, float]]:
    """Cosine and relative L2 error by layer, and of everything under ``"all"``."""
    dots = {key: _sums(found[key], exact[key]) for key in exact}
    dots["all"] = torch.stack(list(dots.values())).sum(0)
    rows = {}
    for key, (both, ours, theirs) in ((key, sums.tolist()) for key, sums in dots.items()):
        cosine = both / max((ours * theirs) ** 0.5, 1e-300)
        rows[key] = (cosine, max(ours - 2 * both + theirs, 0.0) ** 0.5 / max(theirs**0.5, 1e-300))
    return rows


def _sums(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return torch.stack([a @ b, a @ a, b @ b])


def _report(
    bench: Bench,
    name: str,
    settings: Settings,
    documents: list[dict[str, tuple[float, float]]],
    mean: dict[str, tuple[float, float]] | None,
    **labels: Any,
) -> None:
    layers = sorted((key for key in documents[0] if key.isdigit()), key=int)
    row: dict[str, Any] = {
        "cosine": [round(x["all"][0], 6) for x in documents],
        "relative_error": [round(x["all"][1], 6) for x in documents],
        "cosine_by_layer": [round(sum(x[key][0] for x in documents) / len(documents), 6) for key in layers],
        "relative_error_by_layer": [round(sum(x[key][1] for x in documents) / len(documents), 6) for key in layers],
        "cosine_embeddings": round(sum(x[OUTSIDE][0] for x in documents) / len(documents), 6),
    }
    if mean is not None:
        row |= {"mean_cosine": round(mean["all"][0], 6), "mean_relative_error": round(mean["all"][1], 6)}
        row["mean_cosine_by_layer"] = [round(mean[key][0], 6) for key in layers]
    bench.results.add("gradient", name=name, **labels, settings=plain(settings), **row)
    bench.say(
        f"gradient {name} top_k={settings.get('top_k')} page={settings.get('page_tokens')}: cosine "
        f"{sum(row['cosine']) / len(documents):.4f}, relative error {sum(row['relative_error']) / len(documents):.4f}"
    )
