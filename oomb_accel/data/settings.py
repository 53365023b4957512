"""What to read, what to train on, and what to do with lengths."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oomb_accel.sources import CACHE_VARIABLE

TrainOn = Literal["auto", "all", "completions", "assistant"]
FolderAs = Literal["auto", "document", "files"]
Truncation = Literal["error", "drop", "start", "end", "split"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """The settings of a recipe that concern data; see :class:`oomb_accel.training.recipe.Recipe`."""

    paths: tuple[str, ...]
    """Files, folders and hub ids, in the order in which they are read."""
    text_field: str = "text"
    split: str = "train"
    folder_as: FolderAs = "auto"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    train_on: TrainOn = "auto"
    max_length: int | None = None
    truncation: Truncation = "error"
    packing: bool = False
    cache: str | None = None

    @property
    def shown_paths(self) -> str:
        """The paths as messages name them."""
        return ", ".join(map(repr, self.paths))

    def cache_folder(self) -> Path:
        """Where token ids are kept between runs: the setting, ``OOMB_CACHE``, or ``~/.cache/oomb_accel``."""
        chosen = self.cache or os.environ.get(CACHE_VARIABLE) or "~/.cache/oomb_accel"
        return Path(chosen).expanduser().absolute()
