"""A Trainer callback that sees what the chunk recurrence did."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from oomb_accel.integrations.attachment import attachment_of


class Watch(TrainerCallback):
    """Counts chunk passes; stands behind OombCallback in the list."""

    def __init__(self) -> None:
        self.chunks = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        attachment_of(kwargs["model"]).on_chunk = self._count

    def _count(self, event: Any) -> None:
        self.chunks += event.num_chunks > 1
