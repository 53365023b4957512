"""Accelerate's DeepSpeed plugin with an ``"oomb"`` block that is read, checked and honoured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import DeepSpeedPlugin

from oomb_accel.config import OombConfig
from oomb_accel.integrations.engine import install
from oomb_accel.integrations.versions import check_versions
from oomb_accel.sources import BLOCK, Resolved, Source, gather, launched_config, resolve


@dataclass
class OombPlugin(DeepSpeedPlugin):
    """A ``DeepSpeedPlugin`` for training in chunks.

    Use: ``Accelerator(deepspeed_plugin=OombPlugin(hf_ds_config="ds.json"))``. The model that ``accelerator.prepare``
    gets is switched on. Settings come from ``oomb``, from ``OOMB_`` variables, from a preset and from the block of
    the DeepSpeed config; without any, the defaults hold.

    Raises:
        ValueError: settings that are unknown, wrong or contradict each other, naming both places.
        RuntimeError: a DeepSpeed outside the tested range.
    """

    oomb: OombConfig | Mapping[str, Any] | None = field(
        default=None, metadata={"help": "Settings of oomb_accel: an OombConfig, or a mapping as in the oomb block."}
    )
    resolved: Resolved = field(init=False, repr=False)
    """The settings that hold, and where each came from."""

    def __post_init__(self) -> None:
        check_versions("deepspeed", "accelerate")
        given = self.hf_ds_config
        if given is None:  # as Accelerate does: accelerate launch passes the file by this variable
            given = launched_config()
        # Before Accelerate reads the file: it would lose the name, and a key that stands twice.
        config = getattr(given, "config", given)  # an HfDeepSpeedConfig holds a dict
        python = Source.of_python(self.oomb, "OombPlugin(oomb=...)")
        self.resolved = resolve(*gather(None if config == "none" else config, python))
        super().__post_init__()
        # Resolved here: Accelerate refuses every "auto" that it does not know.
        self.deepspeed_config[BLOCK] = self.resolved.block()
        install()
