"""Trackers of a run, through Accelerate: tensorboard, wandb, trackio. None of them may stop the training."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from oomb_accel.training.folder import LOGS
from oomb_accel.training.recipe import Recipe

_NEEDS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
"""Packages of each tracker, of which one is enough."""
_FILES = ("tensorboard",)
"""Trackers that write files only. They begin when there is something to write: a run that fails leaves no trace."""
PROJECT = "oomb"
"""Under which services list the runs."""


def installed() -> list[str]:
    """Trackers that can be used."""
    return [name for name, packages in _NEEDS.items() if any(map(importlib.util.find_spec, packages))]


def check_trackers(recipe: Recipe) -> None:
    """Refuse a tracker that is not there.

    Raises:
        ValueError: its package is not installed.
    """
    wanted = recipe.report_to
    if wanted in _NEEDS and wanted not in installed():
        there = ", ".join(installed())
        raise ValueError(
            f"The tracker {wanted} is not installed.\n  Got report_to={wanted}; "
            f"{f'installed: {there}' if there else 'none of the trackers is installed'}.\n"
            f"  Install it with pip install {wanted}, or set report_to: {(installed() or ['none'])[0]}."
        )


class Trackers:
    """On the main process only.

    Args:
        recipe: its ``report_to``, ``run_name`` and ``logging_dir`` count, and all of it is told to the trackers.
        accelerator: whose trackers these become.
    """

    def __init__(self, recipe: Recipe, accelerator: Accelerator) -> None:
        self._recipe, self._accelerator = recipe, accelerator
        self._name = recipe.run_name or Path(recipe.output_dir).absolute().name
        everything = installed() if recipe.report_to == "all" else [recipe.report_to]
        self._waiting = [name for name in everything if name in _NEEDS]
        self._open: list[GeneralTracker] = []

    def open_services(self) -> None:
        """Begin with those that talk to a service, so that a missing login shows before the first step.

        Raises:
            ValueError: one refuses.
        """
        for name in [name for name in self._waiting if name not in _FILES]:
            self._waiting.remove(name)
            try:
                self._start(name)
            except Exception as error:  # whatever its client raises: network, login, version
                raise ValueError(
                    f"The tracker {name} cannot be started.\n  {_first_line(error)}.\n"
                    f"  Log in to it, or set report_to: none."
                ) from error

    def log(self, row: dict[str, Any], step: int) -> None:
        """Pass the figures of a step on. A tracker that fails is left out from then on, with a warning."""
        for name in self._waiting:
            try:
                self._start(name)
            except Exception as error:
                self._warn(name, error)
        self._waiting.clear()
        values = {f"train/{key}": value for key, value in row.items() if value is not None and key != "step"}
        for tracker in list(self._open):
            try:
                tracker.log(values, step=step)
            except Exception as error:
                self._open.remove(tracker)
                self._warn(tracker.name, error)

    def close(self) -> None:
        """Tell them that the run is at its end."""
        for tracker in self._open:
            try:
                tracker.finish()
            except Exception as error:
                self._warn(tracker.name, error)
        self._open.clear()

    def _start(self, name: str) -> None:
        recipe = self._recipe
        folder = recipe.logging_dir or str(Path(recipe.output_dir) / LOGS)
        make = LOGGER_TYPE_TO_CLASS[name]
        tracker = make(self._name, folder) if name in _FILES else make(PROJECT, name=self._name)
        if hasattr(tracker, "start"):  # of releases in which making one does not begin it
            tracker.start()
        tracker.store_init_configuration(_flat(recipe.to_dict(), plain=name in _FILES))
        self._open.append(tracker)
        self._accelerator.trackers = list(self._open)

    def _warn(self, name: str, error: Exception) -> None:
        print(
            f"warning: the tracker {name} failed and gets no more figures ({_first_line(error)}); training goes on, "
            "and metrics.jsonl has them all",
            flush=True,
        )


def _flat(settings: dict[str, Any], *, plain: bool) -> dict[str, Any]:
    """Settings without a mapping inside.

    Args:
        plain: only numbers, truth values and text, which is all that tensorboard shows.
    """
    block = {f"oomb.{name}": value for name, value in settings["oomb"].items()}
    flat = {name: value for name, value in settings.items() if name != "oomb"} | block
    if not plain:
        return flat
    return {name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in flat.items()}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
