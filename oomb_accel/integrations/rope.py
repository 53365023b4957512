"""RoPE: the length a model was made for, and frequencies that depend on the length of the document.

The dynamic and longrope types choose their frequencies by the length of *one call*. A chunk is only a part of a
document, so each segment is given the frequencies of its whole document.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_BY_LENGTH = ("dynamic", "longrope")


def _parameters(config: Any) -> dict[str, Any]:
    """One set of RoPE parameters; where layer types have their own, the full-attention ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("full_attention", parameters)


def describe_rope(config: Any) -> str:
    """The effective scaling in a few words, for the banner."""
    parameters = _parameters(config)
    kind = parameters.get("rope_type", "default")
    factor = f" x{parameters['factor']:g}" if parameters.get("factor") else ""
    return f"{kind}{factor}, good for {trained_tokens(config):,} tokens"


def trained_tokens(config: Any) -> int:
    """Tokens that the model's positions are trained or scaled for."""
    parameters = _parameters(config)
    declared = int(getattr(config, "max_position_embeddings", 0) or 0)
    original = parameters.get("original_max_position_embeddings") or declared
    factor = parameters.get("factor")
    kind = parameters.get("rope_type", "default")
    scaled = int(original * factor) if factor and kind != "default" else 0
    return max(declared, scaled)


def check_length(config: Any, document_tokens: Sequence[int]) -> None:
    """Refuse documents beyond the trained range.

    Raises:
        ValueError: with a RoPE scaling that would reach the length.
    """
    limit = trained_tokens(config)
    longest = max(document_tokens, default=0)
    if not limit or longest <= limit:
        return
    original = _parameters(config).get("original_max_position_embeddings") or config.max_position_embeddings
    factor = float(math.ceil(longest / original))
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    written = ", ".join(f"{name}: {value}" for name, value in scaling.items())
    raise ValueError(
        "A document is longer than the range of positions that the model was trained or scaled for.\n"
        f"  Document: {longest:,} tokens; model: {describe_rope(config)}.\n"
        f"  Set rope_parameters: {{{written}}} (in Python config.rope_parameters.update({scaling}), before loading), "
        "shorten the document to "
        f"{limit:,} tokens (max_length and truncation in a recipe), or train beyond the range as it is: "
        "beyond_trained_length 'allow' (oomb.beyond_trained_length in a recipe)."
    )


class DocumentRope:
    """Gives each segment of a chunk the frequencies of its whole document."""

    def __init__(self, base: nn.Module) -> None:
        self._now = threading.local()  # passes run in the caller's thread or in autograd's
        self._wrapped: list[tuple[nn.Module, Any]] = []
        for name, module in base.named_modules():
            kind = getattr(module, "rope_type", None)
            kinds = kind.values() if isinstance(kind, dict) else [kind]
            if not any(_depends_on_length(k) for k in kinds):
                continue
            if isinstance(kind, dict):
                raise ValueError(
                    f"{name} has a RoPE type that depends on the length and differs by layer type: {kind}.\n"
                    "  Such frequencies cannot be fixed for a whole document.\n"
                    "  Use rope_type 'yarn', 'linear' or 'llama3' instead."
                )
            self._wrapped.append((module, vars(module).get("forward")))
            module.forward = self._wrap(module, module.forward)

    @contextmanager
    def segments(self, segments: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Inside, a call covers segments of these (tokens, tokens of the whole document)."""
        self._now.segments = segments
        try:
            yield
        finally:
            self._now.segments = None

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for module, own_forward in self._wrapped:
            del module.forward
            if own_forward is not None:
                module.forward = own_forward
        self._wrapped = []

    def _wrap(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def by_document(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            segments = getattr(self._now, "segments", None)
            if segments is None:
                result: tuple[Tensor, ...] = forward(x, position_ids, *args, **kwargs)
                return result
            pieces = []
            start = 0
            for num_tokens, document_tokens in segments:
                _forget_length(module, x.device)
                last = torch.full_like(position_ids[:, :1], document_tokens - 1)
                positions = torch.cat([position_ids[:, start : start + num_tokens], last], dim=1)
                pieces.append([part[:, :-1] for part in forward(x, positions, *args, **kwargs)])
                start += num_tokens
            return tuple(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))

        return by_document


def forget_length(base: nn.Module) -> None:
    """Put dynamic RoPE back to its state before the first call: it remembers the longest call so far."""
    for module in base.modules():
        kind = getattr(module, "rope_type", None)
        if _depends_on_length(kind):
            _forget_length(module, module.inv_freq.device)  # type: ignore[arg-type]


def _depends_on_length(kind: object) -> bool:
    return isinstance(kind, str) and any(name in kind for name in _BY_LENGTH)


def _forget_length(module: Any, device: torch.device) -> None:
    """Dynamic scaling remembers the longest call so far; a document alone in a fresh model would not."""
    module.register_buffer("inv_freq", module.original_inv_freq.to(device), persistent=False)
    module.max_seq_len_cached = module.original_max_seq_len
