"""Whole training steps of a model of real shape, beside the ceiling of the same arithmetic, in one run."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import oomb_accel
from oomb_accel.bench.ceiling import CeilingPart, measure_ceiling, step_work
from oomb_accel.bench.models import SHAPES, lora_model
from oomb_accel.bench.timing import Measure
from oomb_accel.config import OombConfig
from oomb_accel.integrations.liger import use_liger
from oomb_accel.integrations.shortage import is_shortage
from oomb_accel.plan.shape import ModelShape, shape_of
from oomb_accel.progress import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """What is measured.

    Raises:
        ValueError: sizes that do not fit together.
    """

    shape: str
    """A key of `SHAPES`."""
    tokens: int
    """Of the one document of a step."""
    chunk_tokens: int
    attention: Literal["dense", "sparse"]
    top_k: int | None
    """None with dense attention."""
    steps: int
    """Timed, of which the median counts."""
    base_dtype: Literal["model", "float8"] = "model"
    """What frozen linear layers multiply in."""

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"--{name} is too small.\n  Got {getattr(self, name)}; a step needs {least} or more.\n"
                    f"  Use --{name} {65536 if name == 'tokens' else 3}."
                )
        if self.attention == "dense" and self.top_k is not None:
            raise ValueError(
                "Dense attention selects no pages.\n"
                f"  Got --attention dense with --top_k {self.top_k}.\n  Leave --top_k out, or use --attention sparse."
            )
        config = self.config
        if self.attention == "sparse":
            pages = config.sink_pages + config.recent_pages + config.top_k
            room = self.chunk_tokens // config.page_tokens * config.page_tokens
            earlier = (self.tokens - 1) // room * room // config.page_tokens
            if earlier <= pages:
                fewest = (pages // (room // config.page_tokens) + 1) * room + 1
                raise ValueError(
                    "The document is too short to select pages.\n"
                    f"  Got --tokens {self.tokens}: its last chunk has {earlier} earlier pages, and attends to {pages} "
                    f"with --top_k {config.top_k}.\n  Use --tokens {fewest} or more, or --attention dense."
                )

    @property
    def config(self) -> OombConfig:
        """Settings of the step: nothing in them depends on the memory of the machine."""
        pages: dict[str, Any] = {} if self.top_k is None else {"top_k": self.top_k}
        return OombConfig(
            chunk_tokens=self.chunk_tokens,
            attention=self.attention,
            base_dtype=self.base_dtype,
            page_grad_dtype="bfloat16",
            keep_outputs=False,
            offload=False,
            progress=False,
            **pages,
        )

    @property
    def model(self) -> ModelShape:
        return shape_of(SHAPES[self.shape], self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Steps and their ceiling."""

    sizes: StepSizes
    seconds: list[float]
    """Of each timed step."""
    loss: float
    peak_gib: float
    """Largest device memory that torch held at once; nan on the CPU."""
    liger: bool
    """Whether Liger's norm, RoPE and SwiGLU ran."""
    parts: list[CeilingPart] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ceiling_seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def ratio(self) -> float:
        """Ceiling over step: 1 is a step that loses nothing."""
        return self.ceiling_seconds / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.sizes.tokens / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "sizes": asdict(self.sizes),
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "ceiling_seconds": self.ceiling_seconds,
            "parts": [part.as_dict() for part in self.parts],
            "ratio": self.ratio,
            "peak_gib": None if math.isnan(self.peak_gib) else self.peak_gib,
            "loss": self.loss,
            "liger": self.liger,
        }


def bench_step(
    sizes: StepSizes, measure: Measure, device: torch.device, on_stage: Callable[[str], None] = lambda stage: None
) -> StepResult:
    """Run whole steps, then their ceiling. bf16 on a GPU, fp32 on the CPU.

    Args:
        measure: times the calls of the ceiling.
        on_stage: hears what is done, for progress.

    Raises:
        RuntimeError: the step does not fit into the memory of the device.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        result = _run_steps(sizes, device, dtype, on_stage)
        _empty_cache(device)
        on_stage("ceiling")
        parts = measure_ceiling(step_work(sizes.model, sizes.tokens, sizes.config), measure, device, dtype)
        return replace(result, parts=parts)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"The step does not fit into the memory of this device.\n  {reason}\n"
            f"  Use a smaller --shape or --tokens, or --chunk_tokens {max(128, sizes.chunk_tokens // 2)}."
        ) from error


def _run_steps(
    sizes: StepSizes, device: torch.device, dtype: torch.dtype, on_stage: Callable[[str], None]
) -> StepResult:
    """The steps without a ceiling, one more before them to warm up."""
    on_gpu = device.type == "cuda"
    model = lora_model(sizes.shape, device, dtype)
    liger = use_liger(model, device, fused_loss=False) is None
    oomb_accel.enable(model, sizes.config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    vocabulary = SHAPES[sizes.shape]["vocab_size"]
    ids = torch.randint(0, vocabulary, (1, sizes.tokens), generator=torch.Generator().manual_seed(0)).to(device)
    on_stage("step to warm up")
    # Compiles kernels, plans library calls, and leaves torch the memory that the timed steps take.
    training_step(model, optimizer, ids, autocast=on_gpu)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    loss, seconds = math.nan, []
    for step in range(sizes.steps):
        on_stage(f"step {step + 1} of {sizes.steps}")
        start = time.perf_counter()
        loss = training_step(model, optimizer, ids, autocast=on_gpu)
        seconds.append(time.perf_counter() - start)
    peak_gib = torch.cuda.max_memory_allocated(device) / GIB if on_gpu else math.nan
    return StepResult(sizes=sizes, seconds=seconds, loss=loss, peak_gib=peak_gib, liger=liger)


def _empty_cache(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, autocast: bool = True) -> float:
    """One optimizer step on one document ``[1, tokens]``, by default in bf16 autocast.

    Returns: the loss, when the device is done.
    """
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())  # waits for the device
