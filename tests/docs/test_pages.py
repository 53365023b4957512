"""The pages of docs/ agree with the code, and their links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.parallelism_config import ParallelismConfig
from transformers import Trainer, TrainingArguments

from oomb_accel import OombConfig
from oomb_accel.cli import COMMANDS
from oomb_accel.training.recipe import Recipe
from tests.docs.messages import ROOT

LINK = re.compile(r"(?<!!)!?\[[^\]]*\]\(([^)\s]+)\)")
FREE = {"api.md", "troubleshooting.md", "benchmarks.md", "sparsity.md"}
"""Pages that may be longer than 200 lines: references, and records of measurements."""


def pages() -> list[Path]:
    """All Markdown files of the repository: at its top and in its own folders, not in what runs and builds leave."""
    folders = ("benchmarks", "configs", "docs", "kernels", "launch", "oomb_accel", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *found])


def text_of(page: Path) -> str:
    """Without code, in which brackets are no links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def dead_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(text_of(page)):
        name, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page if not name else (page.parent / name).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def test_links_lead_somewhere() -> None:
    dead = {str(page.relative_to(ROOT)): links for page in pages() if (links := list(dead_links(page)))}
    assert not dead, dead


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` C\n[x](page.md#a-b-c) [y](#a-b) ![z](no.png) `[q](no.md)`\n```\n[c](no.md)\n```\n[h](http://x.y)\n"
    )
    assert list(dead_links(page)) == ["#a-b", "no.png"]


def test_settings_table_has_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    table = {name: ast.literal_eval(default) for name, default in rows}
    assert table == {field.name: field.default for field in dataclasses.fields(OombConfig)}
    assert list(table) == [field.name for field in dataclasses.fields(OombConfig)] and len(rows) == len(table)


@pytest.mark.parametrize("name", ["api", "recipe"])
def test_references_are_up_to_date(name: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, f"docs/make_{name}.py", "--check"]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_table_of_recipes_has_every_setting() -> None:
    """With what it does, and a type and default that a reader can type."""
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+\.) \|$", (ROOT / "docs/recipe.md").read_text(), re.M
    )
    assert [name for name, *_ in rows] == [field.name for field in dataclasses.fields(Recipe) if field.init]
    assert ("lora_r", "a whole number", "`16`") in [row[:3] for row in rows]
    assert ("data_path", "text or a list of names", "required") in [row[:3] for row in rows]
    assert ("trust_remote_code", "true or false", "`false`") in [row[:3] for row in rows]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_page_is_short_and_in_the_index(page: Path) -> None:
    assert page.name in FREE or len(page.read_text(encoding="utf-8").splitlines()) < 200
    assert page.name in ("index.md", "status.md") or f"({page.name}" in (ROOT / "docs" / "index.md").read_text()


def blocks(page: Path) -> list[str]:
    """Lines of the shell blocks of a page; what was continued on another line is joined."""
    found = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line.strip() for block in found for line in block.replace("\\\n", " ").splitlines()]


def test_commands_in_pages_exist() -> None:
    commands = [line.split()[1:] for page in pages() for line in blocks(page) if line.startswith("oomb ")]
    assert len(commands) > 20
    unknown = [words for words in commands if words[0] not in COMMANDS]
    missing = [
        word for words in commands for word in words if word.startswith("configs/") and not (ROOT / word).exists()
    ]
    assert not unknown and not missing, (unknown, missing)


def column(section: str, number: int) -> set[str]:
    """Names in one column of the table of a section of migration.md: code without spaces, up to its value."""
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[number] for line in text.splitlines() if line.startswith("|")]
    code = [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]
    return {word.split("=")[0].split(":")[0] for word in code if re.fullmatch(r"\w+([=:].*)?", word)}


def test_names_of_recipes_in_migration_exist() -> None:
    values = {"constant", "linear", "cosine", "error", "drop", "start", "end", "split"}
    names = column("axolotl", 2)
    assert len(names) > 15
    assert names <= {field.name for field in dataclasses.fields(Recipe)} | values


def test_names_of_trainers_in_migration_exist() -> None:
    known = {field.name for kind in (TrainingArguments, ParallelismConfig) for field in dataclasses.fields(kind)}
    known |= set(inspect.signature(Trainer.__init__).parameters)
    assert column("transformers' Trainer", 1) <= known
    trl = pytest.importorskip("trl")
    assert column("TRL's SFTTrainer", 1) <= {field.name for field in dataclasses.fields(trl.SFTConfig)}


def test_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.strip().startswith("Apache License") and "END OF TERMS AND CONDITIONS" in text
    for number in range(1, 10):
        assert f"\n   {number}. " in text
    assert "APPENDIX: How to apply the Apache License to your work." in text
