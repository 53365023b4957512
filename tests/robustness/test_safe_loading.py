"""Nothing that the product reads can run code: which calls it makes, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN_PIPES = {"oomb_accel/data/worker.py", "oomb_accel/data/workers.py"}
"""Processes that the product starts itself, which talk through pipes that nobody else has."""
FORBIDDEN = {"torch.load", "eval", "exec", "compile", "yaml.unsafe_load", "yaml.full_load", "os.system", "joblib.load"}


def calls(source: str) -> Iterator[tuple[int, str, ast.Call]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


def unsafe(name: str, source: str) -> list[str]:
    """Calls that may run what a file says, as ``file:line call``."""
    found = []
    for line, function, call in calls(source):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        bad = function in FORBIDDEN or (function.startswith("pickle.") and name not in OWN_PIPES)
        bad |= function == "yaml.load" and "Strict" not in keywords.get("Loader", "")
        bad |= keywords.get("trust_remote_code") == "True" or keywords.get("allow_pickle") == "True"
        bad |= keywords.get("weights_only") == "False" or keywords.get("shell") == "True"
        bad |= function.endswith(".from_pretrained") and "Auto" in function and "trust_remote_code" not in keywords
        if bad:
            found.append(f"{name}:{line} {function}")
    return found


def test_the_product_runs_nothing_that_it_reads() -> None:
    paths = [*(ROOT / "oomb_accel").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    found = [line for name, path in zip(names, paths, strict=True) for line in unsafe(name, path.read_text("utf-8"))]
    assert len(paths) > 100 and found == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "pickle.loads(data)",
        "AutoConfig.from_pretrained(name)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "load(path, weights_only=False)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_what_would_be_found(source: str) -> None:
    assert unsafe("oomb_accel/a.py", source)
