"""The settings of oomb_accel: one dataclass, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oomb_accel.reading import shown
from oomb_accel.setting_text import TOKEN_SETTINGS, with_unit

Auto = Literal["auto"]
SPARSE_SETTINGS = (
    *("top_k", "q_block", "sink_pages", "recent_pages", "dense_layers"),
    *("select_per", "page_budget", "causal_selection"),
)
"""Settings that have a meaning with ``attention="sparse"`` only."""
_HOST_OUTPUTS = (
    "Set keep_outputs: auto (the default), which does this now; host_memory_gib: N sets how much it may take."
)
FORMER_VALUES = {("keep_outputs", "host"): _HOST_OUTPUTS}
"""What to write instead of values that settings had in earlier versions."""
_MOST = 2**31 - 1
"""Of every whole number."""


class _Given:
    """Which settings were written down, as against those that have their default."""

    __slots__ = ("_written",)

    @property
    def given(self) -> frozenset[str]:
        """Names of the settings that were passed to the constructor. A copy tells those that are not the default."""
        changed = (name for name in _TYPES if getattr(self, name) != _default(name))
        return getattr(self, "_written", None) or frozenset(changed)


@dataclass(kw_only=True, slots=True, frozen=True)
class OombConfig(_Given):
    """How a model is trained on long documents.

    Everything has a default that is good on one large GPU. The same names are used in Python, in recipes
    and in the ``"oomb"`` block of a DeepSpeed JSON.

    Raises:
        ValueError: a value of the wrong type, out of range, or in contradiction to another one.
    """

    enabled: bool = True
    """False leaves the model as it is; ``enable`` then does nothing and says so."""

    chunk_tokens: int | Auto = 8192
    """Tokens per chunk: the unit of activation memory. Smaller saves memory, larger runs faster. ``"auto"`` is chosen
    once, at the first training step, as ``oomb estimate --chunk_tokens auto`` does: from the model, the memory that is
    free then and the length of the document, or of the longest one where ``oomb train`` knows it."""

    page_tokens: int = 128
    """Tokens per KV page. A chunk ends on a page border, so it must be at least one page long."""

    attention: Literal["dense", "sparse"] = "dense"
    """``"dense"`` is exact full attention. ``"sparse"`` attends, beside the own chunk, to the ``top_k`` best pages of a
    document's past, wherever gradients are enabled; without them (evaluation) attention is dense, as a model is served.
    The settings up to ``causal_selection`` belong to it."""

    top_k: int = 64
    """Earlier pages that each block of queries selects, on top of sinks and recent pages."""

    q_block: Literal[64, 128] = 128
    """Consecutive queries that share a selection."""

    sink_pages: int = 1
    """First pages of a document that everybody attends to, unselected."""

    recent_pages: int = 4
    """Last pages before the chunk that everybody in it attends to, unselected."""

    dense_layers: tuple[int, ...] = ()
    """Layers that attend to everything all the same: numbers from 0, or negative ones from the end."""

    select_per: Literal["kv_head", "layer"] = "kv_head"
    """Who shares a selection: the query heads of one KV head, or all heads of a layer."""

    page_budget: int | None = None
    """Most distinct pages that the lists of a chunk may name, per layer and KV head; at least ``top_k``. None is no
    bound."""

    causal_selection: bool = False
    """Each block selects with the queries of the block before it, so that no token has a part in choosing the pages
    of an earlier one. Otherwise the queries of a block choose together."""

    backend: Literal["auto", "cudnn", "flash", "torch"] = "auto"
    """Kernel library for attention. ``"auto"`` takes the fastest one that supports the layer."""

    span_tokens: int = 32768
    """Earlier tokens per call of the attention kernel; rounded down to whole pages."""

    page_dtype: Literal["model", "float8"] = "model"
    """Storage of K and V. ``"float8"`` halves it: earlier chunks are then attended to as 8-bit floats (e4m3) with a
    scale for each page, which changes loss and gradients a little, see docs/numerics.md. Needs Ada, Hopper or later."""

    page_grad_dtype: Literal["float32", "bfloat16"] | Auto = "float32"
    """Storage of page gradients. Sums are always made in fp32; bfloat16 is rounded stochastically. ``"auto"`` is chosen
    together with the chunk: float32 where all pages then stay on the device, else bfloat16."""

    base_dtype: Literal["model", "float8"] = "model"
    """What the decoder's frozen linear layers multiply in. ``"float8"`` makes their products from 8-bit floats (e4m3)
    with a scale for each row, which is faster and changes loss and gradients a little, see docs/numerics.md. It
    costs memory: two copies in 8 bits beside the weights, as much as these take in bf16 once more, 12 GiB for a 7B.
    Needs adapters, Ada, Hopper or later, and no ZeRO 3."""

    offload: bool | Auto = "auto"
    """Keep pages that the device has no room for in host memory. ``"auto"`` does so where they do not fit; False lets
    such a step fail; True keeps no more on the device than chunks need at once, whether or not more would fit."""

    device_pages_gib: float | Auto = "auto"
    """Device memory for pages and their gradients. ``"auto"`` is what is free when a step starts, less what a chunk
    needs otherwise."""

    host_memory_gib: float | Auto = "auto"
    """Most host memory that this process pins for pages and kept outputs. ``"auto"`` is its share of what the
    machine has free."""

    keep_outputs: bool | Literal["auto"] = "auto"
    """Keep outputs of the forward sweep, so that the recompute need not make them again.

    First comes the gradient of the head, ``2 * hidden + 4`` bytes per token in bf16, so that the recompute skips a
    frozen head; then attention outputs and LSE, ``2 * heads * head_dim + 4 * heads`` bytes per token and layer, so
    that it skips attention; then outputs of the last product of each MLP, ``2 * (hidden + r)`` bytes, and of
    attention's, as many, so that it skips these products where they have LoRA adapters. ``"auto"`` keeps those of the
    latest chunks on the device, as many as its free memory allows, and those of the chunks before them in pinned host
    memory: up to half of what this process may have of it, or up to ``host_memory_gib`` where that is a number;
    nothing with ``offload=False``. True keeps all attention outputs on the device, whatever is free, and the rest as
    ``"auto"`` does; False keeps nothing.
    """

    keep_last_graph: bool = True
    """Run the last chunk once, with its graph, instead of twice. Its activations then live between forward
    and backward; set False when several forward calls come before one backward."""

    deterministic: bool = False
    """Deterministic kernels throughout: the same step twice is bit-equal. Slower on GPUs with cuDNN."""

    beyond_trained_length: Literal["error", "allow"] = "error"
    """What to do with a document longer than the range that the model's RoPE was trained or scaled for."""

    progress: bool | Auto = "auto"
    """A progress line within each step; ``"auto"`` shows it when stderr is a terminal."""

    self_test: bool = True
    """Before training under DeepSpeed, prove on a tiny model that the gradients of several chunks add up under
    the same ZeRO stage and offload settings. Takes seconds."""

    timeout_minutes: int | Auto = "auto"
    """How long ranks wait for each other before they give up. ``"auto"`` is derived from the expected time of
    a step on the longest document, and never shortens what is set already."""

    def __post_init__(self) -> None:
        for name in _TYPES:
            object.__setattr__(self, name, checked_setting(name, getattr(self, name)))
        self._check_most()
        for name in ("chunk_tokens", "page_tokens", "span_tokens", "timeout_minutes"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be positive.\n  Got {name}={getattr(self, name)}.\n"
                    f"  Set {name}={_default(name)!r} (the default)."
                )
        if self.chunk_tokens != "auto" and self.chunk_tokens < self.page_tokens:
            raise ValueError(
                "A chunk must hold at least one page.\n"
                f"  Got chunk_tokens={self.chunk_tokens} with page_tokens={self.page_tokens}.\n"
                f"  Set chunk_tokens={self.page_tokens} or more, or page_tokens={self.chunk_tokens} or less."
            )
        if self.span_tokens < self.page_tokens:
            raise ValueError(
                "A span must hold at least one page.\n"
                f"  Got span_tokens={self.span_tokens} with page_tokens={self.page_tokens}.\n"
                f"  Set span_tokens={max(self.page_tokens, _default('span_tokens'))}."
            )
        self._check_sparse()
        self._check_memory()
        if self.deterministic and self.backend == "cudnn":
            raise ValueError(
                "backend='cudnn' has no deterministic backward.\n"
                "  Got backend='cudnn' with deterministic=True.\n"
                "  Set backend='auto' (takes flash on the GPU) or deterministic=False."
            )

    def _check_most(self) -> None:
        for name in _TYPES:
            value = getattr(self, name)
            if type(value) is int and value > _MOST:
                raise ValueError(
                    f"{name} is too large.\n  Got {name}={shown(value)}; the most is {_MOST}.\n"
                    f"  Set {name}={_default(name)!r} (the default)."
                )

    def _check_sparse(self) -> None:
        """Ranges of the settings of sparse attention, whether or not it is on."""
        for name, least in (("top_k", 1), ("sink_pages", 0), ("recent_pages", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} must be at least {least}.\n  Got {name}={getattr(self, name)}.\n"
                    f"  Set {name}={_default(name)} (the default)."
                )
        if self.page_budget is not None and self.page_budget < self.top_k:
            raise ValueError(
                "The pages that one block selects must fit the budget of its chunk.\n"
                f"  Got page_budget={self.page_budget} with top_k={self.top_k}.\n"
                f"  Set page_budget={self.top_k} or more, or leave it out for no bound."
            )

    def _check_memory(self) -> None:
        for name in ("device_pages_gib", "host_memory_gib"):
            value = getattr(self, name)
            if value != "auto" and not 0 < value < float("inf"):
                raise ValueError(
                    f"{name} must be a size in GiB.\n  Got {name}={value}.\n  Set {name}='auto' (the default)."
                )
            if self.offload is False and value != "auto":
                raise ValueError(
                    f"{name} has no meaning without offload.\n  Got {name}={value} with offload=False.\n"
                    f"  Set offload='auto' (the default), or leave {name} out."
                )

        if self.offload is True and self.device_pages_gib != "auto":
            raise ValueError(
                "offload=True keeps no more pages on the device than chunks need at once, whatever room there is.\n"
                f"  Got offload=True with device_pages_gib={self.device_pages_gib}.\n"
                "  Set offload='auto' (the default) with device_pages_gib, or leave device_pages_gib out."
            )

    @classmethod
    def from_dict(cls, block: Mapping[str, Any], *, place: str = "the oomb block") -> OombConfig:
        """Make a config from a mapping, as in JSON or yaml.

        Args:
            block: setting names and values.
            place: where the mapping came from, for messages.

        Raises:
            ValueError: an unknown key (the nearest valid one is named) or a value that does not fit.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in block:
            if key not in known:
                raise ValueError(unknown_key_message(str(key), known, place))
        try:
            return cls(**block)
        except ValueError as error:
            raise ValueError(f"In {place}: {error}") from None

    @property
    def known_chunk_tokens(self) -> int:
        """``chunk_tokens``; while "auto" is not chosen yet, the usual number, which evaluation works with."""
        return max(_default("chunk_tokens"), self.page_tokens) if self.chunk_tokens == "auto" else self.chunk_tokens

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, for JSON or yaml."""
        return {name: plain_value(getattr(self, name)) for name in _TYPES}


def unknown_key_message(key: str, known: list[str], place: str, *, nearest: str | None = None) -> str:
    """The text of the error for a misspelt key: what, where, and the nearest valid one."""
    return unknown_message("key", key, known, f"in {place}", nearest=nearest)


def unknown_message(
    kind: str, word: str, known: list[str], where: str, *, nearest: str | None = None, instead: str | None = None
) -> str:
    """The text of the error for a misspelt word of any kind.

    Args:
        kind: what the word should have been, such as ``option``.
        where: with its preposition, such as ``on the command line``.
        nearest: the valid word that was meant, where that is known.
        instead: a sentence that says what to write, where there is one.
    """
    near = [nearest] if nearest else difflib.get_close_matches(word[:100], known, n=1, cutoff=0.5)
    meant = f"Did you mean {near[0]!r}?" if near else f"Valid {kind}s: {', '.join(sorted(known))}."
    return f"Unknown {kind} {shown(word)} {where}.\n  {_number_known(len(known))}\n  {instead or meant}"


def _number_known(number: int) -> str:
    return (
        "It is not the one that is known there." if number == 1 else f"It is none of the {number} that are known there."
    )


def checked_setting(name: str, value: Any) -> Any:
    """The value of a setting as `OombConfig` holds it: a list becomes a tuple. Which other settings stand beside it is
    not looked at.

    Raises:
        ValueError: the value is not allowed for this setting.
    """
    expected = _TYPES[name]
    options = typing.get_args(expected) if _is_union(expected) else (expected,)
    value = with_unit(value) if name in TOKEN_SETTINGS else value
    value = tuple(value) if isinstance(value, list) else value
    value = float(value) if type(value) is int and float in options else value
    if any(_fits(value, option) for option in options):
        return value
    wanted = " or ".join(_spell(option) for option in options)
    wanted += ", or 8K: K is 1,024 and M 1,048,576" if name in TOKEN_SETTINGS else ""
    raise ValueError(
        f"{name} has a value that is not allowed.\n  Got {name}={shown(plain_value(value))} ({type(value).__name__}).\n"
        f"  {allowed(name, value, options, wanted)}"
    )


