"""How large each part of the study is: as published, and tiny for tests on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens, unless they say otherwise."""

    native_tokens: int = 8192
    """A length that the model was trained for."""
    native_chunk: int = 1024
    long_tokens: int = 32768
    """A length that it reaches by YaRN and a short adaptation."""
    long_chunk: int = 2048
    rope_factor: float = 4.0
    trained_tokens: int = 16384
    """Documents of the training curves and of the planted facts."""
    trained_chunk: int = 4096
    recent_tokens: int = 512
    """Attended to before a chunk without selection, whatever the page size."""
    pages: tuple[int, ...] = (32, 64, 128, 256)
    page: int = 128
    top_ks: tuple[int, ...] = (4, 8, 16, 32, 64)
    top_k: int = 16
    """Where something else is varied."""
    native_documents: int = 12
    long_documents: int = 8
    prose_documents: int = 3
    variant_documents: int = 4
    gradient_documents: int = 4
    mass_documents: int = 2
    mass_chunks: tuple[int, ...] = (5, 10, 15)
    """Chunks of a long document whose attention is looked at."""
    adapt_steps: int = 60
    curve_steps: int = 200
    evaluate_every: int = 50
    evaluated_documents: int = 6
    fact_steps: int = 120
    fact_documents: int = 24
    facts: int = 24
    questions: int = 12
    max_files: int | None = None

    def recent_pages(self, page_tokens: int) -> int:
        """Recent pages of this size that make up ``recent_tokens``."""
        return max(1, self.recent_tokens // page_tokens)


FULL = Sizes()
TINY = Sizes(
    native_tokens=128,
    native_chunk=32,
    long_tokens=256,
    long_chunk=64,
    rope_factor=2.0,
    trained_tokens=384,
    trained_chunk=64,
    recent_tokens=16,
    pages=(8, 16),
    page=16,
    top_ks=(2, 4),
    top_k=4,
    native_documents=1,
    long_documents=2,
    prose_documents=1,
    variant_documents=1,
    gradient_documents=1,
    mass_documents=1,
    mass_chunks=(2, 3),
    adapt_steps=2,
    curve_steps=3,
    evaluate_every=2,
    evaluated_documents=1,
    fact_steps=2,
    fact_documents=2,
    facts=3,
    questions=2,
    max_files=12,
)
SMOKE = replace(
    FULL,
    pages=(64, 128),
    top_ks=(4, 16),
    native_documents=1,
    long_documents=1,
    prose_documents=1,
    variant_documents=1,
    gradient_documents=1,
    mass_documents=1,
    mass_chunks=(10,),
    adapt_steps=2,
    curve_steps=3,
    evaluate_every=3,
    evaluated_documents=1,
    fact_steps=2,
    fact_documents=2,
)
"""The real model at its real lengths, a few documents and steps: does everything run?"""
SIZES = {"full": FULL, "smoke": SMOKE, "tiny": TINY}
