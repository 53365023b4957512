"""Writes docs/api.md, the reference of the public names, from signatures and docstrings.

python docs/make_api.py            write it
python docs/make_api.py --check    exit code 1 if it would change
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from made_page import write_or_check

import oomb_accel

PAGE = Path(__file__).with_name("api.md")
HEAD = """# API reference

Made from the docstrings by `python docs/make_api.py`; do not edit. Everything here is public: `import oomb_accel`,
and what follows. How to choose settings: [settings](settings.md). Loops: [examples](../launch/examples/README.md).
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def page() -> str:
    """The whole page."""
    names = [name for name in oomb_accel.__all__ if not name.startswith("__")]
    parts = [HEAD, "\n".join(f"* [`{_title(name)}`](#{_anchor(_title(name))})" for name in names) + "\n"]
    for name in names:
        parts += _entry(_title(name), getattr(oomb_accel, name), level=2)
    return "\n".join(parts).rstrip() + "\n"


def _title(name: str) -> str:
    return f"oomb_accel.{name}"


def _anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _entry(title: str, thing: Any, *, level: int) -> Iterator[str]:
    yield f"{'#' * level} {title}\n"
    if inspect.ismodule(thing):
        yield _prose(thing)
        for name in thing.__all__:
            yield from _entry(f"{title}.{name}", getattr(thing, name), level=level + 1)
        return
    yield f"```python\n{_signature(title, thing)}\n```\n"
    yield _prose(thing)
    if inspect.isclass(thing):
        yield from _fields(thing)
        for name, member in vars(thing).items():
            if not name.startswith("_") and _is_documented(member):
                yield from _entry(f"{title.rsplit('.', 1)[-1]}.{name}", _plain(member), level=level + 1)


def _signature(title: str, thing: Any) -> str:
    """One line where it is short, else an argument a line. A property has its type only."""
    if isinstance(thing, property):
        return f"{title}: {thing.fget.__annotations__.get('return', 'Any') if thing.fget else 'Any'}"
    if dataclasses.is_dataclass(thing):
        return f"{title}(...)  # by keyword, see below"
    words: list[str] = []
    kinds = inspect.Parameter
    for item in inspect.signature(thing).parameters.values():
        if item.name in ("self", "cls"):
            continue
        if item.kind is kinds.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        star = "*" if item.kind is kinds.VAR_POSITIONAL else "**" if item.kind is kinds.VAR_KEYWORD else ""
        default = "" if item.default is kinds.empty else f" = {item.default!r}"
        words.append(f"{star}{item.name}: {item.annotation}{default}")
    made = thing if inspect.isclass(thing) else inspect.signature(thing).return_annotation
    end = ")" if inspect.isclass(thing) else f") -> {made}"
    short = f"{title}({', '.join(words)}{end}"
    return short if len(short) <= 110 else f"{title}(\n" + "".join(f"    {word},\n" for word in words) + end


def _prose(thing: Any) -> str:
    """A docstring as Markdown: sections become lists, roles of Sphinx become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.getdoc(thing) or "").replace("``", "`")
    lines: list[str] = []
    inside = head_is_names = False
    for line in text.splitlines():
        head = re.match(rf"({'|'.join(_SECTIONS)}): ?(.*)$", line)
        if head:
            inside, head_is_names = not head[2], head[1] != "Returns"
            lines += ["", f"**{head[1]}:** {head[2]}".rstrip(), *([""] if inside else [])]
            lines = [line for at, line in enumerate(lines) if line or at == 0 or lines[at - 1]]
        elif inside and re.match(r" {4}\S", line):
            name, colon, rest = line.strip().partition(": ")
            lines.append(f"* `{name}`: {rest}" if colon and head_is_names else f"* {line.strip()}")
        elif inside and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            inside = inside and not line
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


def _fields(thing: type) -> Iterator[str]:
    """Fields of a dataclass with their types, defaults and the docstrings under them."""
    if not dataclasses.is_dataclass(thing):
        return
    source = ast.parse(inspect.getsource(thing)).body[0]
    assert isinstance(source, ast.ClassDef)
    for field, text in zip(source.body, [*source.body[1:], ast.Pass()], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if field.target.id.startswith("_"):
            continue
        value = "" if field.value is None else f" = {ast.unparse(field.value)}"
        factory = re.match(r" = field\((?:default=([^,)]*))?", value)
        value = value if factory is None else f" = {factory[1]}" if factory[1] else ""
        yield f"**`{field.target.id}: {ast.unparse(field.annotation)}{value}`**\n"
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield inspect.cleandoc(str(text.value.value)).replace("``", "`") + "\n"


def _is_documented(member: Any) -> bool:
    """Whether it is a method or property with a docstring of its own, and no hook that somebody else calls."""
    kinds = (staticmethod, classmethod, property)
    is_member = inspect.isfunction(member) or isinstance(member, kinds)
    return is_member and bool(_plain(member).__doc__) and not getattr(member, "__name__", "").startswith("on_")


def _plain(member: Any) -> Any:
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
