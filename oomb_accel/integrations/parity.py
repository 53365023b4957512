"""The check that a user can run: chunk recurrence against full attention, on their own model.

The reference is the same model without oomb_accel: full attention over each document alone, unpadded, no cache.
Compared are the loss, every token's loss, every trainable gradient and the gradient of the input embeddings.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oomb_accel.config import OombConfig
from oomb_accel.data.documents import IGNORED
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.rope import forget_length
from oomb_accel.integrations.support import base_model_of
from oomb_accel.integrations.transformers import attach, disable
from oomb_accel.selection import OnSelection

LOSS_LIMIT = 1e-6
TOKEN_LIMIT = 1e-5
GRADIENT_LIMIT = 1e-5
NEGLIGIBLE = 1e-4
"""A gradient smaller than this share of the largest one is compared with that share, not with itself: a key
bias, for instance, has a true gradient of zero."""


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One compared quantity."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Everything that was compared."""

    rows: tuple[ParityRow, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def worst(self) -> ParityRow:
        """The row that is closest to its limit or farthest beyond it."""
        return max(self.rows, key=lambda row: math.inf if math.isnan(row.error) else row.error / row.limit)


@dataclass(frozen=True, slots=True)
class ParityResult:
    """What is compared, of one side."""

    loss: Tensor
    token_losses: Tensor
    """Of all documents, one after another."""
    gradients: dict[str, Tensor]
    """Of all trainable parameters."""
    embedding_gradient: Tensor


def check_parity(model: nn.Module, config: OombConfig, documents: list[Tensor]) -> ParityReport:
    """Compare chunk recurrence with full attention by fixed limits, on a model in fp64, or a small one in fp32.

    The documents go through as one right-padded batch. Gradients already on the model are dropped.

    Args:
        model: a transformers model or a PEFT model, not switched on; dropout is switched off for the check.
        config: settings under test.
        documents: int64 token ids ``[T]`` each, at least 2 tokens.
    """
    return compare(full_attention(model, documents), chunked(model, config, documents))


def check_parity_low_precision(
    model: nn.Module, config: OombConfig, documents: list[Tensor], dtype: torch.dtype
) -> ParityReport:
    """The twice-plain rule: our error in ``dtype`` is at most twice that of plain attention in ``dtype``.

    The truth is plain attention in the next wider type: fp32 for 16-bit types, fp64 for fp32.

    Args:
        model: is cast to ``dtype``, which rounds its weights, and stays so.
        config: settings under test.
        documents: as in `check_parity`.
        dtype: the type that is judged.
    """
    model.to(dtype)  # both sides start from the same rounded weights
    truth = full_attention(model.to(torch.float64 if dtype == torch.float32 else torch.float32), documents)
    plain = compare(truth, full_attention(model.to(dtype), documents))
    ours = compare(truth, chunked(model, config, documents))
    return twice_plain(ours, plain, dtype)


def twice_plain(ours: ParityReport, plain: ParityReport, dtype: torch.dtype) -> ParityReport:
    """Our errors, under twice those of plain code in ``dtype``, plus its rounding."""
    floor = torch.finfo(dtype).eps
    return ParityReport(
        tuple(
            ParityRow(our.name, our.error, 2 * their.error + floor)
            for our, their in zip(ours.rows, plain.rows, strict=True)
        )
    )


def compare(truth: ParityResult, other: ParityResult) -> ParityReport:
    """Errors of ``other``, under the limits of fp32."""
    largest = max((g.norm().item() for g in truth.gradients.values()), default=0.0)
    rows = [
        ParityRow("loss (relative)", _relative(other.loss, truth.loss, 0.0), LOSS_LIMIT),
        ParityRow(
            "loss of each token (absolute)",
            (other.token_losses.double() - truth.token_losses.double()).abs().max().item(),
            TOKEN_LIMIT,
        ),
        ParityRow(
            "gradient of input embeddings",
            _relative(other.embedding_gradient, truth.embedding_gradient, 0.0),
            GRADIENT_LIMIT,
        ),
    ]
    rows += [
        ParityRow(
            f"gradient of {name}",
            _relative(other.gradients[name], grad, NEGLIGIBLE * largest),
            GRADIENT_LIMIT,
        )
        for name, grad in truth.gradients.items()
    ]
    return ParityReport(tuple(rows))


def prove_small_copy(base: PreTrainedModel) -> str | None:
    """Check a small model of the same class with random weights.

    Returns:
        None if it is equal to full attention, else what went wrong.
    """
    try:
        small = _small_copy(base)
        generator = torch.Generator().manual_seed(0)
        documents = [torch.randint(0, 64, (length,), generator=generator) for length in (50, 23)]
        report = check_parity(small, OombConfig(chunk_tokens=16, page_tokens=4, progress=False), documents)
    except Exception as error:  # whatever this class does, the answer is "not supported", with its words
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if report.passed:
        return None
    worst = report.worst
    return f"{worst.name} is off by {worst.error:.2g}, allowed are {worst.limit:.0e}"


def full_attention(
    model: nn.Module, documents: list[Tensor], *, before: Callable[[int], None] = lambda document: None
) -> ParityResult:
    """Plain transformers over each document alone.

    Args:
        before: told the number of the document before each forward over it.
    """
    model.eval()
    embedding = base_model_of(model).get_input_embeddings()
    losses: list[Tensor] = []
    embeds = [embedding(ids).detach()[None].requires_grad_() for ids in documents]
    model.zero_grad()
    for document, ids in enumerate(documents):
        before(document)
        losses.append(_plain_token_losses(model, ids, input_ids=ids[None]))
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = parameter_gradients(model)
    through_embeds = []
    for document, (ids, embed) in enumerate(zip(documents, embeds, strict=True)):
        before(document)
        through_embeds.append(_plain_token_losses(model, ids, inputs_embeds=embed))
    embedding_gradients = torch.autograd.grad(torch.cat(through_embeds).mean(), embeds)
    model.zero_grad()
    return ParityResult(
        loss.detach(), torch.cat(losses).detach(), gradients, torch.cat([g[0] for g in embedding_gradients])
    )


def _plain_token_losses(model: nn.Module, ids: Tensor, **inputs: Tensor) -> Tensor:
    forget_length(model)
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return nn.functional.cross_entropy(logits.to(wide), ids[1:], reduction="none")


def chunked(
    model: nn.Module, config: OombConfig, documents: list[Tensor], *, on_selection: OnSelection | None = None
) -> ParityResult:
    """The same documents as one padded batch through the recurrence.

    Args:
        on_selection: called whenever pages are selected.
    """
    model.eval()
    attach(model, config)
    attachment_of(model).on_selection = on_selection
    ids_BL, mask_BL, labels_BL = padded_batch(documents)
    try:
        model.zero_grad()
        output = model(input_ids=ids_BL, attention_mask=mask_BL.long(), labels=labels_BL)
        output.loss.backward()
        gradients = parameter_gradients(model)
        embeds = base_model_of(model).get_input_embeddings()(ids_BL).detach().requires_grad_()
        loss = model(inputs_embeds=embeds, attention_mask=mask_BL.long(), labels=labels_BL).loss
        (embeds_grad,) = torch.autograd.grad(loss, embeds)
        model.zero_grad()
    finally:
        disable(model)
    targets = torch.zeros_like(mask_BL)
    targets[:, :-1] = mask_BL[:, 1:]
    return ParityResult(output.loss.detach(), -output.log_probs.detach()[targets], gradients, embeds_grad[mask_BL])


def padded_batch(documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask (bool) and labels of documents, one per row, padded on the right."""
    longest = max(len(ids) for ids in documents)
    ids_BL = torch.stack([nn.functional.pad(ids, (0, longest - len(ids))) for ids in documents])
    lengths = torch.tensor([len(ids) for ids in documents], device=ids_BL.device)
    mask_BL = torch.arange(longest, device=ids_BL.device)[None] < lengths[:, None]
    return ids_BL, mask_BL, ids_BL.masked_fill(~mask_BL, IGNORED)


def parameter_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of all trainable parameters; zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _relative(ours: Tensor, theirs: Tensor, floor: float) -> float:
    distance = (ours.double() - theirs.double()).norm().item()
    size = max(theirs.double().norm().item(), floor)
    return distance / size if size else distance


def _small_copy(base: PreTrainedModel) -> PreTrainedModel:
    """A random model of the same class: same layer types, everything else small."""
    config = copy.deepcopy(base.config.get_text_config())
    layers = min(config.num_hidden_layers, 4)
    small = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    for name, value in small.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if getattr(config, "sliding_window", None):
        config.sliding_window = 8
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(base)(config).float()
