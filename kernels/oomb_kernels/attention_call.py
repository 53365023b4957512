"""What one dense attention call computes, apart from its tensors.

Shape suffixes in this package: H query heads, G key/value heads (H is a multiple of G), T tokens (Tq queries,
Tk keys), D head_dim, P page_tokens, N rows, V vocabulary. There is no batch dimension.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The mask and the score function of one attention call. Hashable, so it can key a cache.

    Query i and key j are positions inside the call. With ``shift = Tk - Tq`` the last query is aligned with
    the last key.

    Raises:
        ValueError: a field is out of range.
    """

    scale: float
    """Factor on q·k, usually ``head_dim ** -0.5``."""
    causal: bool = False
    """Query i sees keys ``j <= i + shift`` (bottom-right aligned)."""
    window: int | None = None
    """In tokens; query i additionally sees only keys ``j > i + shift - window``: causal, its last `window`
    keys and itself among them."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(scores / softcap)`` after the scale and before the mask."""
    segments: tuple[int, ...] | None = None
    """Token counts of packed documents, summing to Tq == Tk; each attends causally inside itself (implies
    `causal`)."""
    deterministic: bool = False
    """The backward must give the same bits each time."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}; use window=None for no window.")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}; use softcap=None for none.")
        if self.segments is not None and (not self.segments or min(self.segments) < 1):
            raise ValueError(
                f"segments must be positive token counts, got {self.segments}; leave empty documents out, "
                "e.g. segments=(3, 5)."
            )

    def simplified(self, num_q: int, num_k: int) -> "AttentionCall":
        """The same mask with everything dropped that has no effect at this size, so that more backends can
        run it."""
        call = self
        if call.segments is not None and len(call.segments) == 1:
            call = replace(call, segments=None, causal=True)
        longest = num_k if call.segments is None else max(call.segments)
        if call.window is not None and call.window >= longest:
            call = replace(call, window=None)
        if call.causal and call.segments is None and num_q == 1 < num_k:
            call = replace(call, causal=False)
        return call

    def has_empty_rows(self, num_q: int, num_k: int) -> bool:
        """Whether some query sees no key at all."""
        causal = self.causal and self.segments is None
        return num_q > 0 and (num_k == 0 or (causal and num_q > num_k))
