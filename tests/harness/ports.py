"""Ports for processes of a test that connect with each other."""

from __future__ import annotations

import itertools
import os
import socket


def free_port(start: int | None = None) -> int:
    """The first free one from ``start``, to be below the range from which outgoing connections take theirs; by default
    from another start in each process of the tests."""
    for port in itertools.count(20000 + os.getpid() % 9000 if start is None else start):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError
