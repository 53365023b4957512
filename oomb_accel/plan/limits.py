"""What settings ask for that a GPU or a model does not have: the engine refuses it before its first step, and the
estimate, so that both say the same. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from oomb_accel.plan.sizes import DTYPE_BYTES, GIB, gib_text
from oomb_accel.reading import shown

LONGEST = 1 << 24
"""Tokens of a document; no estimate looks further."""

_FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of Ada, the first GPUs that read numbers in e4m3."""
_ALIGNED_BYTES = 16
"""What rows must be a multiple of for the copy engine to step over them."""
_SMALLEST_TILE = 16
"""Of a matrix product in Triton."""


def check_tokens(name: str, tokens: int | None, given: object) -> int:
    """The number, where it is one of tokens that a document may have.

    Args:
        name: of the setting or option.
        tokens: None for what is no number.
        given: what was written.

    Raises:
        ValueError: it is none.
    """
    if tokens is None or not 2 <= tokens <= LONGEST:
        raise ValueError(
            f"{name} must be at least 2 tokens, and at most {LONGEST:,} ({LONGEST >> 20}M).\n  Got {shown(given)}.\n"
            "  Write 131072, 128K or 1M (K is 1,024, M is 1,048,576)."
        )
    return tokens


def host_share(available_bytes: int, margin_bytes: int, ranks_on_host: int) -> int:
    """What each of the processes on a machine may take of its memory."""
    return max(0, available_bytes - margin_bytes) // ranks_on_host


def check_host_memory(
    asked_bytes: int, *, available_bytes: int, margin_bytes: int, ranks_on_host: int, scarce: str, other: str = ""
) -> None:
    """Refuse a `host_memory_gib` that is more than each process may take.

    Args:
        margin_bytes: what is never planned for.
        scarce: what decides over what is available, in words.
        other: what else would do, behind "or".

    Raises:
        ValueError: it is more.
    """
    share = host_share(available_bytes, margin_bytes, ranks_on_host)
    if asked_bytes <= share:
        return
    several = ranks_on_host > 1
    remedy = f"Set host_memory_gib={gib_text(share)} or less, or 'auto'{f', or {other}' if other else ''}."
    if gib_text(share) == "0":
        remedy = "Free memory on this machine or raise the container's limit; no setting fits what is left."
    raise ValueError(
        f"host_memory_gib is more than this machine can give{' to all its ranks' if several else ''}.\n"
        f"  Asked for {f'{ranks_on_host} x ' if several else ''}{asked_bytes / GIB:g} GiB; {gib_text(available_bytes)} "
        f"GiB are available, of which {gib_text(margin_bytes)} GiB are left to others ({scarce}).\n"
        f"  {remedy}"
    )


def check_device_pages(asked_bytes: int | None, gpu: str, memory_bytes: int, *, other: str = "") -> None:
    """Refuse a `device_pages_gib` that is more than a whole GPU.

    Args:
        gpu: its name.
        memory_bytes: that it has.
        other: what else would do, behind "or".

    Raises:
        ValueError: it is more.
    """
    if asked_bytes is not None and asked_bytes > memory_bytes:
        raise ValueError(
            "device_pages_gib is more than the GPU has.\n"
            f"  Got device_pages_gib={asked_bytes / GIB:g}; {gpu} has {memory_bytes / GIB:,.1f} GiB.\n"
            f"  Set device_pages_gib='auto'{f', or {other}' if other else ''}."
        )


def check_float8(setting: str, gpu: str, capability: tuple[int, int]) -> None:
    """Refuse a GPU that cannot read numbers in e4m3.

    Args:
        setting: that asks for them.
        gpu: its name.
        capability: its compute capability.

    Raises:
        ValueError: a GPU older than Ada and Hopper.
    """
    if capability < _FLOAT8_CAPABILITY:
        has, needed = (".".join(map(str, numbers)) for numbers in (capability, _FLOAT8_CAPABILITY))
        raise ValueError(
            f"This GPU has no 8-bit floats, which {setting}='float8' asks for.\n"
            f"  {gpu} has compute capability {has}, needed is {needed}.\n"
            f"  Set {setting}='model'."
        )


def check_float8_products(compute_dtype: str) -> None:
    """Refuse products in 8 bits where they would not come out in what the model computes in.

    Raises:
        ValueError: it does not compute in bfloat16.
    """
    if compute_dtype not in ("bfloat16", "float64"):  # fp64 is for oomb verify
        raise ValueError(
            "On a GPU, products in 8 bits come out in bfloat16.\n"
            f"  Got base_dtype='float8' with a model that computes in {compute_dtype}.\n"
            "  Set mixed_precision='bf16' or torch_dtype='bfloat16' (oomb verify: --dtype bfloat16), or "
            "base_dtype='model'."
        )


def check_page_kernels(pages_dtype: str, head_dim: int, page_tokens: int, q_block: int) -> None:
    """Refuse sizes that the kernels of selected pages cannot run.

    Args:
        pages_dtype: storage of K and V.

    Raises:
        ValueError: pages or query blocks that no tile divides, or a head_dim that the copy engine cannot step over.
    """
    if pages_dtype == "float64":
        return  # runs by the definition, in plain torch
    step = _ALIGNED_BYTES // DTYPE_BYTES[pages_dtype]
    if head_dim % step:
        remedy = "page_dtype='model'" if pages_dtype == "float8" else "attention='dense'"
        raise ValueError(
            f"head_dim must be a multiple of {step} for the sparse kernels in {pages_dtype}.\n  Got {head_dim}.\n"
            f"  Use {remedy} for this model."
        )
    for name, tokens in (("page_tokens", page_tokens), ("q_block", q_block)):
        if tokens % _SMALLEST_TILE:
            raise ValueError(
                f"{name} must be a multiple of {_SMALLEST_TILE} for the sparse kernels.\n  Got {name}={tokens}.\n"
                f"  Set {name}={-(-tokens // _SMALLEST_TILE) * _SMALLEST_TILE}."
            )


def sparse_layers_of(windows: Sequence[int | None], dense_layers: Sequence[int]) -> frozenset[int]:
    """Layers that select pages with sparse attention: all but windows and those that are to stay dense.

    Args:
        windows: of each layer in tokens; None where it attends to everything.
        dense_layers: as in `OombConfig`.

    Raises:
        ValueError: a layer that the model does not have, or nothing is left to be sparse.
    """
    num_layers = len(windows)
    unknown = [layer for layer in dense_layers if not -num_layers <= layer < num_layers]
    if unknown:
        raise ValueError(
            f"dense_layers names a layer that the model does not have.\n"
            f"  Got {unknown[0]}; the {num_layers} layers are 0 to {num_layers - 1}, or -1 to -{num_layers} from the "
            f"end.\n  Set dense_layers={[n for n in dense_layers if n not in unknown]}."
        )
    dense = {layer % num_layers for layer in dense_layers}
    full = {layer for layer, window in enumerate(windows) if window is None}
    if not full:
        raise ValueError(
            "attention='sparse' has nothing to do: all layers of this model attend to a window only.\n"
            f"  Got a window of {windows[0]} tokens in each of {num_layers} layers.\n"
            "  Set attention='dense', which costs the window and no more."
        )
    if not full - dense:
        raise ValueError(
            "attention='sparse' has nothing to do: dense_layers names every layer that attends to everything.\n"
            f"  Got dense_layers={list(dense_layers)}; these layers are {sorted(full)}.\n"
            "  Set attention='dense', or name fewer layers, such as dense_layers=[]."
        )
    return frozenset(full - dense)
