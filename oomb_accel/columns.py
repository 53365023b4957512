"""Rows of text as columns side by side, without colour: how every table of the command line is printed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """The rows, each column as wide as its longest cell, two spaces between columns.

    Args:
        rows: all with as many cells; at least one.
        left: numbers of the columns that are words, and go to the left; all others go to the right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sides = ["<" if column in left else ">" for column in range(len(widths))]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)).rstrip()
        for cells in rows
    )


def folded(text: str, width: int = 100) -> str:
    """The text with lines of at most so many characters. What is folded begins below the last column of its line,
    behind two spaces or more, or two spaces further in than the line."""
    return "\n".join(_folded_line(line, width) if len(line) > width else line for line in text.split("\n"))


def _folded_line(line: str, width: int) -> str:
    start = len(line) - len(line.lstrip())
    columns = [gap.end() for gap in re.finditer(r"\S {2,}", line) if gap.end() < width // 2]
    indent = " " * (columns[-1] if columns else start + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
