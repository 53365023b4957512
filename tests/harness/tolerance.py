"""The three tolerance rules of this test suite. No test compares numbers in any other way.

1. Definitional equality in fp32: two formulas for the same number (`assert_same_loss`, `assert_same_gradients`).
2. The twice-plain rule in low precision: our error against fp32 is at most twice the error of plain low-precision
   code on the same weights, plus the rounding floor of the data (`assert_twice_plain`). Two errors of a few numbers
   each say little about each other: where there are few, plain code's error in more numbers of their kind is asked.
3. Equality of bits for what must not change numbers (`assert_same_bits`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TOKEN_LOSS_ABSOLUTE = 1e-5
TOTAL_LOSS_RELATIVE = 1e-6
GRADIENT_RELATIVE = 1e-5
TRUE_ZERO = 1e-6
"""A gradient smaller than this share of the largest one is zero but for rounding (Qwen2's key bias, everything in
the attention of a document of two tokens): it is judged by its absolute size."""
CHANCE = 5.0
"""How far the L2 norm of errors may lie above its typical size by chance, in typical errors of one number. For
independent normal errors it does so once in 270,000 cases, however many numbers they are: a norm has slope 1."""


def assert_same_values(ours: Tensor, reference: Tensor, what: str) -> None:
    """Rule 1 for losses, log-probabilities and logits, element by element."""
    assert ours.shape == reference.shape, f"{what}: shape {tuple(ours.shape)} for {tuple(reference.shape)}"
    if ours.numel() == 0:
        return
    error = (ours.double() - reference.double()).abs().max().item()
    assert error <= TOKEN_LOSS_ABSOLUTE, f"{what}: off by {error:.3g}, allowed {TOKEN_LOSS_ABSOLUTE:g}"


def assert_same_total(ours: Tensor, reference: Tensor, what: str = "loss") -> None:
    """Rule 1 for a total loss."""
    error = abs(ours.item() - reference.item())
    allowed = TOTAL_LOSS_RELATIVE * abs(reference.item())
    assert error <= allowed, f"{what}: {ours.item()!r} for {reference.item()!r}, allowed {allowed:g}"


def assert_same_gradients(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Rule 1 for gradients by name: relative L2 error, or absolute size where the true gradient is zero."""
    assert ours.keys() == reference.keys(), set(ours) ^ set(reference)
    largest = max((_norm(g) for g in reference.values()), default=0.0)
    failures = []
    for name, wanted in reference.items():
        size, error = _norm(wanted), _norm(ours[name].double() - wanted.double())
        allowed = TRUE_ZERO * largest if size <= TRUE_ZERO * largest else GRADIENT_RELATIVE * size
        if not error <= allowed:
            failures.append(f"  {name}: error {error:.3g} of {size:.3g}, allowed {allowed:.3g}")
    assert not failures, "gradients differ\n" + "\n".join(failures)


def worst_relative_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest error that `assert_same_gradients` judges relatively, for reports."""
    largest = max((_norm(g) for g in reference.values()), default=0.0)
    judged = [(n, size) for n, g in reference.items() if (size := _norm(g)) > TRUE_ZERO * largest]
    return max((_norm(ours[n].double() - reference[n].double()) / size for n, size in judged), default=0.0)


def twice_plain_error(
    ours: Tensor, plain: Tensor, exact: Tensor, data: torch.dtype, more_errors: Tensor | None = None
) -> tuple[float, float]:
    """Rule 2 as numbers: our error and what is allowed, both as L2 norms.

    Twice plain code's error is a fair limit for many numbers, since the norm of their errors hardly varies. The error
    of a single number is one draw: where plain code was lucky, nobody is within twice of it.

    Args:
        more_errors: plain code's errors in more numbers of the same kind, which tell the size of a typical one. Of
            ``n`` numbers an error of ``sqrt(n) + CHANCE`` typical ones is allowed then: 6 of a single number, 2 of
            each of 25. Of more numbers twice plain code's error is the wider limit, as it was.
    """
    floor = torch.finfo(data).eps / 2 * _norm(exact)
    allowed = 2 * _norm(plain.double() - exact.double())
    if more_errors is not None and 0 < exact.numel() < more_errors.numel():
        typical = _norm(more_errors) / more_errors.numel() ** 0.5
        allowed = max(allowed, typical * (exact.numel() ** 0.5 + CHANCE))
    return _norm(ours.double() - exact.double()), allowed + floor


def assert_twice_plain(
    ours: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    data: torch.dtype = torch.bfloat16,
    more_errors: Mapping[str, Tensor] | None = None,
) -> None:
    """Rule 2 for tensors by name.

    Args:
        ours, plain: results in low precision.
        exact: the same from the same (rounded) weights in fp32.
        data: dtype of the data, which sets the rounding floor.
        more_errors: plain code's errors in more numbers of the kind of a tensor of this name, see `twice_plain_error`.
    """
    assert ours.keys() == plain.keys() == exact.keys()
    largest = max((_norm(g) for g in exact.values()), default=0.0)
    failures = []
    for name in exact:
        more = (more_errors or {}).get(name)
        error, allowed = twice_plain_error(ours[name], plain[name], exact[name], data, more)
        allowed += TRUE_ZERO * largest
        if not error <= allowed:
            failures.append(f"  {name}: error {error:.3g}, allowed {allowed:.3g}, size {_norm(exact[name]):.3g}")
    assert not failures, "more than twice plain low precision\n" + "\n".join(failures)


def assert_same_bits(ours: Tensor | Mapping[str, Tensor], reference: Tensor | Mapping[str, Tensor]) -> None:
    """Rule 3."""
    if isinstance(ours, Tensor):
        assert isinstance(reference, Tensor)
        assert torch.equal(ours, reference), "bits differ"
        return
    assert not isinstance(reference, Tensor)
    assert ours.keys() == reference.keys(), set(ours) ^ set(reference)
    different = [name for name in ours if not torch.equal(ours[name], reference[name])]
    assert not different, f"bits differ in {different}"


def _norm(x: Tensor) -> float:
    return x.double().norm().item()
