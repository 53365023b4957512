"""Rows of text as columns side by side, without colour: how every table of the command line is printed."""

from __future__ import annotations

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
