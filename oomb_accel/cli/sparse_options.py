"""The settings of sparse attention as options of a command: those of `OombConfig`, in either spelling."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from oomb_accel.config import SPARSE_SETTINGS
from oomb_accel.sources import from_text


def add_sparse_options(parser: argparse.ArgumentParser, remark: str = "") -> None:
    """``--attention``, and ``--top_k`` and the like."""
    parser.add_argument("--attention", default="dense", choices=["dense", "sparse"])
    group = parser.add_argument_group(
        "settings of sparse attention", f"as in OombConfig, which oomb train --help explains{remark}"
    )
    for name in SPARSE_SETTINGS:
        spellings = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
        if name == "causal_selection":
            group.add_argument(*spellings, action="store_const", const="true")
        else:
            group.add_argument(*spellings)


def sparse_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, as `OombConfig` takes them.

    Raises:
        ValueError: a value that has no meaning.
    """
    given = {name: getattr(options, name) for name in SPARSE_SETTINGS if getattr(options, name) is not None}
    return {name: from_text(name, str(value), "the command line") for name, value in given.items()}


def joined(words: Sequence[str]) -> list[str]:
    """The words with values such as ``-1,0`` joined to their option: argparse would take them for options."""
    found: list[str] = []
    for word in words:
        if re.match(r"-\d", word) and found and re.fullmatch(r"--[\w-]+", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found