def allowed(name: str, value: object, options: Sequence[Any], wanted: str) -> str:
    """The line of an error that says what a setting takes, first the nearest of its words where one is near.

    Args:
        name: of the setting.
        options: the types.
        wanted: these in words.
    """
    if isinstance(value, str) and (name, value.lower()) in FORMER_VALUES:
        return FORMER_VALUES[name, value.lower()]
    words = [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]
    words = [word for word in words if isinstance(word, str)]
    near = difflib.get_close_matches(value[:100].lower(), words, n=1) if isinstance(value, str) else []
    return f"{f'Did you mean {near[0]!r}? ' if near else ''}Allowed: {wanted}."


def plain_value(value: Any) -> Any:
    """A setting's value as JSON and yaml write it."""
    return list(value) if isinstance(value, tuple) else value


def _default(name: str) -> Any:
    return OombConfig.__dataclass_fields__[name].default


def _is_union(expected: Any) -> bool:
    return typing.get_origin(expected) in (typing.Union, types.UnionType)


def _fits(value: object, option: Any) -> bool:
    if typing.get_origin(option) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(option))
    if typing.get_origin(option) is tuple:
        return isinstance(value, tuple) and all(type(item) is int for item in value)
    return type(value) is option


def _spell(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(option))
    words = {bool: "True or False", int: "a whole number", float: "a number", types.NoneType: "None"}
    return words.get(option, "a list of whole numbers")


_TYPES: dict[str, Any] = typing.get_type_hints(OombConfig)


def _naming_unknown_settings(init: Callable[..., None]) -> Callable[..., None]:
    """The dataclass's constructor, with the nearest valid name in the error for a misspelt one."""

    @functools.wraps(init)
    def checked(self: OombConfig, **settings: Any) -> None:
        for name in settings:
            if name not in _TYPES:
                raise ValueError(unknown_key_message(name, list(_TYPES), "OombConfig"))
        init(self, **settings)
        if len(settings) < len(_TYPES):  # all of them: a copy, by dataclasses.replace for one
            object.__setattr__(self, "_written", frozenset(settings))
        unused = [name for name in SPARSE_SETTINGS if name in self.given]
        if self.attention != "sparse" and unused:
            raise ValueError(
                f"{unused[0]} has no meaning with dense attention.\n"
                f"  Got {unused[0]}={plain_value(getattr(self, unused[0]))!r} with attention={self.attention!r}.\n"
                f"  Set attention='sparse', or leave {', '.join(unused)} out."
            )

    return checked


OombConfig.__init__ = _naming_unknown_settings(OombConfig.__init__)  # type: ignore[method-assign]
