"""What a recipe says of its adapters beside their rank, as far as a step takes more or keeps less for it. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

_IN_VOCABULARY = ("embed_tokens", "lm_head")
"""Modules as large as the vocabulary; of others a step takes next to nothing."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Plain LoRA on all linear layers but the head, if nothing else is said."""

    plain: bool = True
    """Without dropout, and not DoRA: other layers are run by PEFT, slower, and none of their products are kept."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    whole: tuple[str, ...] = ()
    """Modules that are trained whole beside them."""

    def are_on(self, layer: str) -> bool:
        """Whether layers of this name have one."""
        if self.targets == "all-linear":
            return layer != "lm_head"
        return layer in _last_names(self.targets)

    @property
    def train_head(self) -> bool:
        """Whether the head is not frozen, or has an adapter."""
        return self.are_on("lm_head") or "lm_head" in _last_names(self.whole)

    @property
    def num_vocabulary_modules(self) -> int:
        """Modules as large as the vocabulary that are trained whole."""
        return sum(name in _IN_VOCABULARY for name in _last_names(self.whole))


def _last_names(paths: Iterable[str]) -> set[str]:
    return {path.rpartition(".")[2] for path in paths}


PLAIN_LORA = Adapters()
