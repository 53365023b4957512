"""Ratios of step and ceiling that were reached before: what a new measurement is held against."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomb_accel.bench.step import StepResult
from oomb_accel.config import unknown_message
from oomb_accel.reading import Unreadable, file_text, json_value
from oomb_accel.writing import saying

SHIPPED = Path(__file__).with_name("reference.json")
"""References that come with the package: a list of the fields of `Reference`, written by ``oomb bench step --save``."""
ALLOWED_LOSS = 0.05
"""Share of a reference ratio that a measurement may lack: what runs scatter, and no more."""
_VERSIONS = ("torch", "triton", "transformers", "peft", "liger-kernel", "oomb-accel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One measurement. The fields up to ``liger`` say of what."""

    gpu: str
    """As the driver names it."""
    shape: str
    attention: str
    top_k: int | None
    tokens: int
    chunk_tokens: int
    base_dtype: str
    liger: bool
    """Whether Liger's norm, RoPE and SwiGLU ran: without them a step is slower."""
    ratio: float
    """Ceiling over step."""
    tokens_per_second: float
    versions: dict[str, str | None]
    """None for a package that was not there."""
    date: str

    @property
    def setting(self) -> tuple[object, ...]:
        """What a measurement must have in common with it."""
        fields = [field.name for field in dataclasses.fields(self)]
        return tuple(getattr(self, name) for name in fields[: fields.index("liger") + 1])

    def origin(self) -> str:
        """Versions and date in words."""
        found = [f"{name} {version}" for name, version in self.versions.items() if version is not None]
        missing = [f"without {name}" for name, version in self.versions.items() if version is None]
        return f"{', '.join([*found, *missing])}; {self.date}"


def reference_of(result: StepResult, gpu: str, versions: Mapping[str, str | None]) -> Reference:
    """A measurement as a reference for later ones.

    Args:
        versions: of all packages; those that bear on speed are taken.
    """
    sizes = result.sizes
    return Reference(
        gpu=gpu,
        shape=sizes.shape,
        attention=sizes.attention,
        top_k=sizes.top_k,
        tokens=sizes.tokens,
        chunk_tokens=sizes.chunk_tokens,
        base_dtype=sizes.base_dtype,
        liger=result.liger,
        ratio=round(result.ratio, 4),
        tokens_per_second=round(result.tokens_per_second, 1),
        versions={name: versions.get(name) for name in _VERSIONS},
        date=datetime.date.today().isoformat(),
    )


def read_references(path: Path) -> list[Reference]:
    """The references in a file.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        found = json_value(file_text(path))
    except Unreadable as error:
        raise ValueError(_unreadable(path, str(error))) from None
    except json.JSONDecodeError as error:
        raise ValueError(_unreadable(path, f"It is no JSON: {error}.")) from None
    if not isinstance(found, list):
        raise ValueError(_unreadable(path, f"It holds {type(found).__name__}, not a list."))
    return [_reference(entry, path) for entry in found]


def _reference(entry: Any, path: Path) -> Reference:
    if not isinstance(entry, dict):
        raise ValueError(_unreadable(path, f"An entry is {type(entry).__name__}, not an object."))
    fields = {field.name: field.type for field in dataclasses.fields(Reference)}
    for name in entry:
        if name not in fields:
            raise ValueError(unknown_message("field", str(name), list(fields), f"in {path}"))
    missing = [name for name in fields if name not in entry]
    if missing:
        raise ValueError(_unreadable(path, f"An entry has no {', '.join(missing)}."))
    if not isinstance(entry["ratio"], (int, float)) or not entry["ratio"] > 0:
        raise ValueError(_unreadable(path, f"A ratio is {entry['ratio']!r}, not a number above 0."))
    if not isinstance(entry["versions"], dict):
        raise ValueError(_unreadable(path, "The versions of an entry are no object."))
    return Reference(**entry)


def _unreadable(path: Path, problem: str) -> str:
    return (
        f"The references cannot be read from {path}.\n  {problem}\n"
        "  Write one with oomb bench step --save FILE, or leave --reference out for those of the package."
    )


def matching(references: Sequence[Reference], measured: Reference) -> Reference | None:
    """The reference of the same GPU and settings; the last one where there are several."""
    return next((known for known in reversed(references) if known.setting == measured.setting), None)


def save_reference(path: Path, measured: Reference) -> None:
    """Put a measurement into a file, in place of one of the same GPU and settings.

    Raises:
        ValueError: the file is there and holds something else.
        CannotWriteError: it cannot be written.
    """
    known = read_references(path) if path.exists() else []
    entries = [*(entry for entry in known if entry.setting != measured.setting), measured]
    text = json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2) + "\n"
    with saying("The reference", path.parent, f"Use --save {path.name}, or a folder of your own."):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def regression(measured: Reference, known: Reference) -> str | None:
    """What to say of a measurement that has lost more than `ALLOWED_LOSS` of a reference; None where it has not."""
    least = known.ratio * (1 - ALLOWED_LOSS)
    if measured.ratio >= least:
        return None
    return (
        "The step is slower against its ceiling than it was.\n"
        f"  ceiling / step is {measured.ratio:.3f}, {least:.3f} or more is wanted: the reference is {known.ratio:.3f} "
        f"({known.origin()}); here: {measured.origin()}.\n"
        "  Run it again with nothing else on the GPU; then look for what differs in versions, and report it with the "
        "output of --json."
    )
