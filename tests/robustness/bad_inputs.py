"""Bad inputs as a table: what is typed in a folder with a wrong file, what is said, and a remedy that is tried."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from oomb_accel.cli import main

Snapshot = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for one case, beside what all cases share."""

    folder: Path
    model: Path
    """A tiny model with its tokenizer, not to be written to."""
    run: Path
    """A finished run with checkpoints 1 to 3, not to be written to."""

    def write(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Of a recipe that would work; None leaves a setting out."""
        if "data_path" not in changes:
            changes["data_path"] = self.write("text.txt", "the quick brown fox jumps over the lazy dog. " * 8)
        values = {
            "model_name_or_path": str(self.model),
            "output_dir": str(self.folder / "out"),
            "max_steps": 1,
            "lora_r": 4,
            "oomb": {"chunk_tokens": 64, "page_tokens": 16},
            **changes,
        }
        return {name: value for name, value in values.items() if value is not None}

    def recipe(self, **changes: Any) -> str:
        return self.write("recipe.yaml", yaml.safe_dump(self.settings(**changes)))

    def recipe_with(self, line: str) -> str:
        """A good recipe with a line of raw yaml behind it."""
        return self.write("recipe.yaml", yaml.safe_dump(self.settings()) + line + "\n")

    def rows(self, *rows: Any, name: str = "rows.jsonl") -> str:
        return self.write(name, "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")


@dataclass(frozen=True, slots=True)
class Bad:
    """One bad input."""

    name: str
    words: Callable[[Place], list[str]]
    """Makes what is wrong, and says what is typed."""
    says: tuple[str, ...]
    """In the message: the value, and what helps."""
    code: int = 2
    remedy: bool = False
    """The setting that the last line of the message names is tried, in a dry run."""


def train(*flags: str, **changes: Any) -> Callable[[Place], list[str]]:
    """``oomb train`` with a recipe that would work but for these changes."""
    return lambda place: ["train", place.recipe(**changes), *flags]


def train_raw(line: str) -> Callable[[Place], list[str]]:
    return lambda place: ["train", place.recipe_with(line)]


def snapshot(folder: Path) -> Snapshot:
    """Everything in a folder, with sizes and times."""
    found = [(path, path.lstat()) for path in folder.rglob("*")]
    return {str(path): (stat.st_size, stat.st_mtime_ns if not path.is_dir() else 0) for path, stat in found}


RECIPES_ONLY = re.compile(r"\b(model_name_or_path|data_(path|split|include|exclude|cache)|(?<!--)trust_remote_code)\b")
"""Settings that commands without a recipe do not have, under these names."""


def refused(words: list[str], code: int, says: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command line, which must refuse in three parts without a stack trace. Returns the message."""
    capsys.readouterr()
    got = main(words)
    printed = capsys.readouterr()
    message = printed.err[printed.err.rfind(f"\noomb {words[0]}: ") + 1 :]
    assert got == code, printed.err[-3000:]
    assert "Traceback" not in printed.err + printed.out, printed.err[-3000:]
    assert message.startswith(f"oomb {words[0]}: "), printed.err[-3000:]
    lines = message.rstrip().splitlines()
    assert len(lines) == 3, f"not three lines: {message}"
    assert all(line.startswith("  ") for line in lines[1:]), message
    assert len(message) < 4000, message[:5000]
    if words[0] in ("eval", "verify", "merge"):
        assert not RECIPES_ONLY.search(message), f"names what the command does not take: {message}"
    for word in says:
        assert word in message, f"{word!r} is not in: {message}"
    return message


def check(case: Bad, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The case is refused, nothing is written, and the remedy works."""
    words = case.words(place)
    before = [snapshot(folder) for folder in (place.folder, place.model, place.run)]
    message = refused(words, case.code, case.says, capsys)
    assert [snapshot(folder) for folder in (place.folder, place.model, place.run)] == before, "something was written"
    if case.remedy:
        remedied = with_remedy(words, message)
        assert main([*remedied, "--dry_run"]) == 0, f"{remedied}\n{capsys.readouterr().err}"


def with_remedy(words: list[str], message: str) -> list[str]:
    """The words with the setting that the last line of the message says, such as ``Set max_steps=3``."""
    found = re.search(
        r"(?:Set|Write|Use|or) (?:--)?([a-z_.]+)(?:[=:] ?|, for example | )([\w./'-]+)",
        message.rstrip().splitlines()[-1],
    )
    assert found, message
    name, value = found[1], found[2].rstrip(".").strip("'")
    kept = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, _ = word.partition("=")
        if flag.startswith("--") and flag.removeprefix("--").replace("-", "_") == name:
            if not equals and left and not left[0].startswith("--"):
                left.pop(0)
            continue
        kept.append(word)
    return [*kept, f"--{name}={value}"]
