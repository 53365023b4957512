"""The parts of one run, and what it did so far."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator

from oomb_accel.integrations.step_metrics import StepMetrics
from oomb_accel.memory_report import MemoryReport
from oomb_accel.progress import ProgressLine
from oomb_accel.rng import RngState
from oomb_accel.sampler import LengthBalancedSampler
from oomb_accel.training.data import Corpus
from oomb_accel.training.folder import RunFolder
from oomb_accel.training.identity import Identity
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.trackers import Trackers


@dataclass(kw_only=True, slots=True)
class Summary:
    """What a run did, its earlier parts included. Times in seconds, memory in GiB; tokens count all devices."""

    steps: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    waiting: float = 0.0
    """Share of the devices' time spent waiting for another one's longer documents, counted in tokens."""
    first_loss: float = math.nan
    last_loss: float = math.nan
    last_tokens_loss_before: float | None = None
    last_tokens_loss_after: float | None = None
    peak_gpu_gib: float | None = None
    peak_host_gib: float = 0.0
    """Of the process since it was started, loading included, as the kernel counts it. ``"process"`` in
    `memory_peaks` is the largest sample in a step."""
    memory_peaks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Peaks by tier, in bytes, and when they were; see `MemoryReport`."""
    output_dir: str = ""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Summary:
        """From what a file says, whatever else it says."""
        return cls(**{item.name: values[item.name] for item in dataclasses.fields(cls) if item.name in values})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(slots=True)
class Run:
    """The prepared parts of one run."""

    recipe: Recipe
    accelerator: Accelerator
    model: Any
    """As prepared: plain, in DDP, or a DeepSpeed engine."""
    tokenizer: Any
    corpus: Corpus
    sampler: LengthBalancedSampler
    optimizer: Any
    folder: RunFolder
    line: ProgressLine
    num_steps: int
    num_targets: list[int]
    """Targets of each document."""
    identity: Identity
    memory: MemoryReport | None = None
    """Where memory goes; None where chunk recurrence is off."""
    metrics: StepMetrics | None = None
    """Figures of a step beyond its loss; None where chunk recurrence is off."""
    trackers: Trackers | None = None
    """Who gets the figures of every step, beside metrics.jsonl."""
    summary: Summary = field(default_factory=Summary)
    norm_hook: Any = None
    """Holds the norm of the gradient where it can only be measured inside of an engine's step."""
    updating: bool = False
    """True while weights and optimizer state are between two steps: such a state must not be saved."""
    rng: RngState | None = None
    """Random generators as they were behind the last step that is done, or when the first one began."""
    row: dict[str, Any] | None = None
    """What metrics.jsonl has to say about the last step that is done, until it is written."""
    finished: bool = False
    """True where there is nothing to do, as the folder holds the result of this run already."""
    started: float = field(default_factory=time.perf_counter)
    """When this part of the run began; moved back by the time of earlier parts."""

    def say(self, text: str) -> None:
        """Print on the main process, without disturbing the progress line."""
        self.line.clear()
        if self.accelerator.is_main_process:  # Accelerate's own print speaks once on every machine
            print(text, flush=True)

    @property
    def pad_token_id(self) -> int:
        return self.tokenizer.pad_token_id or 0

    @property
    def bare_model(self) -> Any:
        """The model without wrappers of Accelerate, DDP and DeepSpeed."""
        return self.accelerator.unwrap_model(self.model)

    def trainable(self) -> dict[str, Any]:
        """Trained parameters by name."""
        return {name: p for name, p in self.bare_model.named_parameters() if p.requires_grad}
