"""``progress.json`` of a checkpoint: which run wrote it, at which step, and which files belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from oomb_accel.reading import Unreadable, json_object, shown

PROGRESS = "progress.json"
"""Written last into a checkpoint that a run can go on from."""
FORMAT = 1
"""Version of the file and of what lies beside it."""
_FIELDS: dict[str, type] = {
    "step": int,
    "documents_per_step": int,
    "group": int,
    "strategy": str,
    "num_processes": int,
    "identity": dict,
    "summary": dict,
    "recipe": dict,
    "files": dict,
}


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says about the run that wrote it.

    Raises:
        ValueError: the file is broken, or of a newer version.
    """
    try:
        values = json_object(checkpoint / PROGRESS)
        if values.get("format", FORMAT) != FORMAT:
            raise Unreadable(f"It has format {shown(values['format'])}, this version of oomb_accel writes {FORMAT}.")
        for name, kind in _FIELDS.items():
            if type(values.get(name)) is not kind:
                raise Unreadable(f"Its {name} is {shown(values.get(name))}, no {kind.__name__}.")
    except Unreadable as error:
        raise ValueError(
            f"The checkpoint {str(checkpoint)!r} cannot be read: {PROGRESS} is not what it was.\n  {error}\n"
            f"  {_remedy(checkpoint)}"
        ) from None
    return values


def step_of(checkpoint: Path) -> int:
    """Number of the last step before the checkpoint."""
    return int(read_progress(checkpoint)["step"])


def files_of(folder: Path) -> dict[str, int]:
    """Bytes of every file in a folder, by its name relative to the folder above."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder.parent).as_posix(): path.stat().st_size for path in files}


def check_whole(checkpoint: Path, others: Sequence[Path] = ()) -> None:
    """Whether all files are there as they were written.

    Args:
        others: checkpoints that a run could go on from instead.

    Raises:
        ValueError: one is missing, or has another size.
    """
    for name, size in read_progress(checkpoint)["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"The checkpoint {str(checkpoint)!r} names a file outside of itself.\n  Got {shown(name)}.\n"
                "  Use checkpoints that oomb train has written only."
            )
        file = checkpoint / path
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found:,} bytes, and was written with {size:,}"
            raise ValueError(
                f"The checkpoint {str(checkpoint)!r} is not whole.\n  {name} {state}.\n  {_remedy(checkpoint, others)}"
            )


def unreadable_state(checkpoint: Path, name: str, error: Exception) -> ValueError:
    """The error for a file of a checkpoint that has its size and not its content."""
    reason = (str(error).splitlines() or [""])[0][:300]
    return ValueError(
        f"The checkpoint {str(checkpoint)!r} cannot be read.\n  {name}: {type(error).__name__}: {reason}\n"
        f"  {_remedy(checkpoint)}"
    )


def _remedy(checkpoint: Path, others: Sequence[Path] = ()) -> str:
    before = [path for path in others if path != checkpoint]
    then = f"goes on from {before[-1].name}" if before else "takes the one before it, or begins anew"
    return f"Remove {checkpoint}: --resume then {then}."
