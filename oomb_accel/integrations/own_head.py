"""The model's head, in passes that want a gradient: what it owes to the gradient of its input is made where the logits
are, and may be kept, so that a chunk that runs again needs no head.

The log-probability of a target depends on the target's row of what the head reads, h, and on nothing else there. So the
gradient is ``g u``, with ``u = (onehot - softmax) W`` and one number g for each target, and only g comes from the
caller's loss. The forward sweep of a chunk makes ``u`` beside the log-probabilities: as many numbers as h has, where
there would be as many logits as there are words. `loss.py` has the arithmetic.

Only where logits are what the head returns, as they are: models that cap or scale them go the usual way. So do those
of whose modules around the head somebody sees the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from oomb_accel.integrations.agreement import is_partitioned
from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.support import is_plain_linear
from oomb_accel.kept_results import HeadGradient
from oomb_accel.loss import head_gradient, known_log_probs

_NUM_TOKENS = 2
"""Of the trial call."""


def own_head(state: Attachment) -> nn.Linear | None:
    """The head, where its part of the gradient can be made apart: a frozen linear layer that nobody watches, whose
    output the model returns as its logits. Looked at before each step; the model is tried once.

    Under ZeRO 3 there is none: modules that run must be the same on all ranks.
    """
    head = state.base.get_output_embeddings()
    if head is None or is_partitioned(state.model) or not is_plain_linear(head):
        return None
    if any(module._forward_hooks for module in state.around_head):
        return None
    if head.weight.requires_grad or (head.bias is not None and head.bias.requires_grad):
        return None
    if state.head_is_last is None:
        state.head_is_last = _is_last(state, head)
    return head if state.head_is_last else None


class HeadPass:
    """One pass in which the head returns what it reads, and its log-probabilities are those of `head_gradient`.

    Args:
        targets_N: of the chunk.
        known: gives what was kept of the chunk's first pass, when the head is called.
        on_logits: is shown the logits ``[N, V]``, where they are made.
    """

    def __init__(
        self,
        head: nn.Linear,
        targets_N: Tensor,
        known: Callable[[], HeadGradient | None],
        on_logits: Callable[[Tensor], None] | None,
    ) -> None:
        self._head, self._targets_N, self._known, self._on_logits = head, targets_N, known, on_logits
        self._gradient: HeadGradient | None = None
        self._h: Tensor | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around the call of the model."""
        with _replaced(self._head, self._forward):
            yield

    def log_probs(self, output: Tensor) -> tuple[Tensor, HeadGradient]:
        """Log-probabilities of the targets ``[N]``, differentiable once, and what may be kept.

        Args:
            output: what the model returned as its logits.

        Raises:
            RuntimeError: it is not what the head returned.
        """
        if output is not self._h or self._gradient is None:
            raise RuntimeError(
                "The model no longer returns as logits what its head makes.\n"
                "  When it was tried, before the first step, it did; its forward has been changed since then.\n"
                "  Call oomb_accel.disable(model) and oomb_accel.enable(model, config) again."
            )
        return known_log_probs(output.squeeze(0), self._gradient), self._gradient

    @torch.compiler.disable  # around it a user may compile
    def _forward(self, h_1ND: Tensor) -> Tensor:
        if self._gradient is None:
            self._gradient = self._known()
        if self._gradient is None:
            make = nn.Linear.forward.__get__(self._head)
            self._gradient = head_gradient(make, h_1ND.detach().squeeze(0), self._targets_N, self._on_logits)
        self._h = h_1ND
        return h_1ND


def _is_last(state: Attachment, head: nn.Linear) -> bool:
    """Whether the model returns as logits the very tensor that its head returns. Another trunk stands in for its own,
    so its layers do not run for that, and nobody who watches them sees it."""
    base, name = state.base, state.base.base_model_prefix
    # In 16 bits, so that a model shows that makes its logits fp32.
    hidden = torch.zeros(1, _NUM_TOKENS, head.in_features, dtype=torch.bfloat16, device=head.weight.device)
    returned: list[Tensor] = []

    def of_head(h_1ND: Tensor) -> Tensor:
        returned.append(h_1ND)
        return h_1ND

    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=hidden.device)
    rows = torch.arange(_NUM_TOKENS, device=hidden.device)
    trunk = base._modules.get(name)
    if trunk is None:
        return False
    base._modules[name] = _Trunk(hidden)
    try:
        with torch.no_grad(), _replaced(head, of_head):
            output = state.chunk_forward(input_ids=ids, use_cache=False, return_dict=True, logits_to_keep=rows)
        return len(returned) == 1 and output.logits is returned[0] and returned[0].shape == hidden.shape
    except Exception:  # whatever such a model wants: it goes the usual way
        return False
    finally:
        base._modules[name] = trunk


class _Trunk(nn.Module):
    """Has this to say about any tokens."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden: Any = hidden

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self._hidden)


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward inside, past nn.Module's __setattr__."""
    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
