"""The reference (plain transformers, eager full attention, each document alone, fp32), our run, and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import oomb_accel
from oomb_accel import OombConfig
from tests.harness.batches import Document, Layout
from tests.harness.models import twin
from tests.harness.tolerance import (
    assert_same_gradients,
    assert_same_total,
    assert_same_values,
    assert_twice_plain,
)

CHUNK, PAGE = 16, 4
EMBEDS = "inputs_embeds"
"""Name of the input-embedding gradient of document i among the gradients: ``inputs_embeds.i``."""


@dataclass(frozen=True)
class Result:
    """What a step gives: all of it is compared."""

    loss: Tensor
    log_probs: tuple[Tensor, ...]
    """Per document, of its targets in order."""
    gradients: dict[str, Tensor]
    """Of every trainable parameter, and of the input embeddings of each document where they were given."""
    all_log_probs: tuple[Tensor, ...] = ()
    """Of a reference: per document, of all its tokens but the first, targets or not."""

    def low_precision_view(self) -> dict[str, Tensor]:
        """Everything by name, for the twice-plain rule."""
        return {"log_probs": torch.cat(self.log_probs), **self.gradients}


def config(chunk: int = CHUNK, page: int = PAGE, **settings: Any) -> OombConfig:
    return OombConfig(**{"chunk_tokens": chunk, "page_tokens": page, "progress": False, **settings})


def reference(
    model: nn.Module,
    documents: tuple[Document, ...] | list[Document],
    *,
    embeds: bool = False,
    num_targets: int | None = None,
    weights: list[Tensor] | None = None,
    before_each: Callable[[], None] | None = None,
) -> Result:
    """Loss and gradients by plain full attention over each document alone, unpadded and without cache.

    Args:
        embeds: give the model input embeddings instead of ids, and return their gradient.
        num_targets: the normaliser; by default the targets of these documents.
        weights: per document and target; the loss is then the weighted sum of log-probabilities, not normalised.
        before_each: called before each document.
    """
    model.zero_grad(set_to_none=True)
    log_probs: list[Tensor] = []
    all_log_probs: list[Tensor] = []
    leaves: list[Tensor] = []
    device = next(model.parameters()).device
    for document in documents:
        if before_each is not None:
            before_each()
        ids = document.ids.to(device)[None]
        inputs: dict[str, Tensor] = {"input_ids": ids}
        if embeds:
            leaf = embeddings_of(model, ids).requires_grad_()
            leaves.append(leaf)
            inputs = {"inputs_embeds": leaf}
        logits = model(**inputs, use_cache=False).logits[0]
        columns = document.target_columns.to(device)
        every = torch.log_softmax(logits[:-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
        log_probs.append(every[columns])
        all_log_probs.append(every.detach())
    total = sum(p.numel() for p in log_probs)
    if weights is not None:
        loss = sum(((w * p).sum() for w, p in zip(weights, log_probs, strict=True)), torch.zeros(()))
    else:
        loss = -torch.cat(log_probs).sum() / max(num_targets or total, 1)
    loss.backward()
    gradients = parameter_gradients(model)
    for index, leaf in enumerate(leaves):
        gradients[f"{EMBEDS}.{index}"] = _grad(leaf)[0]
    return Result(loss.detach(), tuple(p.detach() for p in log_probs), gradients, tuple(all_log_probs))


def chunked(
    model: nn.Module,
    layout: Layout,
    settings: OombConfig | None = None,
    *,
    embeds: bool = False,
    fill_padding: float = 0.0,
    weights: list[Tensor] | None = None,
    **enable: Any,
) -> Result:
    """The same by oomb_accel. The model is switched on for this step only.

    Args:
        embeds: as in `reference`.
        fill_padding: input embeddings of padding, where embeddings are given.
        weights: as in `reference`.
    """
    model.zero_grad(set_to_none=True)
    with switched_on(model, settings or config(), **enable):
        device = next(model.parameters()).device
        batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in layout.batch.items()}
        leaf = None
        if embeds:
            values = embeddings_of(model, batch.pop("input_ids"))
            if "attention_mask" in batch:
                values[batch["attention_mask"] == 0] = fill_padding
            leaf = values.requires_grad_()
            batch["inputs_embeds"] = leaf
        output = model(**batch)
        loss = output.loss
        if weights is not None:
            per_document = split(output.log_probs, layout)
            loss = sum(((w * p).sum() for w, p in zip(weights, per_document, strict=True)), torch.zeros(()))
        loss.backward()
    gradients = parameter_gradients(model)
    if leaf is not None:
        grad = _grad(leaf)
        for index, (document, (row, start)) in enumerate(zip(layout.documents, layout.places, strict=True)):
            gradients[f"{EMBEDS}.{index}"] = grad[row, start : start + len(document)]
    return Result(loss.detach(), tuple(split(output.log_probs.detach(), layout)), gradients)


@contextmanager
def switched_on(model: nn.Module, settings: OombConfig, **enable: Any) -> Iterator[nn.Module]:
    """The model with oomb_accel inside, plain outside."""
    oomb_accel.enable(model, settings, **enable)
    try:
        yield model
    finally:
        oomb_accel.disable(model)


def check_parity(
    model: nn.Module,
    layout: Layout,
    settings: OombConfig | None = None,
    *,
    embeds: bool = False,
    fill_padding: float = 0.0,
) -> tuple[Result, Result]:
    """Run both on copies of the model and compare everything in fp32; returns (ours, reference)."""
    wanted = reference(twin(model), layout.documents, embeds=embeds)
    ours = chunked(twin(model), layout, settings, embeds=embeds, fill_padding=fill_padding)
    assert_same_result(ours, wanted)
    return ours, wanted


def assert_same_result(ours: Result, wanted: Result) -> None:
    """Rule 1 on everything."""
    for index, (a, b) in enumerate(zip(ours.log_probs, wanted.log_probs, strict=True)):
        assert_same_values(a, b, f"log-probabilities of document {index}")
    assert_same_total(ours.loss, wanted.loss)
    assert_same_gradients(ours.gradients, wanted.gradients)


def check_twice_plain(
    model: nn.Module, layout: Layout, settings: OombConfig, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Result, Result, Result]:
    """Rule 2 for a model whose weights are rounded to ``dtype``; returns (ours, plain, exact)."""
    low = twin(model).to(dtype)
    exact = reference(twin(low).float(), layout.documents)
    plain = reference(twin(low), layout.documents)
    ours = chunked(twin(low), layout, settings)
    assert_twice_plain_result(ours, plain, exact, dtype)
    return ours, plain, exact


def assert_twice_plain_result(ours: Result, plain: Result, exact: Result, dtype: torch.dtype = torch.bfloat16) -> None:
    """Rule 2 on everything, plain and exact from `reference`. A batch may have few targets: how far log-probabilities
    are off in plain code is asked of all tokens."""
    errors = {"log_probs": torch.cat(plain.all_log_probs).double() - torch.cat(exact.all_log_probs).double()}
    assert_twice_plain(ours.low_precision_view(), plain.low_precision_view(), exact.low_precision_view(), dtype, errors)


def embeddings_of(model: nn.Module, ids: Tensor) -> Tensor:
    """What the model's embedding makes of these ids: a new tensor without graph."""
    table = model.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        return table(ids).detach().clone()


def parameter_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of all trainable parameters; zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def split(values_BL: Tensor, layout: Layout) -> list[Tensor]:
    """Per document, the values at its targets."""
    pieces = []
    for document, (row, start) in zip(layout.documents, layout.places, strict=True):
        pieces.append(values_BL[row, start + document.target_columns.to(values_BL.device)])
    return pieces


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach().clone()
