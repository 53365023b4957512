"""What is to be trained, how and on what: the question to which an estimate is the answer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from oomb_accel.config import OombConfig
from oomb_accel.plan.adapters import PLAIN_LORA, Adapters
from oomb_accel.plan.gpus import H200, Gpu
from oomb_accel.plan.limits import check_float8, check_float8_products, check_page_kernels, sparse_layers_of
from oomb_accel.plan.pages import PageLayout
from oomb_accel.plan.runs import ChunkRun, runs_of_document
from oomb_accel.plan.shape import ModelShape
from oomb_accel.plan.sizes import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was found on a machine and in a model just before a step, instead of what sizes and names say."""

    device_bytes: int
    """Free for activations, gradients and pages: without what is never planned for, and what an optimizer still makes
    for itself."""
    host_bytes: int
    """That each process may take for pages."""
    graph_bytes_per_token: float
    """What a token's graph holds between forward and backward, without logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One optimizer step on one document per GPU. Names as in `OombConfig` and recipes."""

    model: ModelShape
    tokens: int
    """Length of the document."""
    lora_r: int = 16
    """Rank of the adapters on all linear layers; 0 trains all weights."""
    adapters: Adapters = PLAIN_LORA
    weights_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    attention: Literal["dense", "sparse"] = "dense"
    top_k: int = 64
    q_block: int = 128
    sink_pages: int = 1
    recent_pages: int = 4
    dense_layers: tuple[int, ...] = ()
    page_budget: int | None = None
    distinct: float | None = None
    """See `PageLayout`."""

    chunk_tokens: int = 8192
    page_tokens: int = 128
    span_tokens: int = 32768
    page_dtype: Literal["model", "float8"] = "model"
    page_grad_dtype: Literal["float32", "bfloat16"] = "float32"
    base_dtype: Literal["model", "float8"] = "model"
    keep_outputs: bool | Literal["auto"] = "auto"
    keep_last_graph: bool = True
    offload: bool | Literal["auto"] = "auto"
    device_pages_bytes: int | None = None
    host_memory_bytes: int | None = None
    """Most that one process may pin for pages; None is its share of the host."""

    gpu: Gpu = H200
    on_gpu: bool = True
    """False for a run on a CPU, whose GPU is an assumption: it computes by the definitions, which refuse less."""
    num_gpus: int = 1
    zero_stage: int | None = None
    """None is no DeepSpeed: plain on one GPU, DDP on several."""
    zero_offload: bool = False
    """Optimizer states in host memory."""
    reduce_per_chunk: bool = False
    """`oomb_accel.deepspeed.step` instead of one backward."""
    host_bytes: int = 128 * GIB
    """Memory of the host, for all GPUs together."""
    found: Found | None = None
    """None before there is a machine."""

    def __post_init__(self) -> None:
        check_base_dtype(self.base_dtype, lora_r=self.lora_r, zero_stage=self.zero_stage)

    def chunks(self) -> list[ChunkRun]:
        """The document's chunks."""
        return runs_of_document(self.tokens, chunk_tokens=self.chunk_tokens, page_tokens=self.page_tokens)

    @property
    def trainable(self) -> int:
        """Numbers that are trained."""
        if not self.lora_r:
            return self.model.num_parameters
        return self.model.lora_parameters(self.lora_r) + self.trained_whole

    @property
    def trained_whole(self) -> int:
        """Numbers that are trained beside adapters."""
        return self.adapters.num_vocabulary_modules * self.model.head_weights if self.lora_r else 0

    @property
    def fuses_adapters(self) -> bool:
        """Whether there are adapters, and they run within matrix products."""
        return self.lora_r > 0 and self.adapters.plain

    @property
    def float8_bytes(self) -> int:
        """Both copies of the base weights in 8 bits."""
        return 2 * self.model.linear_layer_weights if self.base_dtype == "float8" else 0

    @property
    def is_sharded(self) -> bool:
        """Whether weights are divided among GPUs."""
        return self.zero_stage == 3 and self.num_gpus > 1

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Layers that select pages."""
        if self.attention != "sparse":
            return frozenset()
        dense = {layer % self.model.num_layers for layer in self.dense_layers}
        return frozenset(
            layer for layer, window in enumerate(self.model.windows) if window is None and layer not in dense
        )

    @property
    def pages(self) -> PageLayout:
        return PageLayout(
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            windows=self.model.windows,
            sparse_layers=self.sparse_layers,
            value_dtype="float8" if self.page_dtype == "float8" else self.compute_dtype,
            grad_dtype=self.page_grad_dtype,
            compute_dtype=self.compute_dtype,
            page_tokens=self.page_tokens,
            span_tokens=self.span_tokens,
            top_k=self.top_k,
            q_block=self.q_block,
            sink_pages=self.sink_pages,
            recent_pages=self.recent_pages,
            page_budget=self.page_budget,
            distinct=self.distinct,
        )


def dtypes_of(
    torch_dtype: str,
    *,
    lora_r: int,
    zero_stage: int | None,
    mixed_precision: str = "auto",
    stored_dtype: str | None = None,
) -> dict[str, Any]:
    """What the settings of a recipe decide about the dtypes of a `Job`, by the names of its fields. Weights are
    those of the model's files (``stored_dtype``) where they are frozen, and fp32 where all are trained, unless
    something else is said; DeepSpeed keeps an fp32 copy of bf16 weights of its own."""
    wide = torch_dtype == "float32" or (torch_dtype == "auto" and (lora_r == 0 or stored_dtype == "float32"))
    casts = mixed_precision != "no"
    return {
        "weights_dtype": "float32" if wide and (zero_stage is None or not casts) else "bfloat16",
        "compute_dtype": "float32" if wide and not casts else "bfloat16",
    }


def settings_of(config: OombConfig) -> dict[str, Any]:
    """What settings decide about a `Job`, by the names of its fields. Where they are "auto", chunks and storage are the
    default ones: `choose` chooses among others."""
    same = {item.name for item in fields(Job)} & {item.name for item in fields(OombConfig)}
    return {name: getattr(config, name) for name in same} | {
        "chunk_tokens": config.known_chunk_tokens,
        "page_grad_dtype": "float32" if config.page_grad_dtype == "auto" else config.page_grad_dtype,
        "device_pages_bytes": None if config.device_pages_gib == "auto" else int(config.device_pages_gib * GIB),
        "host_memory_bytes": None if config.host_memory_gib == "auto" else int(config.host_memory_gib * GIB),
    }


def check_settings(job: Job) -> None:
    """Refuse what the engine will refuse before its first step, by the model's sizes and the GPU.

    Raises:
        ValueError: as the functions of `limits`.
    """
    if job.attention == "sparse":
        sparse_layers_of(job.model.windows, job.dense_layers)
    if not job.on_gpu:
        return
    for setting in ("page_dtype", "base_dtype"):
        if getattr(job, setting) == "float8":
            check_float8(setting, job.gpu.name, job.gpu.compute_capability)
    if job.base_dtype == "float8":
        check_float8_products(job.compute_dtype)
    if job.attention == "sparse":
        check_page_kernels(job.pages.value_dtype, job.model.head_dim, job.page_tokens, job.q_block)


def are_settings_refused(job: Job) -> bool:
    """Whether `check_settings` does."""
    try:
        check_settings(job)
    except ValueError:
        return True
    return False


def check_base_dtype(base_dtype: str, *, lora_r: int, zero_stage: int | None) -> None:
    """Refuse weights in 8 bits that are trained or held in parts.

    Raises:
        ValueError: they are.
    """
    if base_dtype == "float8" and (zero_stage == 3 or not lora_r):
        raise ValueError(
            "Base weights in 8 bits must be frozen, and whole on each GPU.\n"
            f"  Got base_dtype='float8' with {'ZeRO 3' if lora_r else 'all weights trained'}.\n"
            f"  Set base_dtype='model', or use {'ZeRO 2' if lora_r else 'adapters (lora_r: 16)'}."
        )
