"""Every message of the packages is found in docs/troubleshooting.md by its first line."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.messages import ROOT, first_lines

PAGE = ROOT / "docs" / "troubleshooting.md"


def documented() -> list[str]:
    """What stands in the first column of the tables, as code."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_message_is_documented() -> None:
    known = set(documented())
    missing = [f"{line}   ({place})" for line, place in first_lines().items() if line not in known]
    assert not missing, "\n".join(["not in docs/troubleshooting.md:", *sorted(missing)])


def test_none_is_documented_twice() -> None:
    lines = documented()
    assert len(lines) == len(set(lines)), sorted({line for line in lines if lines.count(line) > 1})


def test_messages_are_collected(tmp_path: Path) -> None:
    """Plain and joined texts, texts of functions, and errors that are returned; not what another error says."""
    package = tmp_path / "oomb_accel"
    package.mkdir()
    (package / "some.py").write_text(
        "def text(n):\n    return f'Made for {n}.\\n  Got more.'\n"
        "def check(n):\n"
        "    if n: raise ValueError(f'{n!r} is {n}{n}.\\n' '  Second line.')\n"
        "    if n: raise RuntimeError(text(n).replace('a', 'b'))\n"
        "    if n: raise ValueError('In ' + n)\n"
        "    if n: raise ValueError('One' if n else 'Other')\n"
        "    try: pass\n"
        "    except OSError as error: raise ValueError(str(error)) from None\n"
        "    return OwnError(3, 'Returned.')\n"
        "class Own:\n"
        "    def text(self): return 'Warned.\\n  More.'\n"
        "    def warn(self):\n"
        "        warnings.warn(self.text(), RuntimeWarning, stacklevel=2)\n"
        "        self.tell('Not said.')\n"
    )
    expected = {"Warned.", "... is ....", "Made for ....", "In ...", "One", "Other", "Returned."}
    assert set(first_lines(tmp_path)) == expected
