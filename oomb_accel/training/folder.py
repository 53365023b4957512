"""The folder of one run: what is in it, and how files get there so that a kill never leaves half of one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from oomb_accel.training.recipe import Recipe

METRICS, RECIPE, SUMMARY = "metrics.jsonl", "resolved_recipe.yaml", "summary.json"
PRODUCTS = (
    METRICS,
    RECIPE,
    SUMMARY,
    "checkpoint-*",
    "adapter_*",
    "model*.safetensors",
    "model.safetensors.index.json",
)
"""What a run leaves and a replacing run removes; other files in the folder are not touched."""


class RunFolder:
    """Nothing is written or removed before :meth:`start`, so a run that cannot begin leaves no trace.

    Args:
        recipe: its ``output_dir`` and ``overwrite_output_dir`` count.

    Raises:
        ValueError: the folder holds something else, or cannot be written.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.path = Path(recipe.output_dir)
        self.last_saved: Path | None = None
        self._recipe = recipe
        self._started = False
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"output_dir {str(self.path)!r} is a file.\n  Got a file.\n  Set output_dir to a new folder."
            )
        if self.path.is_dir() and any(self.path.iterdir()):
            if not (self.path / RECIPE).is_file():
                raise ValueError(
                    f"output_dir {str(self.path)!r} holds files of something else.\n"
                    f"  Got {', '.join(sorted(item.name for item in self.path.iterdir())[:5])}.\n"
                    "  Set output_dir to a new or empty folder."
                )
            if not recipe.overwrite_output_dir:
                raise ValueError(
                    f"output_dir {str(self.path)!r} holds another run.\n  Found its {RECIPE}.\n"
                    "  Set another output_dir, or replace that run with --overwrite_output_dir."
                )
        parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        try:
            with tempfile.TemporaryDirectory(prefix=".oomb-", dir=parent):
                pass
        except OSError as error:
            raise ValueError(
                f"output_dir {str(self.path)!r} cannot be written.\n  {error}.\n"
                "  Set output_dir to a folder of your own."
            ) from None

    def start(self) -> None:
        """Make the folder, remove the run it replaces, save the resolved recipe; later calls do nothing."""
        if self._started:
            return
        self._started = True
        for item in [item for pattern in PRODUCTS for item in self.path.glob(pattern)]:
            shutil.rmtree(item) if item.is_dir() else item.unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self._recipe.to_dict(), sort_keys=False)
        self._replace(RECIPE, lambda path: path.write_text(text, encoding="utf-8"))

    def log(self, row: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, in a single write: a kill behind it cannot lose it."""
        line = (json.dumps(row) + "\n").encode()
        handle = os.open(self.path / METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> Path:
        """A folder ``checkpoint-<step>`` that is there whole or not at all; ``write`` fills a folder."""
        final = self.path / f"checkpoint-{step}"
        os.replace(self._written(write), final)
        self.last_saved = final
        return final

    def save_final(self, write: Callable[[Path], None]) -> None:
        """The result, directly in the folder. Weights come last: where they are, everything else is too."""
        written = self._written(write)
        for item in sorted(written.iterdir(), key=lambda item: item.suffix == ".safetensors"):
            os.replace(item, self.path / item.name)
        written.rmdir()
        self.last_saved = self.path

    def save_summary(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2) + "\n"
        self._replace(SUMMARY, lambda path: path.write_text(text, encoding="utf-8"))

    def _written(self, write: Callable[[Path], None]) -> Path:
        """A temporary folder beside its place, filled by ``write``; removed again when that fails."""
        temporary = self.path / f".saving-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            write(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return temporary

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        temporary = self.path / f".{name}-{os.getpid()}"
        write(temporary)
        os.replace(temporary, self.path / name)
