"""For scripts that make a page of these docs: write it, or say whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(page: Path, made: str) -> int:
    """With ``--check`` on the command line nothing is written.

    Returns: the exit code, 1 when the page would change.
    """
    if "--check" in sys.argv[1:]:
        same = page.is_file() and page.read_text(encoding="utf-8") == made
        state = "up to date" if same else f"out of date: run python docs/{Path(sys.argv[0]).name}"
        print(f"docs/{page.name} is {state}")
        return 0 if same else 1
    page.write_text(made, encoding="utf-8")
    print(f"{page}: {len(made.splitlines())} lines")
    return 0
