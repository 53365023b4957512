"""What the packages say when they raise or warn: first lines of messages, read from the source by ``ast``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("oomb_accel", "kernels")
GAP = "..."
"""Stands for what is filled in when the message is made."""

_NOT_FOR_USERS = (
    *("AttributeError", "ConstructorError", "ImportError", "KeyError", "NotImplementedError", "OSError", "TypeError"),
    "ArgumentTypeError",  # argparse's, whose text is the second line of another message
)


def first_lines(root: Path = ROOT) -> dict[str, str]:
    """The first line of each message, and a file and line where it is raised.

    Found are calls of ``warnings.warn``, and of classes called ``...Error`` with a text among their arguments. A text
    that a function makes is looked up in that function, by its name; one that is handed on from another error
    (``str(error)``) is found there.
    """
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    functions: dict[str, list[ast.FunctionDef]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    found: dict[str, str] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not (_is_error(node.func) or _is_warning(node.func)):
                continue
            for text in (text for argument in node.args for text in _texts(argument, functions)):
                line = _first_line(text)
                if any(letter.isalpha() for letter in line):
                    found.setdefault(line, f"{path.relative_to(root)}:{node.lineno}")
    return found


def _is_error(called: ast.expr) -> bool:
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return name.endswith("Error") and name not in _NOT_FOR_USERS


def _is_warning(called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and ast.unparse(called) == "warnings.warn"


def _texts(node: ast.expr, functions: dict[str, list[ast.FunctionDef]]) -> Iterator[str]:
    """The texts that an expression may have, with gaps."""
    template = _template(node)
    if template is not None:
        yield template
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, functions)
        yield from _texts(node.orelse, functions)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # text.replace(...), self.text(...)
        yield from _texts(node.func.value, functions)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "self":
            yield from _texts_of(node.func.attr, functions)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refusal":
        yield from (f"{title}." for title in _texts(node.args[0], functions))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from _texts_of(node.func.id, functions)


def _texts_of(name: str, functions: dict[str, list[ast.FunctionDef]]) -> Iterator[str]:
    """What functions of this name return."""
    for function in functions.get(name, []):
        for made in ast.walk(function):
            if isinstance(made, ast.Return) and made.value is not None:
                yield from _texts(made.value, {})


def _template(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        return None if left is None and right is None else (left or GAP) + (right or GAP)
    return None


def _first_line(text: str) -> str:
    line = text.splitlines()[0].strip() if text.strip() else ""
    while GAP + GAP in line:
        line = line.replace(GAP + GAP, GAP)
    return line
