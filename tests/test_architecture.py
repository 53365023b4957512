"""The import layers, file sizes and folder rules of the design, read from the source with ``ast``.

Imports inside functions and under ``TYPE_CHECKING`` count too: a lower layer must not know a higher one.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the lowest layer to the highest. The facade is oomb_accel/__init__.py: it may import anything, and only
# the layers that stand above it may import it.
LAYERS = (
    {"columns", "config", "hub", "reading", "schedule", "progress", "sampler", "setting_text", "sources", "spelling"},
    {"writing"},
    {"plan", "memory_report"},
    {"data"},
    {"host"},
    {"pages", "selection_tally"},
    {"selection"},
    {"past"},
    {"foresight"},
    {"kept_on_host"},
    {"kept_results", "offload"},
    {"memory"},
    {"chunk_pass"},
    {"dense_parts", "selected_part"},
    {"attention", "loss", "hooks", "keep", "rng"},
    {"gradients"},
    {"recurrence"},
    {"integrations"},
    {"deepspeed"},
    {"<facade>"},
    {"bench", "training"},
    {"evaluation"},
    {"cli"},
    {"__main__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
NO_TORCH = {
    "columns",
    "config",
    "hub",
    "plan",
    "reading",
    "schedule",
    "setting_text",
    "sources",
    "spelling",
    "writing",
    "host.limits",
}
"""Layers, and modules in them, that only know numbers."""
MAX_LINES = 400
MAX_RECURRENCE_LINES = 300


def imported_names(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of everything that a file imports.

    ``package`` is the dotted package of the file, against which relative imports are resolved.
    ``from a import b`` yields ``a.b``, because b may be a module.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def layer_of(name: str, library: Path) -> str:
    """The layer that a dotted ``oomb_accel...`` name belongs to."""
    parts = name.split(".")
    if len(parts) > 1 and ((library / parts[1]).is_dir() or (library / f"{parts[1]}.py").is_file()):
        return parts[1]
    return "<facade>"


def check_imports(root: Path) -> list[str]:
    """Imports that go up, as ``file:line: what``."""
    library, kernels = root / "oomb_accel", root / "kernels" / "oomb_kernels"
    found = []
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(root)
        package = ".".join(relative.parent.parts)
        module = ".".join(relative.with_suffix("").parts)
        layer = layer_of(module, library)
        if path == library / "__init__.py":
            continue
        if layer not in RANK:
            found.append(f"{relative}:1: {layer} has no layer: add it to LAYERS in tests/test_architecture.py")
            continue
        for line, name in imported_names(path, package):
            top = name.split(".")[0]
            if top == "torch" and NO_TORCH & {layer, module.removeprefix("oomb_accel.")}:
                found.append(f"{relative}:{line}: {layer} imports torch")
            if top == "oomb_accel":
                target = layer_of(name, library)
                if RANK.get(target, len(LAYERS)) > RANK[layer]:
                    found.append(f"{relative}:{line}: {layer} imports {target}, which is a higher layer")
    for path in sorted(kernels.rglob("*.py")):
        package = ".".join(path.relative_to(root / "kernels").parent.parts)
        for line, name in imported_names(path, package):
            if name.split(".")[0] == "oomb_accel":
                found.append(f"{path.relative_to(root)}:{line}: oomb_kernels imports oomb_accel")
    return found


def check_files(root: Path) -> list[str]:
    """Files that are too long, missing or must not exist."""
    found = []
    if (root / "kernels" / "__init__.py").exists():
        found.append("kernels/__init__.py: must not exist, it would hide the package 'kernels' that transformers uses")
    for folder in ("oomb_accel", "kernels/oomb_kernels"):
        paths = sorted((root / folder).rglob("*.py"))
        if not paths:
            found.append(f"{folder}: no Python files")
        for path in paths:
            relative = path.relative_to(root)
            limit = MAX_RECURRENCE_LINES if relative == Path("oomb_accel/recurrence.py") else MAX_LINES
            num_lines = len(path.read_text(encoding="utf-8").splitlines())
            if num_lines > limit:
                found.append(f"{relative}: {num_lines} lines, the limit is {limit}: it has more than one job, split it")
    return found


def test_imports_point_one_way() -> None:
    assert check_imports(ROOT) == []


def test_files_follow_the_rules() -> None:
    assert check_files(ROOT) == []


GOOD = {
    "oomb_accel/__init__.py": "from .training import train\nfrom .config import OombConfig\n",
    "oomb_accel/__main__.py": "from .cli import main\n",
    "oomb_accel/config.py": "import dataclasses\n",
    "oomb_accel/schedule.py": "from .config import OombConfig\n",
    "oomb_accel/host/arena.py": "import torch\nfrom .limits import host_limits\n",
    "oomb_accel/host/limits.py": "from ..schedule import Chunk\n",
    "oomb_accel/pages/__init__.py": "from .table import PageTable\nfrom ..host import arena\n",
    "oomb_accel/pages/table.py": "import torch\nfrom ..schedule import Chunk\n",
    "oomb_accel/attention.py": "import torch\nimport oomb_kernels\nfrom .pages.table import PageTable\n",
    "oomb_accel/loss.py": "import torch\n",
    "oomb_accel/recurrence.py": "from . import attention, loss\n",
    "oomb_accel/integrations/support.py": "from ..recurrence import ChunkRecurrence\n",
    "oomb_accel/training/train.py": "import oomb_accel\nfrom .. import enable, integrations\n",
    "oomb_accel/cli/__init__.py": "from ..training import train\n",
    "kernels/oomb_kernels/__init__.py": "",
    "kernels/oomb_kernels/merge.py": "import torch\nfrom . import other\n",
}

# A change to the good tree, and the whole of what the checks must then say.
BAD = [
    ("oomb_accel/schedule.py", "import torch\n", "oomb_accel/schedule.py:1: schedule imports torch"),
    ("oomb_accel/config.py", "from torch import nn\n", "oomb_accel/config.py:1: config imports torch"),
    ("oomb_accel/host/limits.py", "import torch\n", "oomb_accel/host/limits.py:1: host imports torch"),
    (
        "oomb_accel/host/arena.py",
        "from ..pages import PageTable\n",
        "oomb_accel/host/arena.py:1: host imports pages, which is a higher layer",
    ),
    (
        "oomb_accel/schedule.py",
        "from .attention import attend\n",
        "oomb_accel/schedule.py:1: schedule imports attention, which is a higher layer",
    ),
    (
        "oomb_accel/pages/table.py",
        "\ndef late():\n    from .. import recurrence\n",
        "oomb_accel/pages/table.py:3: pages imports recurrence, which is a higher layer",
    ),
    (
        "oomb_accel/pages/__init__.py",
        "import oomb_accel.loss\n",
        "oomb_accel/pages/__init__.py:1: pages imports loss, which is a higher layer",
    ),
    (
        "oomb_accel/loss.py",
        "from oomb_accel import OombConfig\n",
        "oomb_accel/loss.py:1: loss imports <facade>, which is a higher layer",
    ),
    (
        "oomb_accel/integrations/support.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..cli import main\n",
        "oomb_accel/integrations/support.py:3: integrations imports cli, which is a higher layer",
    ),
    (
        "oomb_accel/helpers.py",
        "",
        "oomb_accel/helpers.py:1: helpers has no layer: add it to LAYERS in tests/test_architecture.py",
    ),
    (
        "kernels/oomb_kernels/merge.py",
        "from oomb_accel.config import OombConfig\n",
        "kernels/oomb_kernels/merge.py:1: oomb_kernels imports oomb_accel",
    ),
    (
        "kernels/__init__.py",
        "",
        "kernels/__init__.py: must not exist, it would hide the package 'kernels' that transformers uses",
    ),
    (
        "oomb_accel/recurrence.py",
        "x = 1\n" * 301,
        "oomb_accel/recurrence.py: 301 lines, the limit is 300: it has more than one job, split it",
    ),
    (
        "kernels/oomb_kernels/merge.py",
        "x = 1\n" * 401,
        "kernels/oomb_kernels/merge.py: 401 lines, the limit is 400: it has more than one job, split it",
    ),
]


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_checks_accept_a_good_tree(tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD)
    assert check_imports(tmp_path) + check_files(tmp_path) == []


@pytest.mark.parametrize(("name", "text", "message"), BAD, ids=[message for _, _, message in BAD])
def test_checks_find_a_broken_rule(tmp_path: Path, name: str, text: str, message: str) -> None:
    write_tree(tmp_path, {**GOOD, name: text})
    assert check_imports(tmp_path) + check_files(tmp_path) == [message]


def test_checks_find_an_empty_tree(tmp_path: Path) -> None:
    assert check_files(tmp_path) == ["oomb_accel: no Python files", "kernels/oomb_kernels: no Python files"]
