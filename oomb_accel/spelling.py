"""What a user types for a setting, for messages of what several commands share: the name in a recipe, or an option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

_NAMES: ContextVar[Mapping[str, str]] = ContextVar("_NAMES", default=MappingProxyType({}))


@contextmanager
def settings_called(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, messages call settings so.

    Args:
        names: what the running command takes for a setting of a recipe, by the setting's name; no text where it takes
            nothing.
    """
    token = _NAMES.set(names)
    try:
        yield
    finally:
        _NAMES.reset(token)


def called(name: str) -> str:
    """What the user types for a setting; no text where the running command has nothing for it."""
    return _NAMES.get().get(name, name)
